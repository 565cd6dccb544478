"""Compute falls as 1/t and bytes do not: the number of ranks at which half of the time is communication."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import checked_recompute, forward_flops_per_token
from dtlib.theory.models import Architecture, checked_dense
from dtlib.theory.valid import amount, whole


def _work(recompute: str, forward: float, core: float) -> tuple[float, int]:
    """What a layer computes in a step, of its `forward` pass and of attention's `core` in it, and its all-reduces."""
    again = {"none": 0.0, "selective": core, "full": forward}[checked_recompute(recompute)]
    return 3 * forward + again, 6 if recompute == "full" else 4


@formula(
    "tp.break_even_ranks",
    source="derived here",
    label="thm-tp-break-even",
    equation=r"t^* = 1 + \frac{9h + \frac32 s}{w} \cdot \frac{B}{F}",
    use="With more ranks a layer communicates for longer than it computes.",
)
def break_even_ranks(
    model: Architecture | str,
    flops_per_s: float,
    link_bytes_per_s: float,
    *,
    seq: int | None = None,
    element_bytes: float = 2,
    recompute: str = "none",
) -> float:
    """Ranks at which a layer communicates for as long as it computes.

    On t ranks a layer computes 3·f/(t F) seconds a token, f its operations forward, and sends for 4 · 2(t−1)/t · hw/B.
    Both have 1/t, so t* − 1 = 3f B/(8hwF). A GPT has f = 24h² + 4hs, which gives the equation: the batch and the number
    of layers cancel. A full recompute computes 4 times for 6 all-reduces: 8h + 4s/3 in place of 9h + 3s/2; a selective
    one computes 4hs more: 9h + 2s. Latency, the head, and what is not split are left out (see `efficiency` for the
    last). ``ValueError`` for rates that are not positive or another `recompute`.
    """
    model = checked_dense(model, "the rule when tp pays")
    rate = amount("flops_per_s", flops_per_s, positive=True)
    link = amount("link_bytes_per_s", link_bytes_per_s, positive=True)
    width = amount("element_bytes", element_bytes, positive=True)
    forward = forward_flops_per_token(model, seq=seq)
    core = forward.scores + forward.weighted_values
    flops, all_reduces = _work(recompute, forward.total - forward.head, core)
    return 1 + flops / model.num_layers * link / (all_reduces * 2 * model.hidden * width * rate)


@formula(
    "tp.efficiency",
    source="derived here",
    label="thm-tp-break-even",
    equation=r"\frac{1}{1 + (t-1)\Bigl(\frac{1}{t^*-1} + \rho\Bigr)}",
)
def efficiency(tp: int, break_even: float, replicated: float = 0.0) -> float:
    """The share of t times one rank's speed that t ranks reach.

    One rank takes T. On t ranks the share ρ (`replicated`) of it is done by all of them, the rest is split, and
    communication takes (T/t)(t−1)/(t*−1), with t* (`break_even`) from `break_even_ranks`. So a rank more costs always
    the same: at t* half is reached. ``ValueError`` for a `break_even` of 1 or less, or a share outside [0, 1].
    """
    t, at = whole("tp", tp, 1), amount("break_even", break_even)
    if not at > 1:
        raise ValueError(f"break_even must be above 1, not {break_even!r}")
    if not 0 <= replicated <= 1:
        raise ValueError(f"replicated must be a share from 0 to 1, not {replicated!r}")
    return 1 / (1 + (t - 1) * (1 / (at - 1) + replicated))


def replicated_share(
    hidden: int, seq: int, flops_per_s: float, memory_bytes_per_s: float, *, recompute: str = "none"
) -> float:
    """The share ρ of one rank's time that norms, dropout and residual sums take: all ranks do them on the whole width.

    They move bytes and hardly compute. In 2 bytes an element and 1 a mask, twice a layer: a norm reads and writes (4
    bytes an element), dropout with the sum reads two, writes one and a mask (7); backward a norm reads two and writes
    one (6), two gradients are added (6), dropout reads one and a mask, and writes one (5). 56bsh bytes a layer, and
    22bsh more for a full recompute, beside 3 (or 4) · bsh(24h + 4s) operations; a selective one adds 4bs²h of these.
    """
    h, s = whole("hidden", hidden, 1), whole("seq", seq, 1)
    rate = amount("flops_per_s", flops_per_s, positive=True)
    memory = amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)
    flops, _ = _work(recompute, 24 * h + 4 * s, 4 * s)
    moved = 56 + 22 * (recompute == "full")
    return (moved / memory) / (flops / rate)
