"""Sizes from the hyperparameters that model hubs publish beside the weights (``config.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtlib.theory.models import Architecture, gpt, llama
from dtlib.theory.valid import whole

from .experts import experts_of, latent_of
from .keys import EXPERTS, FAMILIES, GROUPS, HARMLESS, REFUSED, SAME_EVERYWHERE, SIZES, USUAL_SEQ, Family

_SOURCE = "its config.json"
_NONE = 0
"""No window."""


def from_config(config: Mapping[str, Any], name: str = "") -> Architecture:
    """The model that `config` describes: of the family of Llama or of GPT, dense or with experts, as ``model_type``
    says.

    `config` has the keys of a hub's ``config.json``. `name` stands in for the one that the file may have. Parameters
    are exact. Those of a text model alone are counted where the file has an encoder of images beside it, and no modules
    that predict further tokens (``num_nextn_predict_layers``): `Architecture.mtp_modules` counts those. ``ValueError``
    that names the key where one is missing, of another kind, or not understood (it may change a number); and for
    another family.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object of hyperparameters, not {config!r}")
    heads = str(config.get("architectures"))
    if any(
        each in heads for each in ("Classification", "QuestionAnswering", "MultipleChoice", "DoubleHeads", "Reward")
    ):
        raise ValueError(f"architectures must be those of words, since no other head is counted, not {heads}")
    config = _inner(config)
    called = str(config.get("model_type"))
    family = FAMILIES.get(called)
    for key in EXPERTS if family is None or family.experts is None else ():
        if config.get(key):
            why = f"since no experts of {called} are counted"
            raise ValueError(f"{key} must be absent, {why}, not {config[key]!r}")
    if family is None:
        why = f": {REFUSED[called]}" if called in REFUSED else ""
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, not {config.get('model_type')!r}{why}")
    given = Keys(config)
    usual = {"seq": USUAL_SEQ.get(called)}
    sizes: dict[str, Any] = {ours: given.size(theirs, usual.get(ours)) for ours, theirs in SIZES.items()}
    for key in family.needed:
        given.needed(key)
    given.only(
        {key: value for key, value in SAME_EVERYWHERE.items() if key not in family.switches} | {**family.required}
    )
    given.stored_in(family.stored_in)
    changes = {**family.made, **_switched(given, family), "tied": given.switch("tie_word_embeddings", family.tied)}
    if family.window:
        changes |= _window(given, family, sizes["num_layers"])
    if called == "falcon":
        changes |= _falcon(given, sizes["num_heads"])
    else:
        changes["num_kv_heads"] = given.size(family.kv_heads, sizes["num_heads"])
    if family.experts is not None:
        changes["experts"] = experts_of(given, family.experts, sizes["num_layers"])
    if family.latent:
        changes |= {"latent": latent_of(given), "num_kv_heads": sizes["num_heads"]}
    name = name or str(config.get("_name_or_path") or called)
    if family.gated:
        head_dim = changes["latent"].head_dim if family.latent else given.optional("head_dim")
        width = given.size(family.width)
        made = llama(name, **sizes, ffn_hidden=width, head_dim=head_dim, source=_SOURCE)
    else:
        width = given.size(family.width, 4 * sizes["hidden"])
        made = replace(gpt(name, **sizes, source=_SOURCE), ffn_hidden=width)
    given.nothing_left(called)
    return replace(made, **changes)


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a configuration that has some in groups: those of the text, of attention and of the experts."""
    called = config.get("model_type")
    groups = GROUPS.get(str(called), ())
    for key in groups:
        if not isinstance(config.get(key), Mapping):
            raise ValueError(f"{key} must be an object of hyperparameters, not {config.get(key)!r}")
    if groups == ("text_config",):
        return {**config["text_config"], "_name_or_path": config.get("_name_or_path")}
    inner = {key: value for group in groups for key, value in config[group].items() if key != "tie_word_embeddings"}
    return {**inner, **{key: value for key, value in config.items() if key not in groups}}  # no part of a layer is tied


def _switched(given: Keys, family: Family) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for key, (usual, names) in family.switches.items():
        found |= dict.fromkeys(names, given.switch(key, usual))
    return found


def _falcon(given: Keys, heads: int) -> dict[str, int]:
    """Heads of keys and values, and norms: a parallel layer has one norm, but for the wider ones that have two."""
    new, parallel = given.switch("new_decoder_architecture", False), given.switch("parallel_attn", True)
    shared, some = given.switch("multi_query", True), given.size(("num_kv_heads", "n_head_kv"), heads)
    norms = given.size(("num_ln_in_parallel_attn",), 2 if new else 1)
    return {
        "num_kv_heads": 1 if shared and not new else some,
        "norms_per_layer": 2 if not parallel else norms if new else 1,
    }


def _window(given: Keys, family: Family, num_layers: int) -> dict[str, Any]:
    """The window, and the share of the layers that have it: as ``layer_types`` says, or the family's habit."""
    if family.window == "chunks":
        return _chunks(given, num_layers)
    size = given.size(("sliding_window", "sliding_window_size"), _NONE)
    used = given.switch("use_sliding_window", False) if family.window == "last" else True
    first = given.size(("max_window_layers",), num_layers) if family.window == "last" else 0
    every = family.full_every
    if every:
        every = given.size(("sliding_window_pattern", "_sliding_window_pattern"), every)
    types = given.get("layer_types")
    if types is not None:
        whole_ones = _full_layers(types, num_layers, "sliding_attention")
    elif family.window == "last":
        whole_ones = min(first, num_layers) if used else num_layers
    else:
        whole_ones = num_layers // every if every else 0
    if whole_ones == num_layers or (size == _NONE and types is None):
        return {}
    if size == _NONE:
        raise ValueError("sliding_window must be given where layer_types has layers with one, not null")
    return {"window": size, "windowed_share": 1 - whole_ones / num_layers}


def _chunks(given: Keys, num_layers: int) -> dict[str, Any]:
    """Chunks of Llama 4: in the layers that rotate positions, as ``layer_types`` or ``no_rope_layers`` says."""
    size, types, rotated = given.size(("attention_chunk_size",), 8192), given.get("layer_types"), given.get(_ROTATED)
    whole_ones = num_layers // given.size(("no_rope_layer_interval",), 4)
    if types is not None:
        whole_ones = _full_layers(types, num_layers, "chunked_attention")
    elif rotated:
        if not isinstance(rotated, list) or len(rotated) != num_layers or any(each not in (0, 1) for each in rotated):
            raise ValueError(f"{_ROTATED} must be {num_layers} of 0 and 1, not {rotated!r}")
        whole_ones = rotated.count(0)
    return {"window": size, "windowed_share": 1 - whole_ones / num_layers, "window_chunks": True}


_ROTATED = "no_rope_layers"


def _full_layers(types: Any, num_layers: int, other: str) -> int:
    """Layers that see everything; the others are called `other`."""
    known = ("full_attention", other)
    if not isinstance(types, list) or len(types) != num_layers or any(each not in known for each in types):
        raise ValueError(f"layer_types must be {num_layers} of {' and '.join(known)}, not {types!r}")
    return types.count(known[0])


class Keys:
    """A configuration that knows which of its keys were looked at."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, self._seen = config, set(HARMLESS)

    def get(self, key: str) -> Any:
        """The value of `key`, None where it is null or missing."""
        self._seen.add(key)
        return self._config.get(key)

    def size(self, keys: tuple[str, ...], usual: int | None = None) -> int:
        """A whole number of at least 1 under one of `keys`: the same under each that is given, or `usual`."""
        found = {key: whole(key, self.get(key), 1) for key in keys if self.get(key) is not None}
        if len(set(found.values())) > 1:
            raise ValueError(f"{' and '.join(found)} must be equal, not {' and '.join(map(str, found.values()))}")
        if found:
            return next(iter(found.values()))
        if usual is None:
            raise ValueError(f"config must have {' or '.join(keys)}; it has {', '.join(sorted(self._config))}")
        return usual

    def optional(self, key: str) -> int | None:
        """A whole number of at least 1, or None where `key` is null or missing."""
        return None if self.get(key) is None else self.size((key,))

    def count(self, key: str, usual: int) -> int:
        """A whole number that may be 0."""
        value = self.get(key)
        return usual if value is None else whole(key, value, 0)

    def stored_in(self, formats: tuple[str, ...]) -> None:
        """Formats in which a family's weights are published: they hold the same parameters in fewer bytes."""
        found = self._config.get("quantization_config")
        if isinstance(found, Mapping) and found.get("quant_method") in formats:
            self._seen.add("quantization_config")

    def switch(self, key: str, usual: bool) -> bool:
        """A key that is true or false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, not {value!r}")
        return usual if value is None else value

    def needed(self, key: str) -> None:
        """A key that must be there, be it null."""
        if key not in self._config:
            raise ValueError(f"config must have {key}, since libraries assume another size where it is missing")

    def only(self, required: Mapping[str, Any]) -> None:
        """Keys that have this value, or are null or missing."""
        for key, value in required.items():
            found = self.get(key)
            if found is not None and (found != value or type(found) is not type(value)):
                raise ValueError(f"{key} must be {value!r} or absent, since nothing else is counted, not {found!r}")

    def nothing_left(self, family: str) -> None:
        """``ValueError`` that names keys that nobody looked at: each may change a number."""
        left = sorted(key for key, value in self._config.items() if key not in self._seen and value is not None)
        if left:
            told = ", ".join(f"{key}={self._config[key]!r}" for key in left)
            raise ValueError(f"config must have keys of {family} alone, since others may change a number, not {told}")
