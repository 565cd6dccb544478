"""The automatic zero-bubble schedule: what to do next is decided by the clock, under a limit of memory."""

from __future__ import annotations

import heapq
import math
from itertools import product

from dtlib.theory.valid import amount, whole

from .generators import gpipe, of_one_stage, one_f_one_b, sizes
from .schedule import Kind, Schedule
from .simulate import most_held, simulate
from .zero_bubble import zb_h1, zb_h2

_Orders = list[list[tuple[Kind, int]]]
_ROUNDING = 1e-9


def zb_auto(
    p: int,
    m: int,
    limit: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    *,
    message_seconds: float = 0.0,
    waiting: float = 1.0,
) -> Schedule:
    """The shortest schedule that is found in which no rank holds more than `limit` activations; a stage a rank.

    Tried are 1F1B, GPipe, ZB-H1 and ZB-H2, where they keep to the limit, and schedules made by the clock. In these a
    rank goes forward until it is so many micro-batches ahead of its backward passes, fewer the later it stands in the
    pipeline, and then backward and forward in turn. A weights' gradient fills a gap, if it fits, or takes enough of
    it, or as soon as there is one; or it makes room for a forward pass. How far ahead and how eager is tried out. The
    one whose longest rank, from its own first action to its own last, is the shortest is returned.

    Between its two backward halves a micro-batch holds the part `waiting` of its activation, from 0 to 1: of a layer
    of a GPT without recomputation 32/(34 + 5as/h). It is a heuristic, in the way of Qi et al. 2024, arXiv 2401.10241,
    section 3, and not the optimum, which they look for by integer programming. With room for L < p a rank waits until
    its micro-batches have come round, ⌈m/L⌉ times p(F + I) + W in all, and this stays within a quarter of the longer
    of that and of the bound for L ≥ p (p to 8, some times, as tested).
    """
    p, m = sizes(p, m)
    limit = whole("limit", limit, 1)
    names = ("forward", "input_gradient", "weight_gradient")
    given = zip(names, (forward, input_gradient, weight_gradient), strict=True)
    times: dict[str, float] = dict(zip("FIW", (float(amount(name, value)) for name, value in given), strict=True))
    message, waiting = float(amount("message_seconds", message_seconds)), float(amount("waiting", waiting))
    if waiting > 1:
        raise ValueError(f"waiting must be at most 1, not {waiting:g}")
    best, shortest = None, math.inf
    for schedule in (make(p, m) for make in (zb_h1, one_f_one_b, zb_h2, gpipe)):
        if max(most_held(own, waiting) for own in schedule.actions) <= limit + _ROUNDING:
            longest = max(simulate(schedule, *times.values(), message_seconds=message).rank_spans)
            if longest < shortest * (1 - _ROUNDING):
                best, shortest = schedule, longest
    for strict, ahead, eager in product((True, False), _leads(p, min(limit, m), times, message), (0.0, 0.5, 1.0)):
        found = _Clock(p, m, limit, times, message, waiting).run(ahead, eager, strict, shortest * (1 - _ROUNDING))
        if found is not None:
            orders, shortest = found
            best = of_one_stage("ZB-auto", m, orders)
    assert best is not None  # the first try has no bound
    return Schedule("ZB-auto", best.placed, m, best.actions)


def _leads(p: int, most: int, times: dict[str, float], message: float) -> list[tuple[int, ...]]:
    """How many micro-batches each rank may be ahead: so many for each rank behind it, or as fill its first gap. With
    room for fewer than p the first goes as far ahead as it may, and each one behind it less far."""
    leads = [tuple(min(most, 1 + round(each * (p - 1 - rank))) for rank in range(p)) for each in (1, 1.5, 2)]
    if times["F"]:
        away = [(p - 1 - rank) * (times["F"] + times["I"] + 2 * message) / times["F"] for rank in range(p)]
        leads += [tuple(min(most, 1 + int(each + up)) for each in away) for up in (0, 1 - _ROUNDING)]
    if most < p:
        leads += [tuple(max(1, round(most - each * rank)) for rank in range(p)) for each in (0.5, 0.75, 1, 1.5)]
    return list(dict.fromkeys([*leads, (most,) * p]))


class _Clock:
    """Ranks that work by a rule, each as soon as it can, until all is done or one takes too long."""

    def __init__(self, p: int, m: int, limit: int, times: dict[str, float], message: float, waiting: float) -> None:
        self.p, self.m, self.limit, self.times, self.message = p, m, limit, times, message
        self.change = {"F": 1.0, "I": waiting - 1, "W": -waiting}
        self.arrives = [{"F": [0.0] * (m if rank == 0 else 0), "I": list[float]()} for rank in range(p)]
        self.done = [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
        self.held = [0.0] * p

    def run(self, ahead: tuple[int, ...], eager: float, strict: bool, bound: float) -> tuple[_Orders, float] | None:
        """The orders and the longest rank's span; None as soon as a rank cannot stay below `bound`."""
        orders: _Orders = [[] for _ in range(self.p)]
        begun, free, left = [math.inf] * self.p, [0.0] * self.p, [self.m * sum(self.times.values())] * self.p
        awake = [(0.0, rank) for rank in range(self.p)]
        while awake:
            now, rank = heapq.heappop(awake)
            if now < free[rank]:
                continue
            kind, later = self._next(rank, now, ahead[rank], eager, strict)
            if kind is None:
                if later < math.inf:
                    heapq.heappush(awake, (later, rank))
                continue
            begun[rank] = min(begun[rank], now)
            if now - begun[rank] + left[rank] >= bound:
                return None
            end = free[rank] = now + self.times[kind]
            orders[rank].append((kind, self.done[rank][kind]))
            self.done[rank][kind] += 1
            self.held[rank] += self.change[kind]
            left[rank] -= self.times[kind]
            heapq.heappush(awake, (end, rank))
            other = rank + 1 if kind == "F" else rank - 1
            if kind == "F" and other == self.p:
                self.arrives[rank]["I"].append(end)
            elif kind != "W" and 0 <= other < self.p:
                self.arrives[other][kind].append(end + self.message)
                heapq.heappush(awake, (max(now, free[other]), other))
        return orders, max(end - start for start, end in zip(begun, free, strict=True))

    def _next(self, rank: int, now: float, ahead: int, eager: float, strict: bool) -> tuple[Kind | None, float]:
        """What a free rank does now; if nothing, when it knows that something comes."""
        done = self.done[rank]
        wait = done["I"] - done["W"]
        if done["I"] == self.m:
            return ("W" if wait else None), math.inf
        room = self.limit + _ROUNDING - self.held[rank]
        forward = done["F"] < self.m and room - wait * self.change["W"] >= 1
        kinds: tuple[Kind, ...] = ("I", "F") if forward else ("I",)
        if forward and done["F"] - done["I"] < ahead:
            kinds = ("F", "I")
        comes = [self._comes(rank, kind) for kind in kinds[: 1 if strict else 2]]
        for kind, when in zip(kinds, comes, strict=False):
            if when <= now:
                return ("W" if kind == "F" and room < 1 else kind), now
        if wait and min(comes) - now >= eager * self.times["W"] - _ROUNDING:
            return "W", now
        return None, min(comes)

    def _comes(self, rank: int, kind: str) -> float:
        """When the next micro-batch of this kind is there; never, as long as that is not known."""
        came, at = self.arrives[rank][kind], self.done[rank][kind]
        return came[at] if at < len(came) else math.inf
