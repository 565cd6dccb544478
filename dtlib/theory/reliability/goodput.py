"""The share of a run's time that is lasting work, and where the rest goes, with saves that stop the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, number


@dataclass(frozen=True)
class Split(Breakdown):
    """Seconds of a run: lasting `work` and the `save` that keeps it; what a failure undid (`lost`), of work and of a
    save under way; until it was noticed (`detect`); until the run went on (`restart`), failed attempts among them."""

    work: float
    save: float
    lost: float
    detect: float
    restart: float

    @property
    def goodput(self) -> float:
        """The share of lasting work, 0 to 1; 0 of no time at all."""
        return self.work / self.total if self.total else 0.0


@formula(
    "reliability.goodput",
    source="daly2006",
    label="thm-reliability-goodput",
    equation=r"\frac{\tau\, e^{-R/M}}{(M + d)\left(e^{(\tau+\delta)/M} - 1\right)}",
)
def goodput(interval: Any, save: float, mtbf: float, restart: float = 0, detect: float = 0) -> Any:
    """The share of all time that is lasting work, with exponential failures of mean distance M, exactly.

    τ seconds of work (`interval`), then a save of δ seconds. A failure, in the work or in the save, undoes both; d
    seconds until it is noticed (`detect`), in which nothing runs that could fail again, R seconds of `restart`. A
    failure in the restart is noticed d seconds later and starts it again. With p = e^{−(τ+δ)/M}, q = e^{−R/M}: getting
    back takes Y = d + M(1 − q) + (1 − q)Y, a whole interval X = M(1 − p) + (1 − p)(Y + X), and τ/X is the above.
    `interval` may be an array. Source: Daly 2006, here with d.
    """
    tau, delta, mean, back, unseen = _checked(interval, save, mtbf, restart, detect)
    segment = (tau + delta) / mean
    share = tau / mean * np.exp(-back / mean - segment) / ((1 + unseen / mean) * -np.expm1(-segment))
    return share if np.ndim(share) else float(share)


@formula(
    "reliability.waste",
    source="young1974",
    label="eq-reliability-waste",
    equation=r"\frac{\delta}{\tau} + \frac{1}{M}\left(\frac{\tau}{2} + R + d\right)",
)
def waste(interval: Any, save: float, mtbf: float, restart: float = 0, detect: float = 0) -> Any:
    """What a second of lasting work costs beside itself, to first order: about 1 − `goodput` where both are small.

    A save each interval, and a failure each M seconds, which undoes half an interval in the mean. Above 1 it says no
    more than that the regime has ended. √(2δ/M) + (R + d)/M at Young's interval. Source: Young 1974, here with R and d.
    """
    tau, delta, mean, back, unseen = _checked(interval, save, mtbf, restart, detect)
    cost = delta / tau + (tau / 2 + back + unseen) / mean
    return cost if np.ndim(cost) else float(cost)


def _checked(interval: Any, save: float, mtbf: float, restart: float, detect: float) -> tuple[Any, ...]:
    tau, mean = amount("interval", interval, positive=True), number("mtbf", mtbf, positive=True)
    return tau, number("save", save), mean, number("restart", restart), number("detect", detect)
