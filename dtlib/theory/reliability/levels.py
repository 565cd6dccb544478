"""Saves that do not stop the run for as long as they are written: in the background, or in a neighbour's memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import number, whole

from .goodput import goodput
from .interval import best_interval, young_interval


@formula(
    "reliability.background_goodput",
    source="derived here",
    label="thm-reliability-background",
    equation=r"\frac{\tau\, e^{-(R+w)/M}}{(M + d)\left(e^{(\tau+s)/M} - 1\right)}",
)
def background_goodput(
    interval: Any, stall: float, write: float, mtbf: float, restart: float = 0, detect: float = 0
) -> Any:
    """The share of lasting work where a save stops the run for s seconds (`stall`), and is whole w seconds later.

    The run works on during the `write`; a failure in it goes back to the save before, an interval further. From one
    whole save to the next are a = τ + s seconds. A failure comes first with the chance 1 − e^{−a/M}, after M seconds of
    it in the mean; then come Y of `goodput` and (e^{(a+w)/M} − 1)(M + Y) from that save up to the next, as what was
    worked on in the write is lost too: X = (1 − e^{−a/M}) e^{(a+w)/M} (M + Y). So w counts as so much more restart.
    What the write slows the work by counts as stall. ``ValueError`` for a `write` longer than interval and stall:
    writes would pile up.
    """
    later, stop = number("write", write), number("stall", stall)
    share = goodput(interval, stop, mtbf, number("restart", restart) + later, detect)
    if later > np.min(interval) + stop:
        raise ValueError(f"write must be at most interval and stall together, not {later!r}")
    return share


def background_interval(stall: float, write: float, mtbf: float) -> float:
    """Seconds of work between saves at which `background_goodput` is largest: as with the stall alone, or the least
    in which a write is done."""
    later, stop = number("write", write), number("stall", stall)
    return max(best_interval(stop, mtbf), later - stop)


def two_level_goodput(
    interval: float,
    near_save: float,
    far_save: float,
    every: int,
    near_share: float,
    mtbf: float,
    near_restart: float = 0,
    far_restart: float = 0,
    detect: float = 0,
) -> float:
    """The share of lasting work with two levels of saves and exponential failures, exactly.

    After each `interval` a `near_save` (a neighbour's memory), and after `every` of them a `far_save` more (storage). A
    share of failures, `near_share`, leaves the near save whole: back to the newest of either. The others, as when both
    neighbours fail, go back to the far save. A failure in a near restart is of either kind again; one in a far restart
    starts it anew. E_i, seconds from the i-th interval on until the far save is whole, solve a linear system: each is
    a multiple of E_0 and a number, found from the last to the first.
    """
    tau, k = number("interval", interval, positive=True), whole("every", every, 1)
    near, far, mean = number("near_save", near_save), number("far_save", far_save), number("mtbf", mtbf, positive=True)
    share, unseen = number("near_share", near_share), number("detect", detect)
    if share > 1:
        raise ValueError(f"near_share must be at most 1, not {near_share!r}")
    back, far_back = number("near_restart", near_restart), number("far_restart", far_restart)
    if tau + near + far + back + far_back > 700 * mean:
        raise ValueError(f"mtbf must be at least a 700th of interval, saves and restarts together, not {mtbf!r}")
    # A failure: V_i = cost + stay E_i + (1 − stay) E_0.
    there = math.exp(-back / mean)
    lost_far = (unseen + mean * -math.expm1(-far_back / mean)) * math.exp(far_back / mean)
    either = 1 - share * (1 - there)
    cost = (share * (unseen + mean * (1 - there)) + (1 - share) * lost_far) / either
    stay = share * there / either
    plain, times = 0.0, 0.0  # E_k = 0
    for i in reversed(range(k)):
        safe = math.exp(-(tau + near + (far if i == k - 1 else 0)) / mean)
        own = 1 - (1 - safe) * stay
        plain = ((1 - safe) * (mean + cost) + safe * plain) / own
        times = ((1 - safe) * (1 - stay) + safe * times) / own
    return k * tau * (1 - times) / plain


@formula(
    "reliability.two_level_intervals",
    source="derived here",
    label="eq-reliability-two-levels",
    equation=r"\tau_1 = \sqrt{\frac{2\,\delta_1 M}{q}}, \quad \tau_2 = \sqrt{\frac{2\,\delta_2 M}{1 - q}}",
    use="Each level saves as often as its own failures ask for.",
)
def two_level_intervals(near_save: float, far_save: float, near_share: float, mtbf: float) -> tuple[float, float]:
    """Seconds of work between near saves, and between far ones, that waste least, to first order.

    δ₁/τ₁ + δ₂/τ₂ + q τ₁/(2M) + (1 − q) τ₂/(2M) has a term of each level: Young's interval with the failures that
    are its own, of mean distance M/q and M/(1 − q). ``ValueError`` unless `near_share` q is above 0 and below 1.
    """
    q, mean = number("near_share", near_share, positive=True), number("mtbf", mtbf, positive=True)
    if q >= 1:
        raise ValueError(f"near_share must be below 1, not {near_share!r}")
    return young_interval(near_save, mean / q), young_interval(number("far_save", far_save), mean / (1 - q))
