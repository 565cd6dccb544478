"""How often a job of many parts fails."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole

DAY = 86400.0
"""Seconds."""


@formula("reliability.mtbf", source="derived here", label="eq-reliability-mtbf", equation=r"M = \frac{m}{N}")
def mtbf(units: int, unit_mtbf: float) -> Any:
    """Mean seconds between failures of a job of N `units`, where one runs m seconds (`unit_mtbf`) between failures.

    Rates add: N/m failures a second, whatever the law of one unit, if each that fails is replaced at once. Units are
    nodes or cards, as the m given is one's.
    """
    return amount("unit_mtbf", unit_mtbf, positive=True) / whole("units", units, 1)


def node_mtbf(per_1000_node_days: float) -> Any:
    """Mean seconds between failures of a node, of which a thousand have so many in a day, as clusters report it."""
    return 1000 * DAY / amount("per_1000_node_days", per_1000_node_days, positive=True)


def failures(seconds: float, mtbf: float) -> Any:
    """Failures to be expected in t `seconds`: t/M, also where they are not exponential."""
    return amount("seconds", seconds) / amount("mtbf", mtbf, positive=True)


@formula("reliability.survival", source="derived here", label="eq-reliability-survival", equation=r"e^{-t/M}")
def survival(seconds: float, mtbf: float) -> Any:
    """The chance of no failure in t `seconds`.

    A failure in each short dt is as likely as in any other, dt/M: the chance P of none so far falls by P dt/M, so
    P = e^{−t/M}.
    """
    chance = np.exp(-np.asarray(failures(seconds, mtbf)))
    return chance if chance.ndim else float(chance)
