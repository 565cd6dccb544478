"""From how many tokens on one way to split sends more than another."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import whole


@formula(
    "threed.tp_over_dp_tokens",
    source="derived here",
    label="thm-threed-crossing",
    equation=r"\frac{3 h}{t-1} \cdot \frac{N-1}{N}",
    use="With more tokens a step, tensor parallelism sends more than data parallelism.",
)
def tp_over_dp_tokens(hidden: int, dp: int, tp: int) -> float:
    """Tokens from which tensor parallelism sends more than data parallelism.

    Of a step on a rank: a layer's matrices are 12h²/t numbers, of which data parallelism of N = `dp` ranks sends 2(N −
    1)/N; tensor parallelism sends 8(t − 1)/t · h for each token. Micro-batches make no difference. ``ValueError`` for a
    `tp` below 2, which sends nothing, and other counts below 1.
    """
    h, n, t = whole("hidden", hidden, 1), whole("dp", dp, 1), whole("tp", tp, 2)
    return 3 * h / (t - 1) * (n - 1) / n


@formula(
    "threed.pp_over_dp_tokens",
    source="derived here",
    label="thm-threed-crossing",
    equation=r"\frac{12\, l\, h}{p\, t} \cdot \frac{N-1}{N}",
    use="With more tokens a step, an inner stage sends more to its neighbours than to other copies.",
)
def pp_over_dp_tokens(hidden: int, dp: int, layers: int, tp: int = 1) -> float:
    """Tokens from which an inner stage sends more to its neighbours than in data parallelism.

    Of a step on a rank with `layers` layers, l/p: 2h for each token to both sides against 2(N − 1)/N of 12h² · l/(pt)
    numbers. Without sequence parallelism each of t ranks sends the whole activation. ``ValueError`` for counts below 1.
    """
    h, n, l, t = whole("hidden", hidden, 1), whole("dp", dp, 1), whole("layers", layers, 1), whole("tp", tp, 1)
    return 12 * l * h / t * (n - 1) / n
