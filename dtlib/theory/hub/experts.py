"""Experts and latent attention as hubs' configurations name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dtlib.theory.models import Experts, LatentAttention
from dtlib.theory.valid import whole

if TYPE_CHECKING:
    from .config import Keys


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """What a family's configurations call its experts.

    `number`, `top_k` and `width` are keys. Shared experts are so many as `shared_number` says, of the experts' width,
    as wide together as `shared_width` says, or with `one_shared` one of the experts' width. `layers` says which keys
    tell the layers that have experts: all (``""``), ``first_k_dense_replace`` and ``moe_layer_freq`` (``"from"``),
    ``decoder_sparse_step`` and ``mlp_only_layers`` (``"step"``), ``moe_layers`` or ``interleave_moe_layer_step``
    (``"list"``).
    """

    number: str
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    width: str = "intermediate_size"
    shared_number: str = ""
    shared_width: str = ""
    one_shared: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    biases: bool = False
    layers: Literal["", "from", "step", "list"] = ""


def experts_of(given: Keys, keys: ExpertKeys, num_layers: int) -> Experts | None:
    """The experts that a configuration describes, None where no layer has one; their number must be told."""
    layers = _layers(given, keys.layers, num_layers)
    number, top_k, width = given.size((keys.number,)), given.size(keys.top_k, 0), given.size((keys.width,), 0)
    shared = width if keys.one_shared else 0
    if keys.shared_number:
        shared = width * given.count(keys.shared_number, 0)
    if keys.shared_width:
        shared = given.count(keys.shared_width, 0)
    if not layers:
        return None
    for key, value in ((keys.top_k[0], top_k), (keys.width, width)):
        if not value:
            raise ValueError(f"config must have {key} beside {keys.number}={number}")
    return Experts(
        num_experts=number,
        top_k=top_k,
        hidden=width,
        shared_hidden=shared,
        shared_gate=keys.shared_gate and shared > 0,
        router_bias=keys.router_bias,
        biases=keys.biases,
        first_dense=layers[0],
        every=layers[1] - layers[0] if layers[1:] else num_layers,
    )


def latent_of(given: Keys) -> LatentAttention:
    """The latent attention that a configuration describes; a null ``q_lora_rank`` is queries without one."""
    given.needed("q_lora_rank")
    given.get("qk_head_dim"), given.get("head_dim")  # follow from the others, or are that of the rotated part
    return LatentAttention(
        q_rank=given.optional("q_lora_rank"),
        kv_rank=given.size(("kv_lora_rank",)),
        nope_dim=given.size(("qk_nope_head_dim",)),
        rope_dim=given.size(("qk_rope_head_dim",)),
        value_dim=given.size(("v_head_dim",)),
    )


def _layers(given: Keys, rule: str, num_layers: int) -> list[int]:
    """Layers with experts, from 0; ``ValueError`` where they do not follow each other at equal distances."""
    key, every = "", list(range(num_layers))
    if rule == "from":
        key = "moe_layer_freq"
        first, step = given.count("first_k_dense_replace", 0), given.size((key,), 1)
        found = [i for i in every if i >= first and i % step == 0]
    elif rule == "step":
        key = "mlp_only_layers"
        dense, step = _indices(given, key, num_layers) or [], given.size(("decoder_sparse_step",), 1)
        found = [i for i in every if (i + 1) % step == 0 and i not in dense]
    elif rule == "list":
        key = "moe_layers"
        listed, step = _indices(given, key, num_layers), given.size(("interleave_moe_layer_step",), 1)
        found = every[step - 1 :: step] if listed is None else sorted(listed)
    else:
        return every
    distance = found[1] - found[0] if found[1:] else num_layers
    if found and found != every[found[0] :: distance]:
        raise ValueError(
            f"{key} must leave layers with experts at equal distances up to the last, not {given.get(key)!r}"
        )
    return found


def _indices(given: Keys, key: str, num_layers: int) -> list[int] | None:
    """A list of layers, each once; None where it is null."""
    listed: Any = given.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list) or len(set(map(str, listed))) != len(listed):
        raise ValueError(f"{key} must be a list of layers, each once, not {listed!r}")
    found = [whole(key, each, 0) for each in listed]
    if any(each >= num_layers for each in found):
        raise ValueError(f"{key} must be layers below {num_layers}, not {listed!r}")
    return found
