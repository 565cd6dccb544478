"""Corruption that nobody notices until the state is checked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, number


@formula(
    "reliability.checked_goodput",
    source="derived here",
    label="thm-reliability-checked",
    equation=r"\frac{\tau}{(\tau + c)\, e^{\tau/M} + R \left(e^{\tau/M} - 1\right)}",
)
def checked_goodput(interval: Any, check: float, mtbf: float, restart: float = 0) -> Any:
    """The share of lasting work where a state is checked, and saved if it is right, after each τ seconds (`interval`).

    Check and save take c seconds (`check`). Work is corrupted after M seconds (`mtbf`) in the mean, and goes on: the
    whole interval is done, checked and then undone, with R seconds of `restart`. With p = e^{−τ/M}:
    X = τ + c + (1 − p)(R + X). Twice as much is lost as by a failure that is noticed.
    """
    tau, cost = amount("interval", interval, positive=True), number("check", check)
    mean, back = number("mtbf", mtbf, positive=True), number("restart", restart)
    safe = np.exp(-tau / mean)
    share = tau * safe / (tau + cost + back * (1 - safe))
    return share if np.ndim(share) else float(share)


@formula(
    "reliability.check_interval",
    source="derived here",
    label="eq-reliability-check",
    equation=r"\tau = \frac{\sqrt{c^2 + 4 c M} - c}{2} \approx \sqrt{c M}",
    use="Whoever checks less often loses more to corruption than to checks.",
)
def check_interval(check: float, mtbf: float) -> float:
    """Seconds of work between checks at which `checked_goodput` without restart is largest: τ(τ + c) = cM.

    About √(cM), where failures that are noticed ask for √(2δM).
    """
    cost, mean = number("check", check), number("mtbf", mtbf, positive=True)
    return 2 * mean / (1 + math.sqrt(1 + 4 * mean / cost)) if cost else 0.0
