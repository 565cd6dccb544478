"""The automatic zero-bubble schedule: what to do next is decided by the clock, under a limit of memory."""

from __future__ import annotations

import heapq
from itertools import product

from dtlib.theory.valid import amount, whole

from .generators import of_one_stage, sizes
from .schedule import Kind, Schedule
from .simulate import simulate

_Times = dict[str, float]


def zb_auto(
    p: int,
    m: int,
    limit: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    *,
    message_seconds: float = 0.0,
) -> Schedule:
    """The best of a few schedules made by the clock, in which no rank holds more than `limit` activations.

    A rank that is free goes on with what has come: an input's gradient, a forward pass while there is room, in this
    order or in the other, and a weights' gradient when nothing else is there, or only if it is done before the next
    message comes. Of these four the one whose longest rank is the shortest is returned. It is a heuristic, as in Qi et
    al. 2024, arXiv 2401.10241, section 3, and not the optimum, which they find by integer programming.
    """
    p, m = sizes(p, m)
    limit = whole("limit", limit, 1)
    names = ("forward", "input_gradient", "weight_gradient")
    given = dict(zip("FIW", zip(names, (forward, input_gradient, weight_gradient), strict=True), strict=True))
    times: _Times = {kind: float(amount(name, value)) for kind, (name, value) in given.items()}
    message = float(amount("message_seconds", message_seconds))
    found = [
        of_one_stage("ZB-auto", m, _by_the_clock(p, m, limit, times, message, first, patient))
        for first, patient in product(("I", "F"), (False, True))
    ]

    def longest(schedule: Schedule) -> tuple[float, float]:
        table = simulate(schedule, *times.values(), message_seconds=message)
        return max(table.rank_spans), table.span

    return min(found, key=longest)


def _by_the_clock(
    p: int, m: int, limit: int, times: _Times, message: float, first: str, patient: bool
) -> list[list[tuple[Kind, int]]]:
    arrives: list[dict[str, list[float]]] = [{"F": [], "I": []} for _ in range(p)]  # of each rank, by micro-batch
    arrives[0]["F"] = [0.0] * m
    done: list[dict[str, int]] = [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
    orders: list[list[tuple[Kind, int]]] = [[] for _ in range(p)]
    awake = [(0.0, rank) for rank in range(p)]
    free = [0.0] * p

    def comes(rank: int, kind: str) -> float:
        """When the next micro-batch of this kind can start, as far as is known."""
        at = done[rank][kind]
        if kind == "F" and done[rank]["F"] - done[rank]["W"] >= limit:
            return float("inf")
        return arrives[rank][kind][at] if at < len(arrives[rank][kind]) else float("inf")

    def next_kind(rank: int, now: float) -> Kind | None:
        ready: list[Kind] = [kind for kind in ("F", "I") if comes(rank, kind) <= now]  # type: ignore[misc]
        if ready:
            return first if first in ready else ready[0]  # type: ignore[return-value]
        soonest = min(comes(rank, "F"), comes(rank, "I"))
        if done[rank]["W"] < done[rank]["I"] and not (patient and now + times["W"] > soonest):
            return "W"
        return None

    while awake:
        now, rank = heapq.heappop(awake)
        if now < free[rank]:
            continue
        kind = next_kind(rank, now)
        if kind is None:
            soonest = min(comes(rank, "F"), comes(rank, "I"))
            if soonest < float("inf"):
                heapq.heappush(awake, (soonest, rank))
            continue
        end = free[rank] = now + times[kind]
        orders[rank].append((kind, done[rank][kind]))
        done[rank][kind] += 1
        heapq.heappush(awake, (end, rank))
        other = rank + 1 if kind == "F" else rank - 1
        if kind == "F" and other == p:
            arrives[rank]["I"].append(end)
        elif kind != "W" and 0 <= other < p:
            arrives[other][kind].append(end + message)
            heapq.heappush(awake, (max(end + message, free[other]), other))
    return orders
