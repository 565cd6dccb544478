"""Over how many ranks the matrices of a layer, and its experts, can be split."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

from dtlib.theory.valid import whole

from .architecture import Architecture
from .presets import checked_model


def tp_degrees(model: Architecture | str) -> tuple[int, ...]:
    """The tensor-parallel degrees t of `model`, from 1 up.

    t divides the heads and the widths of MLP and experts; it divides the key and value heads too, or is a multiple of
    them (each is then kept by several ranks).
    """
    model = checked_model(model)
    widths, experts = model.ffn_hidden, model.experts
    if experts is not None:
        dense = 0 if model.num_expert_layers == model.num_layers else model.ffn_hidden
        widths = gcd(dense, experts.hidden, experts.shared_hidden)
    return _degrees(model.num_heads, model.num_kv_heads, widths)


@lru_cache(maxsize=4096)
def _degrees(a: int, g: int, f: int) -> tuple[int, ...]:
    return tuple(t for t in range(1, a + 1) if a % t == 0 and f % t == 0 and (g % t == 0 or t % g == 0))


def checked_tp(model: Architecture | str, tp: Any) -> int:
    """`tp` as an int, or ``ValueError`` that lists the degrees of `tp_degrees`."""
    model = checked_model(model)
    degrees = tp_degrees(model)
    if whole("tp", tp, 1) not in degrees:
        listed = ", ".join(map(str, degrees))
        raise ValueError(f"tp of {model.name} must be one of {listed}, which its heads and MLP divide by, not {tp}")
    return int(tp)


def checked_ep(model: Architecture | str, ep: Any) -> int:
    """The experts of a layer that each of `ep` ranks holds, or ``ValueError`` where `ep` does not divide them."""
    model = checked_model(model)
    if whole("ep", ep, 1) > 1 and model.experts is None:
        raise ValueError(f"ep of {model.name} must be 1, since it has no experts, not {ep}")
    num_experts = 0 if model.experts is None else model.experts.num_experts
    if num_experts % ep:
        raise ValueError(f"ep of {model.name} must divide its {num_experts} experts; {ep} does not")
    return num_experts // int(ep)


def kv_width_of_rank(model: Architecture | str, tp: int) -> int:
    """Entries of all keys of one token that one of `tp` ranks keeps: its share, and one whole head at least."""
    model = checked_model(model)
    return max(model.num_kv_heads // checked_tp(model, tp), 1) * model.head_dim
