"""Plans that compute some layers again: of each that would compute all, as few as may fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.models import Architecture
from dtlib.theory.timing import Constants, Machine, Plan, step_terms
from dtlib.theory.timing.space import least_bytes

from .memory import margin_of, plan_memory


@dataclass(frozen=True)
class Timed:
    """The plans of one mesh: a column of each choice, their seconds, and a bound from below of their bytes.

    Seconds are infinite where the bound is above what was asked for. With `at_least` as few layers are computed again
    as the bound allows: the true number, and its seconds, may be larger.
    """

    mesh: Plan
    choices: dict[str, NDArray[Any]]
    seconds: NDArray[np.float64]
    least_bytes: NDArray[np.float64]
    at_least: bool = False
    terms: Mapping[str, NDArray[np.float64]] | None = None

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Which of the plans compute all layers again."""
        return (self.choices["recompute"] == "full") & (self.choices["recompute_layers"] == 0)

    @property
    def without(self) -> NDArray[np.float64]:
        """Seconds that a plan does not go below where nothing is computed again.

        Of what is sent a full recompute repeats at most a third for tp and for experts, and a quarter for cp;
        so a micro-batch takes at most 3/2 as long, a bubble (ZB-H1's twice as many forward passes) at most 9/4, and the
        host may be hidden.
        """
        if self.terms is None:
            return self.seconds
        t, found = self.terms, self.seconds.copy()
        saved = t["recompute"] + (t["tensor_parallel"] + t["expert_parallel"]) / 3 + t["context_parallel"] / 4
        found[np.isfinite(found)] -= saved + t["host"] + t["bubble"] * 5 / 9
        return found

    def only(self, rows: NDArray[np.bool_]) -> Timed:
        """Those plans that `rows` says."""
        found = {name: column[rows] for name, column in self.choices.items()}
        return Timed(self.mesh, found, self.seconds[rows], self.least_bytes[rows], self.at_least)

    def plan(self, index: int) -> Plan:
        """The plan in row `index`."""
        chosen = {name: column[index].item() for name, column in self.choices.items()}
        absent = {name: chosen[name] or None for name in ("shard", "recompute_layers")}
        return self.mesh.changed(**chosen | absent)


def partly_again(
    model: Architecture, of: Timed, machine: Machine, k: Constants, usable: float, limit: float = math.inf
) -> Timed | None:
    """Of the plans of `of` that compute all layers again, and may fit, those of fewer layers that may be faster than
    `limit` seconds; None for none.

    The more layers the longer a step, and the less it keeps: the fewest that the bound of the bytes lets into `usable`
    take a time that the fewest that truly fit do not go below.
    """
    most = -(-model.num_layers // (of.mesh.pp * of.choices["chunks"].astype(int)))  # layers of a piece
    maybe = of.whole & (most > 1) & (of.least_bytes <= usable) & (of.without < limit)
    if not maybe.any():
        return None
    found, high = {name: column[maybe] for name, column in of.choices.items()}, most[maybe]
    low = np.ones_like(high)
    while (low < high).any():
        middle = (low + high) // 2
        fits = least_bytes(model, of.mesh, found | {"recompute_layers": middle}, k) <= usable
        low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
    some = low < most[maybe]
    found = {name: column[some] for name, column in (found | {"recompute_layers": low}).items()}
    if not some.any():
        return None
    seconds = np.sum([*step_terms(model, of.mesh, found, machine, k).values()], axis=0)
    bound = least_bytes(model, of.mesh, found, k)
    faster = Timed(of.mesh, found, seconds, bound, at_least=True).only(seconds < limit)
    return faster if len(faster.seconds) else None


def fewest(model: Architecture, plan: Plan, room: float, k: Constants) -> Plan | None:
    """`plan` with as few more layers computed again as fit with the margin into `room` bytes; None where all must."""

    def needs(layers: int) -> float:
        tried = plan.changed(recompute_layers=layers)
        return plan_memory(model, tried, k).total * (1 + margin_of(tried, k))

    low, high = plan.recompute_layers or 1, max(max(pieces) for pieces in plan.pieces(model))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needs(middle) <= room else (middle + 1, high)
    return None if low == max(max(pieces) for pieces in plan.pieces(model)) else plan.changed(recompute_layers=low)
