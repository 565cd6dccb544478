"""What ``dtlib memory`` was asked for, and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtlib.theory.footprint import RankMemory
    from dtlib.theory.hardware import Accelerator
    from dtlib.theory.models import Architecture
    from dtlib.theory.planner import Fit, Plan, PlanMemory


@dataclass(frozen=True)
class Job:
    """A model, its plan, the memory of each stage, and what the planner says of the fullest."""

    model: Architecture
    plan: Plan
    stages: list[RankMemory]
    asked: int | None
    device: Accelerator | None
    planned: PlanMemory

    @property
    def fullest(self) -> int:
        """The stage that decides what fits."""
        return max(range(self.plan.pp), key=lambda stage: self.stages[stage].total)

    @property
    def stage(self) -> int:
        """The stage that is shown."""
        return self.fullest if self.asked is None else self.asked

    @property
    def shown(self) -> RankMemory:
        """What a rank of it keeps."""
        return self.stages[self.stage]

    @property
    def most_bytes(self) -> float:
        """What the fullest stage keeps."""
        return self.stages[self.fullest].total

    def fit(self, device: Accelerator) -> Fit:
        """What the planner needs, against a device."""
        return self._fit(self.plan, self.planned, device)

    def largest_micro_batch(self, device: Accelerator) -> int:
        """The largest that the planner says fits; 0 if not even one does, or if it does not know."""
        from dtlib.theory.footprint import largest_that
        from dtlib.theory.planner import plan_memory

        def fits(b: int) -> bool:
            plan = self.plan.changed(micro_batch=b)
            return self._fit(plan, plan_memory(self.model, plan), device).verdict == "yes"

        return largest_that(fits)

    def _fit(self, plan: Plan, planned: PlanMemory, device: Accelerator) -> Fit:
        from dtlib.theory.planner import Machine, fit

        return fit(planned, Machine(accelerator=device, gpus=1), plan=plan, model=self.model)
