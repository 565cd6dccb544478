"""Schedules whose ranks go backward in one piece: the naive one, GPipe, 1F1B, interleaved chunks, PipeDream."""

from __future__ import annotations

from collections.abc import Iterable

from dtlib.theory.valid import whole

from .schedule import Action, Kind, Schedule


def sizes(p: int, m: int) -> tuple[int, int]:
    """The number of ranks and of micro-batches, checked."""
    return whole("p", p, 1), whole("m", m, 1)


def of_one_stage(name: str, m: int, by_rank: Iterable[Iterable[tuple[Kind, int]]]) -> Schedule:
    """A schedule of one stage a rank, from each rank's kinds and micro-batches."""
    actions = tuple(
        tuple(Action(kind, rank, micro_batch) for kind, micro_batch in own) for rank, own in enumerate(by_rank)
    )
    return Schedule(name, tuple(range(len(actions))), m, actions)


def sequential(p: int, m: int) -> Schedule:
    """The naive pipeline: a micro-batch goes forward and back before the next one starts; one rank works at a time."""
    p, m = sizes(p, m)
    one: list[tuple[Kind, int]] = [(kind, i) for i in range(m) for kind in ("F", "B")]
    return of_one_stage("sequential", m, [one] * p)


def gpipe(p: int, m: int) -> Schedule:
    """All micro-batches forward, then all backward. Source: Huang et al. 2019, arXiv 1811.06965."""
    p, m = sizes(p, m)
    one: list[tuple[Kind, int]] = [(kind, i) for kind in ("F", "B") for i in range(m)]
    return of_one_stage("GPipe", m, [one] * p)


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B: rank r starts with p − r − 1 forward passes, then goes forward and backward in turn; the rest backward.

    Source: Narayanan et al. 2021, arXiv 2006.09503 (there PipeDream-Flush).
    """
    p, m = sizes(p, m)
    return of_one_stage("1F1B", m, (_in_turn(m, p - 1 - rank) for rank in range(p)))


def pipedream(p: int, m: int) -> Schedule:
    """PipeDream: 1F1B for as long as there are micro-batches, and the weights change after each backward pass.

    The order is that of 1F1B. What differs is when the optimizer steps, which `weight_versions` counts. Source:
    Narayanan et al. 2019, arXiv 1806.03377.
    """
    p, m = sizes(p, m)
    return of_one_stage("PipeDream", m, (_in_turn(m, p - 1 - rank) for rank in range(p)))


def _in_turn(m: int, ahead: int) -> list[tuple[Kind, int]]:
    """Some forward passes ahead, then each further one with a backward pass, and the backward passes that are left."""
    order: list[tuple[Kind, int]] = [("F", i) for i in range(min(m, ahead))]
    for i in range(m):
        if i + ahead < m:
            order.append(("F", i + ahead))
        order.append(("B", i))
    return order


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r has the v stages r, r + p, r + 2p, …, and takes micro-batches in groups of p.

    A group passes a rank's chunks one after the other before the next group starts. ``ValueError`` unless m is a
    multiple of p. Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    p, m = sizes(p, m)
    v = whole("v", v, 1)
    if m % p:
        raise ValueError(f"m must be a multiple of p={p} where chunks are interleaved, not {m}")
    actions = []
    for rank in range(p):
        ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p) if v > 1 else min(m, p - rank - 1)
        forward = [Action("F", chunk * p + rank, i) for chunk, i in _chunks_in_groups(p, m, v)]
        backward = [Action("B", (v - 1 - chunk) * p + rank, i) for chunk, i in _chunks_in_groups(p, m, v)]
        own = forward[:ahead]
        for turn, back in enumerate(backward):
            own += [*forward[ahead + turn : ahead + turn + 1], back]
        actions.append(tuple(own))
    return Schedule("interleaved", tuple(range(p)) * v, m, tuple(actions))


def _chunks_in_groups(p: int, m: int, v: int) -> list[tuple[int, int]]:
    return [(chunk, i) for first in range(0, m, p) for chunk in range(v) for i in range(first, first + p)]
