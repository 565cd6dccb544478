"""A run that others measured, and how far off its planned time is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtlib.theory.models import Architecture
from dtlib.theory.planner import fit, plan_memory
from dtlib.theory.timing import FITTED, Constants, Machine, Plan, step_time


@dataclass(frozen=True)
class Run:
    """A published run: one plan, or those that fit among which the planner chooses; its step's seconds, its memory,
    the framework that ran it, the table that printed it, and whether each message between stages was held up."""

    model: Architecture
    plans: tuple[Plan, ...]
    machine: Machine
    seconds: float
    memory_bytes: float | None = None
    framework: str = "megatron"
    table: str = ""
    stalled: bool = False

    def planned(self, constants: Constants = FITTED) -> Plan:
        """The plan of the run, or the planner's own choice: the fastest."""
        if len(self.plans) == 1:
            return self.plans[0]
        return min(self.plans, key=lambda plan: step_time(self.model, plan, self.machine, constants).total)

    def log_error(self, constants: Constants = FITTED) -> float:
        """ln of the predicted seconds over the published ones."""
        if self.stalled:
            constants = replace(constants, stall_cards=0)
        seconds = step_time(self.model, self.planned(constants), self.machine, constants).total
        return float(np.log(seconds / self.seconds))

    def fitting(self) -> Run:
        """The run without those of several plans that need more memory than there is."""
        if len(self.plans) == 1:
            return self
        kept = (plan for plan in self.plans if fit(plan_memory(self.model, plan), self.machine).free_bytes > 0)
        return replace(self, plans=tuple(kept) or self.plans)


def mean_error(of: Sequence[Run], constants: Constants = FITTED) -> float:
    """Mean absolute relative error of the predicted step time."""
    return float(np.mean([abs(np.expm1(run.log_error(constants))) for run in of]))
