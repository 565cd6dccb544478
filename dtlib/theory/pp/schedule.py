"""A pipeline's schedule as data: what each rank does, in order; nothing here computes, sends or waits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

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

    def __post_init__(self) -> None:
        """Refuse what is no schedule: stages on ranks that there are not, and actions that are none."""
        if not self.actions or any(not 0 <= rank < len(self.actions) for rank in self.placed):
            raise ValueError(f"placed must be ranks from 0 to {len(self.actions) - 1}, not {self.placed}")
        if len(self.placed) % len(self.actions):
            raise ValueError(f"placed must have as many stages for each rank, not {len(self.placed)} in all")

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


def from_text(rows: Sequence[str], name: str = "by hand") -> Schedule:
    """A schedule of one stage a rank from what each rank does in words: ``["F0 F1 B0 B1", "F0 B0 F1 I1 W1"]``.

    A kind (F, B, I or W) and a micro-batch, apart by spaces; there are as many micro-batches as the largest number
    says. What is wrong with the order is for `validate` to say. ``ValueError`` for no rows, and for another word.
    """
    if not rows or isinstance(rows, str):
        raise ValueError(f"rows must have a text for each rank, not {rows!r}")
    actions = []
    for rank, row in enumerate(rows):
        for word in row.split():
            if not re.fullmatch(r"[FBIW]\d{1,4}", word):
                raise ValueError(f"rows must have words such as F0 or B12, and rank {rank} has {word!r}")
        actions.append(tuple(Action(cast(Kind, word[0]), rank, int(word[1:])) for word in row.split()))
    most = max((action.micro_batch for own in actions for action in own), default=0)
    return Schedule(name, tuple(range(len(rows))), most + 1, tuple(actions))
