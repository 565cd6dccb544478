"""Sizes from the hyperparameters that model hubs publish beside the weights (``config.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtlib.theory.valid import whole

from .architecture import Architecture, gpt, llama
from .hub_keys import EXPERTS, FAMILIES, HARMLESS, REFUSED, SAME_EVERYWHERE, SIZES, USUAL_SEQ, Family

_NONE = 0
"""No window."""


def from_config(config: Mapping[str, Any], name: str = "") -> Architecture:
    """The model that `config` describes: of the family of Llama or of GPT, as ``model_type`` says.

    `config` has the keys of a hub's ``config.json``. `name` stands in for the one that the file may have. Parameters
    are exact. ``ValueError`` that names the key where one is missing, of another kind, not understood (it may change a
    number), or one of a mixture of experts; and for another family.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object of hyperparameters, not {config!r}")
    for key in EXPERTS:
        if config.get(key):
            raise ValueError(f"{key} must be absent, since no mixture of experts is counted, not {config[key]!r}")
    called = str(config.get("model_type"))
    family = FAMILIES.get(called)
    if family is None:
        why = f": {REFUSED[called]}" if called in REFUSED else ""
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, not {config.get('model_type')!r}{why}")
    given = _Keys(config)
    usual = {"seq": USUAL_SEQ.get(called)}
    sizes = {ours: given.size(theirs, usual.get(ours)) for ours, theirs in SIZES.items()}
    for key in family.needed:
        given.needed(key)
    given.only({**SAME_EVERYWHERE, **family.required})
    changes = {**family.made, **_switched(given, family), "tied": given.switch("tie_word_embeddings", family.tied)}
    if family.window:
        changes |= _window(given, family, sizes["num_layers"])
    if called == "falcon":
        changes |= _falcon(given, sizes["num_heads"])
    else:
        changes["num_kv_heads"] = given.size(("num_key_value_heads",), sizes["num_heads"])
    width = given.size(family.width, None if family.gated else 4 * sizes["hidden"])
    made = _made(name or str(config.get("_name_or_path") or called), family, sizes, width, given)
    given.nothing_left(called)
    return replace(made, **changes)


def _made(name: str, family: Family, sizes: dict[str, Any], width: int, given: _Keys) -> Architecture:
    if not family.gated:
        return replace(gpt(name, **sizes, source="its config.json"), ffn_hidden=width)
    head_dim = None if given.get("head_dim") is None else given.size(("head_dim",))
    return llama(name, **sizes, ffn_hidden=width, head_dim=head_dim, source="its config.json")


def _switched(given: _Keys, family: Family) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for key, (usual, names) in family.switches.items():
        found |= dict.fromkeys(names, given.switch(key, usual))
    return found


def _falcon(given: _Keys, heads: int) -> dict[str, int]:
    """Heads of keys and values, and norms: a parallel layer has one norm, but for the wider ones that have two."""
    new, parallel = given.switch("new_decoder_architecture", False), given.switch("parallel_attn", True)
    shared, some = given.switch("multi_query", True), given.size(("num_kv_heads", "n_head_kv"), heads)
    norms = given.size(("num_ln_in_parallel_attn",), 2 if new else 1)
    return {
        "num_kv_heads": 1 if shared and not new else some,
        "norms_per_layer": 2 if not parallel else norms if new else 1,
    }


def _window(given: _Keys, family: Family, num_layers: int) -> dict[str, Any]:
    """The window, and the share of the layers that have it: as ``layer_types`` says, or the family's habit."""
    size = given.size(("sliding_window", "sliding_window_size"), _NONE)
    used = given.switch("use_sliding_window", False) if family.window == "last" else True
    first = given.size(("max_window_layers",), num_layers) if family.window == "last" else 0
    every = family.full_every
    if every:
        every = given.size(("sliding_window_pattern", "_sliding_window_pattern"), every)
    types = given.get("layer_types")
    if types is not None:
        whole_ones = _full_layers(types, num_layers)
    elif family.window == "last":
        whole_ones = min(first, num_layers) if used else num_layers
    else:
        whole_ones = num_layers // every if every else 0
    if whole_ones == num_layers or (size == _NONE and types is None):
        return {}
    if size == _NONE:
        raise ValueError("sliding_window must be given where layer_types has layers with one, not null")
    return {"window": size, "windowed_share": 1 - whole_ones / num_layers}


def _full_layers(types: Any, num_layers: int) -> int:
    """Layers that see everything."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(each not in known for each in types):
        raise ValueError(f"layer_types must be {num_layers} of {' and '.join(known)}, not {types!r}")
    return types.count(known[0])


class _Keys:
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
