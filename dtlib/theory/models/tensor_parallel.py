"""Over how many ranks the matrices of a layer can be split."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dtlib.theory.valid import whole

from .architecture import Architecture
from .presets import checked_model


def tp_degrees(model: Architecture | str) -> tuple[int, ...]:
    """The tensor-parallel degrees t of `model`, from 1 up.

    t divides the heads and the MLP's width; it divides the key and value heads too, or is a multiple of them (each is
    then kept by several ranks).
    """
    model = checked_model(model)
    return _degrees(model.num_heads, model.num_kv_heads, model.ffn_hidden)


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


def kv_width_of_rank(model: Architecture | str, tp: int) -> int:
    """Entries of all keys of one token that one of `tp` ranks keeps: its share, and one whole head at least."""
    model = checked_model(model)
    return max(model.num_kv_heads // checked_tp(model, tp), 1) * model.head_dim
