"""What travels: keys, values and their gradients around a ring, or heads for tokens in an all-to-all."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import checked_recompute
from dtlib.theory.valid import whole


@formula("cp.ring_elements", source="liu2023ring", label="eq-cp-ring", equation=r"6\,\frac{N-1}{N}\,b\,s\,g\,d")
def ring_elements(
    micro_batch: int,
    seq: int,
    num_kv_heads: int,
    head_dim: int,
    cp: int,
    *,
    backward: bool = True,
    recompute: str = "none",
) -> float:
    """Elements that a rank sends in a ring.

    For a layer: keys and values are 2bsgd/N of a rank. They take N − 1 hops forward; with `backward` N − 1 more, and so
    do their gradients, which their owner completes with its own part. A backward pass that computes attention again,
    in a ``"selective"`` or a ``"full"`` recompute, begins with the forward ring: 8 in place of 6. The mean over the
    ranks, and each one's with equal parts. Queries stay, so the heads of queries do not occur. ``ValueError`` for sizes
    below 1 or another `recompute`.
    """
    b, s, n = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("cp", cp, 1)
    width = whole("num_kv_heads", num_kv_heads, 1) * whole("head_dim", head_dim, 1)
    return 2 * _passes(3, backward, recompute) * (n - 1) / n * b * s * width


@formula(
    "cp.ulysses_elements",
    source="jacobs2023ulysses",
    label="eq-cp-ulysses",
    equation=r"4\,\frac{N-1}{N^2}\,b\,s\,(a + g)\,d",
)
def ulysses_elements(
    micro_batch: int,
    seq: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cp: int,
    *,
    backward: bool = True,
    recompute: str = "none",
) -> float:
    """Elements that a rank trades.

    Tokens for heads, for a layer: an all-to-all gives each rank all tokens of an N-th of the heads: of bsd(a + 2g)/N
    elements of queries, keys and values it keeps an N-th and sends the rest, and the results, bsda/N, go the same way
    back; `backward` as much again, and once more if a `recompute` repeats attention. Where there are fewer heads of
    keys than ranks, each is sent as often as it takes: g = N. ``ValueError`` for sizes below 1, another `recompute`, or
    heads that do not go round: N must divide a, and g, or be a multiple of g.
    """
    b, s, n = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("cp", cp, 1)
    a, g, d = whole("num_heads", num_heads, 1), whole("num_kv_heads", num_kv_heads, 1), whole("head_dim", head_dim, 1)
    refuse_heads(a, g, n)
    return 2 * _passes(2, backward, recompute) * (n - 1) / n**2 * b * s * (a + max(g, n)) * d


def _passes(both: int, backward: bool, recompute: str) -> int:
    """What is sent, in forward passes, where forward and backward together send `both`."""
    again = checked_recompute(recompute) != "none"
    return both + again if backward else 1


def refuse_heads(num_heads: int, num_kv_heads: int, cp: int) -> None:
    """``ValueError`` unless `cp` ranks can share these heads by whole ones."""
    if num_heads % cp:
        raise ValueError(f"cp must divide num_heads={num_heads}, and {cp} does not")
    if num_kv_heads % cp and cp % num_kv_heads:
        raise ValueError(f"cp must divide num_kv_heads={num_kv_heads} or be a multiple of it, not {cp}")
