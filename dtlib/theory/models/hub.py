"""Sizes from the hyperparameters that model hubs publish beside the weights (``config.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .architecture import Architecture, gpt, llama

_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
_GPTS = ("gpt2",)


def from_config(config: Mapping[str, Any], name: str = "") -> Architecture:
    """The model that `config` describes: of the Llama family or GPT-2.

    `config` has the keys of a hub's ``config.json``; ``model_type`` says the family. `name` stands in for the one that
    the file may have. ``ValueError`` that names the key where one is missing, the family is another one, or the model
    is a mixture of experts.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object of hyperparameters, not {config!r}")
    for key in _EXPERTS:
        if config.get(key):
            raise ValueError(f"{key} must be absent, since no mixture of experts is counted, not {config[key]!r}")
    sizes = {ours: _one_of(config, theirs) for ours, theirs in _NAMES.items()}
    family = config.get("model_type")
    called = name or str(config.get("_name_or_path") or family)
    source = "its config.json"
    if family in _GPTS:
        made = gpt(called, **sizes, tied=bool(config.get("tie_word_embeddings", True)), source=source)
        return replace(made, ffn_hidden=config.get("n_inner") or made.ffn_hidden)
    if family not in _LLAMAS:
        raise ValueError(f"model_type must be one of {', '.join(_LLAMAS + _GPTS)}, not {family!r}")
    return llama(
        called,
        **sizes,
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        ffn_hidden=_one_of(config, ("intermediate_size",)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_biases=bool(config.get("attention_bias", family == "qwen2")),
        qk_norms=family == "qwen3",
        source=source,
    )


def _one_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(f"config must have {' or '.join(keys)}; it has {', '.join(sorted(config)) or 'nothing'}")
