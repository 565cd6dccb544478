"""A pipeline's schedule as data: what each rank does, in order; nothing here computes, sends or waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "send", "receive"]
"""F forward; B backward, both gradients at once; I the input's gradient alone; W the weights' gradient that I left."""


class Action(NamedTuple):
    """One thing that a rank does: `kind`, for `micro_batch`, in `stage` of the model.

    Stages are numbered through the model from 0 (its first layers) to S − 1 (its loss): of v chunks a rank there are
    S = p·v. A ``send`` or ``receive`` names the stage whose *output* travels: `of` is ``"F"`` for its output, on the
    way to stage + 1, and ``"B"`` for the gradient of its input, on the way to stage − 1. Computations leave it empty.
    """

    kind: Kind
    stage: int
    micro_batch: int
    of: str = ""

    def __str__(self) -> str:
        """``F0.3``: forward of micro-batch 3 in stage 0; ``send F0.3``: its output."""
        return (
            f"{self.kind} {self.of}{self.stage}.{self.micro_batch}"
            if self.of
            else f"{self.kind}{self.stage}.{self.micro_batch}"
        )


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does: `actions[rank]` in order, for `micro_batches` through `len(placed)` stages.

    `placed[stage]` is the rank that has the stage. A schedule that names computations only is complete: what is sent
    and received follows from it (`with_messages`).
    """

    name: str
    placed: tuple[int, ...]
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """p."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """S = p·v."""
        return len(self.placed)

    @property
    def chunks(self) -> int:
        """v: stages that a rank has."""
        return self.num_stages // self.num_ranks
