"""Memory and time: what attention keeps on a rank, and from how many tokens on its keys travel for nothing."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole


@formula(
    "cp.kept_bytes",
    source="derived here",
    label="bytes-kept",
    equation=r"\frac{b\,s}{N}\bigl((2a + 2g)\,d\,w + a\,w_L\bigr)",
)
def kept_bytes(
    micro_batch: int,
    seq: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cp: int,
    *,
    element_bytes: float = 2,
    total_bytes: float = 4,
) -> float:
    """Bytes kept of attention.

    On a rank: the queries and results of its s/N tokens (2ad elements each), their keys and values (2gd), and one
    number for each query and head, L, in `total_bytes`: no scores, and nobody else's keys. ``ValueError`` for sizes
    below 1.
    """
    b, s, n = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("cp", cp, 1)
    a, g, d = whole("num_heads", num_heads, 1), whole("num_kv_heads", num_kv_heads, 1), whole("head_dim", head_dim, 1)
    w, each = amount("element_bytes", element_bytes, positive=True), amount("total_bytes", total_bytes, positive=True)
    return b * s / n * (2 * (a + g) * d * w + a * each)


def forward_flops(micro_batch: int, num_scores: float, num_heads: int, head_dim: int) -> float:
    """Operations to compute `num_scores` scores a head and weigh values with them: 4abd for each."""
    b, a, d = whole("micro_batch", micro_batch, 1), whole("num_heads", num_heads, 1), whole("head_dim", head_dim, 1)
    return 4 * a * b * d * amount("num_scores", num_scores)


@formula(
    "cp.hiding_tokens",
    source="derived here",
    label="thm-cp-hiding",
    equation=r"\frac{s}{N} \ge \frac{g}{a}\,\frac{w F}{2 B}",
    use="From here on the exchange hides behind attention; under a causal mask from twice as many.",
)
def hiding_tokens(
    num_heads: int,
    num_kv_heads: int,
    flop_per_s: float,
    link_bytes_per_s: float,
    *,
    causal: bool = True,
    element_bytes: float = 2,
) -> float:
    """Tokens a rank that hide a block.

    From so many on it travels behind the scores of another: in a round a rank computes 4abd (s/N)² operations and sends
    2bgd (s/N) w bytes: batch, width and one factor s/N cancel. `causal`, in zig-zag order, half of the scores are
    computed, so twice as many tokens are needed. Backward five products face twice the bytes, which asks for less.
    ``ValueError`` for sizes below 1 or rates that are not positive.
    """
    a, g = whole("num_heads", num_heads, 1), whole("num_kv_heads", num_kv_heads, 1)
    rate = amount("flop_per_s", flop_per_s, positive=True)
    link = amount("link_bytes_per_s", link_bytes_per_s, positive=True)
    return (2 if causal else 1) * g / a * amount("element_bytes", element_bytes, positive=True) * rate / (2 * link)


@formula("cp.ring_step_seconds", source="derived here", label="eq-cp-step", equation=r"(N-1)\,\max(C, T) + C")
def ring_step_seconds(cp: int, compute_seconds: float, travel_seconds: float) -> float:
    """Seconds of a ring.

    Forward: N rounds that compute for C each; in all but the last the next block is under way, for T. Without overlap
    they would take NC + (N−1)T. ``ValueError`` for `cp` below 1 or negative times.
    """
    n, compute = whole("cp", cp, 1), amount("compute_seconds", compute_seconds)
    return (n - 1) * max(compute, amount("travel_seconds", travel_seconds)) + compute
