"""A schedule in time: when each action starts and ends, what idles, what is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtlib.theory.valid import amount, flag

from .schedule import Action, Schedule

Seconds = float | Sequence[float]
"""One number for all stages, or one for each."""


@dataclass(frozen=True)
class Timetable:
    """A schedule's actions with the seconds at which they start and end: `starts[rank][k]` is of `actions[rank][k]`."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end, of all ranks."""
        return max(own[-1] for own in self.ends if own)

    @property
    def rank_spans(self) -> list[float]:
        """Seconds of each rank from its own first start to its own last end."""
        return [ends[-1] - starts[0] if ends else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def busy(self) -> list[float]:
        """Seconds that each rank computes."""
        return [
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def idle(self) -> list[float]:
        """Seconds of the whole span that each rank does not compute."""
        return [self.span - busy for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The idle part of all ranks' time."""
        return sum(self.idle) / (self.span * len(self.busy))

    @property
    def longest_idle(self) -> float:
        """Idle seconds of the rank with the longest span of its own, from its first action to its last."""
        longest, rank = max((span, rank) for rank, span in enumerate(self.rank_spans))
        return longest - self.busy[rank]

    @property
    def most_in_flight(self) -> list[float]:
        """The most activations that each rank holds, in those of all its stages for one micro-batch."""
        return [most_held(own) / self.schedule.chunks for own in self.schedule.actions]


def most_held(actions: Sequence[Action], waiting: float = 1.0, sizes: Mapping[int, float] | None = None) -> float:
    """The most stages' activations at a time, or with the `sizes` of each stage their bytes: a forward pass adds one, B
    takes one away, and I leaves the part `waiting` to W."""
    change = {"F": 1, "B": -1, "I": waiting - 1, "W": -waiting}
    held = [change.get(each.kind, 0) * (sizes[each.stage] if sizes else 1) for each in actions]
    return float(np.cumsum(held).max(initial=0))


def needs(action: Action, num_stages: int) -> Action | None:
    """The action whose result `action` waits for; None where the data are there from the start.

    Whether a stage behind goes back in one piece (B) or in two (I) does not matter to the one before: it is called I.
    """
    kind, stage, i, _ = action
    if kind == "F":
        return Action("F", stage - 1, i) if stage else None
    if kind == "W":
        return Action("I", stage, i)
    return Action("I", stage + 1, i) if stage + 1 < num_stages else Action("F", stage, i)


def simulate(
    schedule: Schedule,
    forward: Seconds = 1.0,
    input_gradient: Seconds = 1.0,
    weight_gradient: Seconds = 1.0,
    *,
    message_seconds: float = 0.0,
    overlap: bool = True,
) -> Timetable:
    """When each action starts and ends if every rank works in its order, as soon as what it needs has come.

    A rank spends `forward`, `input_gradient` and `weight_gradient` seconds on a micro-batch in all its stages together,
    so a v-th of that in each; a sequence has a number for each stage itself. B takes both gradients' time. A message to
    another rank takes `message_seconds`: beside computing with `overlap`, and else it occupies the sender when the
    result is there, and the receiver from then on when it is free. ``ValueError`` for times that are negative or not as
    many as stages, and for a schedule in which ranks wait for each other for ever.
    """
    stages, m, placed = schedule.num_stages, schedule.micro_batches, schedule.placed
    cost = {
        kind: _of_stage(name, given, schedule)
        for kind, name, given in (
            ("F", "forward", forward),
            ("I", "input_gradient", input_gradient),
            ("W", "weight_gradient", weight_gradient),
        )
    }
    cost["B"] = [both[0] + both[1] for both in zip(cost["I"], cost["W"], strict=True)]
    message = float(amount("message_seconds", message_seconds))
    blocking = not flag("overlap", overlap)
    forward_end: list[float | None] = [None] * (stages * m)
    back_end: list[float | None] = [None] * (stages * m)
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends: list[list[float]] = [[] for _ in schedule.actions]
    free, waiting = [0.0] * schedule.num_ranks, list(range(schedule.num_ranks))
    last = stages - 1
    while waiting:
        rank = waiting.pop()
        own, now, done = schedule.actions[rank], free[rank], len(starts[rank])
        woken = set()
        while done < len(own):
            kind, stage, i, of = own[done]
            if of:
                done += 1
                starts[rank].append(now)
                ends[rank].append(now)
                continue
            source = -1
            if kind == "F":
                at = forward_end[(stage - 1) * m + i] if stage else 0.0
                source = placed[stage - 1] if stage else rank
            elif kind == "W":
                at = back_end[stage * m + i]
            elif stage == last:
                at = forward_end[stage * m + i]
            else:
                at = back_end[(stage + 1) * m + i]
                source = placed[stage + 1]
            if at is None:
                break
            if source not in (-1, rank):
                now = max(now, at) + message if blocking else max(now, at + message)
            elif at > now:
                now = at
            starts[rank].append(now)
            now += cost[kind][stage]
            ends[rank].append(now)
            done += 1
            if kind == "F":
                forward_end[stage * m + i] = now
                target = stage + 1
            elif kind == "W":
                continue
            else:
                back_end[stage * m + i] = now
                target = stage - 1
            if 0 <= target <= last and placed[target] != rank:
                woken.add(placed[target])
                if blocking:
                    now += message
        free[rank] = now
        waiting += [other for other in woken if len(starts[other]) < len(schedule.actions[other])]
    stuck = [rank for rank, own in enumerate(schedule.actions) if len(starts[rank]) < len(own)]
    if stuck:
        rank = stuck[0]
        first = schedule.actions[rank][len(starts[rank])]
        raise ValueError(
            f"schedule must come to an end, but rank {rank} waits for ever before {first}, which needs "
            f"{needs(first, stages)}: see validate"
        )
    return Timetable(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _of_stage(name: str, given: Seconds, schedule: Schedule) -> list[float]:
    checked = amount(name, given)
    if np.ndim(checked) == 0:
        return [float(checked) / schedule.chunks] * schedule.num_stages
    if len(checked) != schedule.num_stages:
        raise ValueError(
            f"{name} must be one number, or one for each of {schedule.num_stages} stages, not {len(checked)}"
        )
    return [float(each) for each in checked]
