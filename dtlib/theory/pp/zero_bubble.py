"""Schedules that split the backward pass: the gradient of the input first, that of the weights when there is time."""

from __future__ import annotations

from collections.abc import Iterator

from .generators import of_one_stage, sizes
from .schedule import Action, Kind, Schedule


def zb_h1(p: int, m: int) -> Schedule:
    """ZB-H1: 1F1B whose weights' gradients wait, on rank r for r micro-batches; p in flight on every rank.

    Source: Qi et al. 2024, arXiv 2401.10241, section 2.1.
    """
    return _handcrafted("ZB-H1", p, m, 1)


def zb_h2(p: int, m: int) -> Schedule:
    """ZB-H2: rank r starts with 2(p − r) − 1 forward passes, and its weights' gradients wait for 2r micro-batches.

    With equal times and 2p − 1 micro-batches or more no rank idles between its first and its last action; 2p − 1 are
    in flight on every rank. Source: Qi et al. 2024, arXiv 2401.10241, section 2.2.
    """
    return _handcrafted("ZB-H2", p, m, 2)


def _handcrafted(name: str, p: int, m: int, times: int) -> Schedule:
    p, m = sizes(p, m)
    return of_one_stage(name, m, (_delayed(m, times * (p - 1 - rank), times * rank) for rank in range(p)))


def _delayed(m: int, ahead: int, behind: int) -> list[tuple[Kind, int]]:
    """Some forward passes ahead; then F, I, and the W of so many micro-batches before, until nothing is left."""
    order: list[tuple[Kind, int]] = [("F", i) for i in range(min(m, ahead))]
    for i in range(m + behind):
        if i + ahead < m:
            order.append(("F", i + ahead))
        if i < m:
            order.append(("I", i))
        if behind <= i:
            order.append(("W", i - behind))
    return order


def zb_v(p: int, m: int) -> Schedule:
    """ZB-V: two chunks a rank, down the ranks and up again, so that rank 0 has the first stage and the last.

    With equal times no rank idles between its first and its last action, and no rank holds more than 1F1B's first
    rank. For fewer than 2p − 1 micro-batches it is the schedule of 2p − 1 without those that are not there. Source: Qi
    et al. 2024, arXiv 2401.10241, section 6, and arXiv 2405.15362.
    """
    p, m = sizes(p, m)
    rounds = max(m, 2 * p - 1)
    actions = []
    for rank in range(p):
        own = (Action(kind, 2 * p - 1 - rank if up else rank, i) for kind, up, i in _both_ways(p, rank, rounds))
        actions.append(tuple(action for action in own if action.micro_batch < m))
    return Schedule("ZB-V", (*range(p), *reversed(range(p))), m, tuple(actions))


def _both_ways(p: int, rank: int, m: int) -> Iterator[tuple[Kind, int, int]]:
    """A rank's kinds, chunks (1: on the way up) and micro-batches."""
    done: dict[tuple[Kind, int], int] = {(kind, up): 0 for kind in ("F", "I", "W") for up in (0, 1)}

    def next_of(kind: Kind, up: int) -> tuple[Kind, int, int]:
        done[kind, up] += 1
        return kind, up, done[kind, up] - 1

    for _ in range(2 * (p - rank) - 1):  # down, until the first has turned and come back
        yield next_of("F", 0)
    for _ in range(rank):
        yield next_of("F", 1)
        yield next_of("F", 0)
    for _ in range(p - rank):
        yield next_of("F", 1)
        yield next_of("I", 1)
        yield next_of("W", 1)
    while done["F", 1] < m:
        if done["F", 0] < m:
            yield next_of("F", 0)
        yield next_of("I", 0)
        yield next_of("W", 0)
        yield next_of("F", 1)
        yield next_of("I", 1)
        yield next_of("W", 1)
    for _ in range(rank):  # weights wait for input gradients that others wait for
        yield next_of("I", 0)
        yield next_of("I", 1)
    while done["I", 0] < m:
        yield next_of("I", 0)
        yield next_of("W", 0)
    for up in (1, 0):
        while done["W", up] < m:
            yield next_of("W", up)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipeV: two chunks a rank, down and up again, one going forward while the other goes backward.

    In the middle backward passes are whole, as there is always a forward pass to overlap a message with; at both ends
    they are split. ``ValueError`` for fewer than 2p micro-batches. Source: DeepSeek-AI 2024, arXiv 2412.19437, section
    3.2.1, cut in half as its repository describes.
    """
    p, m = sizes(p, m)
    if m < 2 * p:
        raise ValueError(f"m must be at least 2p = {2 * p} for DualPipeV, not {m}")
    actions = []
    for rank in range(p):
        own = _beside_each_other(p, rank, m)
        actions.append(tuple(Action(kind, 2 * p - 1 - rank if up else rank, i) for kind, up, i in own))
    return Schedule("DualPipeV", (*range(p), *reversed(range(p))), m, tuple(actions))


def _beside_each_other(p: int, rank: int, m: int) -> Iterator[tuple[Kind, int, int]]:
    """A rank's kinds, chunks (1: on the way up) and micro-batches."""
    behind = p - rank - 1
    done = {(kind, up): 0 for kind in "FB" for up in (0, 1)}
    waiting: list[tuple[int, int]] = []  # weights' gradients, the oldest first

    def forward(up: int) -> Iterator[tuple[Kind, int, int]]:
        yield "F", up, done["F", up]
        done["F", up] += 1

    def backward(up: int, split: bool = False) -> Iterator[tuple[Kind, int, int]]:
        yield "I" if split else "B", up, done["B", up]
        if split:
            waiting.append((up, done["B", up]))
        done["B", up] += 1

    def weights() -> Iterator[tuple[Kind, int, int]]:
        yield "W", *waiting.pop(0)

    for _ in range(2 * behind):
        yield from forward(0)
    for _ in range(rank + 1):
        yield from forward(0)
        yield from forward(1)
    for _ in range(behind):
        yield from backward(1, split=True)
        yield from weights()
        yield from forward(1)
    for _ in range(m - 2 * p + rank + 1):
        yield from forward(0)
        yield from backward(1)
        yield from forward(1)
        yield from backward(0)
    for _ in range(behind):
        yield from backward(1)
        yield from forward(1)
        yield from backward(0)
    for turn in range(2 * rank + 2):  # what comes back now need not wait for weights
        yield from backward(1 - turn % 2, split=turn > rank)
    for _ in range(behind):
        yield from weights()
        yield from backward(0, split=True)
    while waiting:
        yield from weights()
