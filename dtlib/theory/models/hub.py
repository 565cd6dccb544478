"""Sizes from the hyperparameters that model hubs publish beside the weights (``config.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .architecture import Architecture, gpt, llama

_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma")
_GPTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {"tied": False, "learned_positions": False},
    "bloom": {"learned_positions": False, "embedding_norm": True},
    "falcon": {"learned_positions": False, "biases": False},
    "starcoder2": {"learned_positions": False},
}
"""What differs from `gpt` in each family that has its MLP of two matrices."""
_TIED_LLAMAS = ("gemma",)
_USUAL_SEQ = {"falcon": 2048, "bloom": 2048}  # their first files do not say it


def from_config(config: Mapping[str, Any], name: str = "") -> Architecture:
    """The model that `config` describes: of the family of Llama or of GPT, as ``model_type`` says.

    `config` has the keys of a hub's ``config.json``. `name` stands in for the one that the file may have. Parameters
    are exact, but for Falcon's smaller models, whose one norm a layer is counted as two. ``ValueError`` that names the
    key where one is missing, the family is another one, or the model is a mixture of experts.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object of hyperparameters, not {config!r}")
    for key in _EXPERTS:
        if config.get(key):
            raise ValueError(f"{key} must be absent, since no mixture of experts is counted, not {config[key]!r}")
    family = config.get("model_type")
    if family not in (*_LLAMAS, *_GPTS):
        raise ValueError(f"model_type must be one of {', '.join((*_LLAMAS, *_GPTS))}, not {family!r}")
    config = {"max_position_embeddings": _USUAL_SEQ.get(family), **config}
    sizes = {ours: _one_of(config, theirs) for ours, theirs in _NAMES.items()}
    called = name or str(config.get("_name_or_path") or family)
    source = "its config.json"
    if family in _GPTS:
        return _of_gpts(gpt(called, **sizes, source=source), family, config)
    return llama(
        called,
        **sizes,
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        ffn_hidden=_one_of(config, ("intermediate_size",)),
        tied=bool(config.get("tie_word_embeddings", family in _TIED_LLAMAS)),
        qkv_biases=bool(config.get("attention_bias", family == "qwen2")),
        qk_norms=family == "qwen3",
        source=source,
    )


def _of_gpts(made: Architecture, family: str, config: Mapping[str, Any]) -> Architecture:
    """A GPT with what its family does in another way: positions, biases, fewer heads of keys, another width."""
    changes = dict(_GPTS[family])
    if config.get("tie_word_embeddings") is not None:
        changes["tied"] = bool(config["tie_word_embeddings"])
    shared = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else None
    kv_heads = shared or config.get("num_kv_heads") or config.get("num_key_value_heads") or made.num_heads
    widths = (config.get(key) for key in ("n_inner", "intermediate_size", "ffn_hidden_size"))
    width = next((each for each in widths if each), made.ffn_hidden)
    return replace(made, num_kv_heads=kv_heads, ffn_hidden=width, **changes)


def _one_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(f"config must have {' or '.join(keys)}; it has {', '.join(sorted(config)) or 'nothing'}")
