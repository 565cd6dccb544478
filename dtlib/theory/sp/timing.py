"""What splitting the tokens saves in time: work that every rank did on all of them."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole


@formula(
    "sp.saved_seconds",
    source="derived here",
    chapter="sp",
    equation=r"\frac{t-1}{t}\,\frac{22\,b\,s\,h}{M}",
)
def saved_seconds(micro_batch: int, seq: int, hidden: int, tp: int, memory_bytes_per_s: float) -> float:
    """Seconds that a layer's forward pass saves.

    Norms, dropout and residual sums are bound by memory: twice a layer a norm reads and writes (4 bytes an element),
    and dropout with the sum reads two, writes one and a mask (7). Split by tokens, each rank moves a t-th of these
    22bsh bytes, with M bytes a second. ``ValueError`` for sizes below 1 or a rate that is not positive.
    """
    b, s, h = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("hidden", hidden, 1)
    t = whole("tp", tp, 1)
    return (t - 1) / t * 22 * b * s * h / amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)
