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
    margin: float
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

    def usable_bytes(self, device: Accelerator) -> float:
        """What the margin leaves of a device."""
        return device.memory_bytes * (1 - self.margin / 100)

    def verdict(self, device: Accelerator) -> str:
        """Of an upper bound: ``"yes"`` below what is usable, ``"no"`` where states alone are above the card."""
        if self.most_bytes <= self.usable_bytes(device):
            return "yes"
        return "no" if max(stage.states for stage in self.stages) > device.memory_bytes else "unsure"

    def fit(self, planned: PlanMemory, device: Accelerator) -> Fit:
        """What the planner needs, against a device."""
        from dtlib.theory.planner import Machine, fit

        return fit(planned, Machine(accelerator=device, gpus=1), plan=self.plan, model=self.model)

    def largest_micro_batch(self, device: Accelerator) -> int:
        """The largest that fits."""
        from dtlib.theory.footprint import largest_micro_batch

        return largest_micro_batch(self.model, self.plan, self.usable_bytes(device))
