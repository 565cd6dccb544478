"""Seconds: what split tokens save in work, and what memory costs if it is bought by gathering or by computing again."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, flag, whole


@formula(
    "sp.saved_seconds",
    source="derived here",
    label="eq-sp-saved",
    equation=r"\frac{t-1}{t}\,\frac{c\,b\,s\,h}{M},\; c = 22 \text{ forward, } 34 \text{ backward}",
)
def saved_seconds(
    micro_batch: int, seq: int, hidden: int, tp: int, memory_bytes_per_s: float, *, backward: bool = False
) -> float:
    """Seconds that split tokens save in a layer.

    Norms, dropout and residual sums are bound by memory. Forward, twice a layer, a norm reads and writes (4 bytes an
    element), and dropout with the sum reads two, writes one and a mask (7): 22bsh bytes. `backward`, a norm reads two
    and writes one (6), two gradients are added (6), and dropout reads one and a mask and writes one (5): 34bsh. Split
    by tokens, a rank moves a t-th of them, at M bytes a second. ``ValueError`` for sizes below 1 or a rate that is not
    positive.
    """
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    t, moved = whole("tp", tp, 1), 34 if backward else 22
    return (t - 1) / t * moved * b * s * h / amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)


@formula(
    "sp.core_seconds",
    source="derived here",
    label="held-to-the-paper",
    equation=r"\frac{1}{t}\Bigl(\frac{4\,b\,s^2 h}{F} + \frac{13\,a\,b\,s^2}{M}\Bigr)",
)
def core_seconds(
    micro_batch: int, seq: int, hidden: int, num_heads: int, tp: int, flop_per_s: float, memory_bytes_per_s: float
) -> float:
    """Seconds of a selective recompute.

    It computes the core of a layer's attention, written out, once more: two products of 2bs²h operations at F a second;
    and each of the abs² scores is written (2 bytes), read and written by the softmax (4), by dropout with its mask (5),
    and read by the second product (2), at M bytes a second. The heads are split over t ranks. ``ValueError`` for sizes
    below 1 or rates that are not positive.
    """
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    a, t = whole("num_heads", num_heads, 1), whole("tp", tp, 1)
    flop_rate = amount("flop_per_s", flop_per_s, positive=True)
    return (4 * b * s * s * h / flop_rate
            + 13 * a * b * s * s / amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)) / t  # fmt: skip


def even_link(hidden: int, flop_per_s: float, tp: int, *, early_stop: bool = False) -> float:
    """Bytes a second, in one direction, of the link at which a byte costs as much to gather again as to compute again.

    Both begin with split tokens and kept inputs, 4 + 30/t bytes over sbh (attention's core apart, which flash attention
    never keeps). Gathered again, 4(t−1)/t of them are not kept for two phases of 2 bytes an element: a byte freed is a
    byte sent, 1/B seconds. A layer computed again frees 4 + 28/t, for 24bsh²/(tF) seconds or more and for the 4 phases
    of its forward pass: (24h/F + 8(t−1)/B) / (4t + 28) seconds a byte. So gathering is cheaper from B = (9 − t)F/(6h)
    on, whatever b and s. With `early_stop` there is no dropout, so no masks (2 bytes of the 34), and torch's checkpoint
    stops before the last matrix: 16bsh²/(tF) seconds and 3 phases for 4 + 26/t bytes, and B = (16 − t)F/(8h). On 9
    ranks or more (16) it is so over any link, a 0 here: what is computed again sends as much for a byte freed as what
    is gathered again, and computes besides. ``ValueError`` for sizes below 1 or a rate that is not positive.
    """
    h, t = whole("hidden", hidden, 1), whole("tp", tp, 1)
    f = amount("flop_per_s", flop_per_s, positive=True)
    return max(0.0, (16 - t) * f / (8 * h) if flag("early_stop", early_stop) else (9 - t) * f / (6 * h))
