"""The memory of one rank of ZeRO, played event by event: what `ranks.zero` holds, and when it gives it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from dtlib.theory import zero
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.collectives.chunks import chunk_bounds
from dtlib.theory.valid import rank_of, ranks, whole

from .buckets import Bucket

_WORK = ("activations", "buffers", "temporary")


@dataclass(frozen=True)
class Held(Breakdown):
    """Bytes that a rank holds at one moment: its share of `weights`, `gradients` and `optimizer` states, the
    `activations` kept for backward, the modules that are whole only now (`gathered_weights`, `unsharded_gradients`),
    room for what arrives in an `exchange`, a module's `buffers`, and what is `temporary` otherwise."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered_weights: float
    unsharded_gradients: float
    exchange: float = 0
    buffers: float = 0
    temporary: float = 0

    @property
    def kinds(self) -> dict[str, float]:
        """The same by the kinds that ``lab.memory`` tells apart."""
        return {
            "parameters": self.weights + self.gathered_weights,
            "gradients": self.gradients + self.unsharded_gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
            "activations": self.activations,
            "temporary": self.exchange + self.temporary,
        }


@dataclass(frozen=True)
class Span:
    """From one event of a step to the next: what the rank held when it began, and at its `fullest` moment.

    `event` is ``"begin"``, ``"forward"``, ``"forward done"``, ``"backward"`` or ``"backward done"`` of the unit `name`,
    ``"gradient"`` of the parameter `name`, ``"step"`` and ``"step done"``, or ``"end"``. A span
    begins once the rank has done what it does at the event, as in ``lab.memory_spans``; at ``"backward"`` before, as
    units are gathered once the unit that has just finished is gone.
    """

    event: str
    name: str
    held: Held
    fullest: Held


@dataclass(frozen=True)
class Rules:
    """How a stage goes about it: the defaults are those of `ranks.zero` with AdamW.

    `width` bytes of a weight and of a gradient, `master_width` those of a master copy (0: none), `states` optimizer
    states of an element in the width of what the optimizer steps, `scalar_bytes` more for each piece of a parameter,
    `step_copies` of a piece that the optimizer computes with besides, and `step_kept` that it still has of the piece
    before. `in_flight` reductions at once (0: 2 for stage 1, else 1), in so many `parts`. `prefetch` and
    `reshard_after_forward` as in stage 3. `overlap` reduces during backward.
    """

    width: int = 4
    master_width: int = 0
    states: int = 2
    scalar_bytes: int = 4
    step_copies: int = 2
    step_kept: int = 1
    in_flight: int = 0
    parts: int = 4
    prefetch: int = 1
    reshard_after_forward: bool = True
    overlap: bool = True

    @property
    def stepped_width(self) -> int:
        """Bytes of an element as the optimizer sees it."""
        return self.master_width or self.width


def play(
    buckets: Sequence[Bucket],
    work: Iterable[Any],
    n: int,
    stage: int,
    *,
    rank: int = 0,
    rules: Rules | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
) -> list[Span]:
    """Play a step of rank `rank` of N, not the first one: passes over each micro-batch, and the update.

    `buckets` say which parameters are gathered and reduced together. `work` is what the passes of one micro-batch hold
    on one rank beside weights and gradients, whatever the stage: spans in order, whose activations, buffers and
    temporary bytes are looked at (``lab.memory_spans`` of the module alone, which needs no second rank). The rest
    follows from the rules:

    - gradients stay where autograd puts them until their bucket is complete. It is then copied into a buffer, while
      the gradients go, and reduced as soon as no more than `in_flight` are under way: the older one is waited for
      first. What arrives from N−1 others comes in `parts`, with room for one of them, which end evenly over the
      gradients of the bucket after it. Stages 2 and 3 then keep the chunk that is this rank's, and free the buffer;
      stage 1 keeps the buffer.
    - stage 3 has a unit's weights whole from its forward (and backward) event on, with those of the `prefetch` units
      that come next, until its forward is done (and the gradients of its weights and of its inputs have arrived; where
      no input needs one, to the end of the pass).
    - with `no_sync` the reduction waits for the last micro-batch, and gradients stay as long.
    - sums of 16-bit chunks are taken in 32 bits: one such chunk more while they are under way.

    The step begins with no gradients. Not played: quantised gathers, replicas, models of several dtypes. ``ValueError``
    for N below 1, a stage not 1, 2 or 3, a rank not below N, or a gradient that no bucket holds. Derived here.
    """
    n, rules = ranks(n), rules or Rules()
    if zero.checked_stage(stage) == 0:
        raise ValueError("stage must be 1, 2 or 3 to be played, not 0")
    played = _Rank(buckets, n, stage, rank_of("rank", rank, n), rules)
    steps = list(work)
    for each in steps:
        if each.event == "gradient" and each.name not in played.of:
            raise ValueError(f"work has the gradient of {each.name!r}, which no bucket holds")
    for i in range(whole("micro_batches", micro_batches, 1)):
        played.syncing = not no_sync or i == micro_batches - 1
        played.learn_order(steps)
        for each, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
            if each.event != "begin" or i == 0:
                played.at(each, after.event, last=i == micro_batches - 1)
    return played.spans


class _Bucket:
    """A bucket on its way through a step: bytes on this rank."""

    def __init__(self, bucket: Bucket, n: int, rank: int, width: int, parts: int) -> None:
        bounds = chunk_bounds(bucket.num_elements, n)
        start, stop = bounds[rank], bounds[rank + 1]
        self.bucket, self.full, self.own_elements = bucket, bucket.num_elements * width, stop - start
        self.own = self.own_elements * width
        rows = -(-(n - 1) // parts)
        self.num_parts, self.parts_left = -(-(n - 1) // max(1, rows)), 0
        self.stride = max(1, len(bucket.params) // max(1, min(parts, n - 1)))  # gradients from part to part
        self.room, self.total = rows * self.own, 4 * self.own_elements if width == 2 and n > 1 else 0
        self.pieces, at = [], 0
        for position, elements in zip(bucket.positions, bucket.params.values(), strict=True):
            size = min(stop, at + elements) - max(start, at)
            self.pieces += [(position, size)] if size > 0 else []
            at += elements
        self.missing, self.started, self.has_gradient = 0, False, False
        self.raw: set[str] = set()  # gradients that lie where autograd has put them


class _Rank:
    def __init__(self, buckets: Sequence[Bucket], n: int, stage: int, rank: int, rules: Rules) -> None:
        self.n, self.stage, self.rules = n, stage, rules
        self.all = [_Bucket(each, n, rank, rules.width, rules.parts) for each in buckets]
        self.trained = [each for each in self.all if not each.bucket.frozen]
        self.of = {name: each for each in self.trained for name in each.bucket.params}
        self.elements = {name: size for each in buckets for name, size in each.params.items()}
        self.units: dict[str, list[_Bucket]] = {}
        for each in self.all:
            self.units.setdefault(each.bucket.unit, []).append(each)
        self.whole: set[str] = set()  # units with full weights
        self.awaited: str | None = None  # the unit whose backward pass begins once its output's gradient is done with
        self.under_way: deque[_Bucket] = deque()
        self.fresh = ""  # the parameter whose gradient has just come
        self.running, self.syncing, self.next, self.spans = False, True, 0, list[Span]()
        pieces = sorted(piece for each in self.trained for piece in each.pieces)
        self.pieces = [size for _, size in pieces]
        optimizer = sum(self.pieces) * (rules.states * rules.stepped_width + rules.master_width)
        self.now = Held(
            weights=sum(each.own if stage >= 3 else each.full for each in self.all),
            gradients=0,
            optimizer=optimizer + rules.scalar_bytes * len(pieces),
            activations=0,
            gathered_weights=0,
            unsharded_gradients=0,
        )

    # What is held

    def add(self, **parts: float) -> None:
        self.now = replace(self.now, **{name: getattr(self.now, name) + value for name, value in parts.items()})

    def look(self, **more: float) -> None:
        """This may be the fullest moment of the open span."""
        now = replace(self.now, **{name: getattr(self.now, name) + value for name, value in more.items()})
        if self.spans and now.total > self.spans[-1].fullest.total:
            self.spans[-1] = replace(self.spans[-1], fullest=now)

    def cut(self, event: str, name: str = "") -> None:
        self.spans.append(Span(event, name, self.now, self.now))

    # What happens

    def learn_order(self, steps: Sequence[Any]) -> None:
        passing = [each for each in takewhile(lambda each: each.event != "backward", steps) if each.name in self.units]
        self.entered = [each.name for each in passing if each.event == "forward"]
        self.open = set(self.units)  # until the gradients of its inputs are there; where none needs one, to the end
        self.left = [each.name for each in passing if each.event == "forward done"]

    def at(self, work: Any, following: str, *, last: bool) -> None:
        if work.event == "end":
            self.end_of_backward()
            self.work_holds(work.held)
            if last:
                self.step()
                self.cut("end")
            return
        self.work_holds(work.held)
        if work.event == "forward":
            self.before_forward(work.name)
        elif work.event == "forward done" and self.rules.reshard_after_forward and not self.running:
            self.send_away(work.name)
        elif work.event == "backward done":
            self.open.discard(work.name)
            self.let_go(work.name)
        elif work.event == "gradient":
            self.gradient(work.name)
            self.settle(self.of[work.name])
        self.cut(work.event, work.name)
        if work.event == "backward":
            self.awaited = work.name
        if self.awaited is not None and following != "backward done":  # all have seen the gradient of this tensor
            self.before_backward(self.awaited)
            self.awaited = None
        more = {part: getattr(work.fullest, part) - getattr(work.held, part) for part in _WORK}
        self.look(**more)

    def work_holds(self, held: Any) -> None:
        self.now = replace(self.now, **{part: getattr(held, part) for part in _WORK})

    def before_forward(self, unit: str) -> None:
        if self.stage >= 3 and unit in self.units:
            at = self.entered.index(unit)
            ahead = 0 if self.running else self.rules.prefetch  # what is recomputed looks for nothing
            self.gather(self.entered[at : at + 1 + ahead])

    def before_backward(self, unit: str) -> None:
        self.begin_backward()
        if self.stage >= 3 and unit in self.units:
            at = self.left.index(unit)
            self.gather(self.left[max(0, at - self.rules.prefetch) : at + 1])

    def begin_backward(self) -> None:
        if not self.running:
            self.running, self.next = True, 0
            for each in self.trained:
                each.missing, each.started = len(each.bucket.params), False

    def gather(self, units: Sequence[str]) -> None:
        for unit in units:
            if unit not in self.whole:
                self.whole.add(unit)
                self.add(gathered_weights=sum(each.full for each in self.units[unit]))
        self.look()

    def send_away(self, unit: str) -> None:
        if unit in self.whole:
            self.whole.remove(unit)
            self.add(gathered_weights=-sum(each.full for each in self.units[unit]))

    def gradient(self, name: str) -> None:
        self.begin_backward()
        each, size = self.of[name], self.elements[name] * self.rules.width
        self.look(temporary=size)  # it comes beside what it is added to
        if name not in each.raw:
            each.raw.add(name)
            self.add(temporary=size)  # until the event is over
            self.fresh = name
        each.missing -= 1
        if not each.missing:
            self.let_go(each.bucket.unit)
        if self.syncing and self.rules.overlap and each.missing % each.stride == 0:
            for older in self.under_way:
                self.advance(older)
        if each.missing:
            return
        if not (self.syncing and self.rules.overlap):
            return
        if self.stage >= 3:
            self.start(each)
        while self.stage < 3 and self.next < len(self.trained) and not self.trained[self.next].missing:
            self.start(self.trained[self.next])
            self.next += 1

    def let_go(self, unit: str) -> None:
        """The backward pass of a unit may be over: all its gradients are there, and those that frozen weights make."""
        if unit in self.whole and unit not in self.open and not any(each.missing for each in self.units[unit]):
            self.send_away(unit)

    def start(self, each: _Bucket) -> None:
        each.started = True
        while len(self.under_way) >= (self.rules.in_flight or (2 if self.stage == 1 else 1)):
            self.finish()
        self.settle(each)
        self.add(unsharded_gradients=each.full)
        self.look()
        raw = sum(self.elements[name] for name in each.raw) * self.rules.width
        self.add(unsharded_gradients=-raw, exchange=each.room + each.total)
        self.look()
        each.raw.clear()
        each.parts_left = each.num_parts
        self.under_way.append(each)

    def settle(self, each: _Bucket) -> None:
        """What has just come is known to be a gradient."""
        if self.fresh in each.raw:
            size = self.elements[self.fresh] * self.rules.width
            self.add(temporary=-size, unsharded_gradients=size)
            self.fresh = ""

    def advance(self, each: _Bucket) -> None:
        """Another part has arrived."""
        each.parts_left -= 1
        if each.parts_left == 0:
            self.add(exchange=-each.room - each.total)

    def finish(self) -> None:
        each = self.under_way.popleft()
        while each.parts_left > 0:
            self.advance(each)
        if not each.has_gradient:
            each.has_gradient = True
            self.add(gradients=each.own if self.stage >= 2 else each.full)
            self.look(unsharded_gradients=0 if self.stage >= 2 else -each.full)  # stage 1 keeps the buffer itself
        self.add(unsharded_gradients=-each.full)

    def end_of_backward(self) -> None:
        self.running = False
        if self.syncing:
            for each in self.trained:
                if not each.started:
                    self.start(each)
            while self.under_way:
                self.finish()
        for unit in list(self.whole):
            self.send_away(unit)

    def step(self) -> None:
        widened = sum(self.pieces) * self.rules.master_width
        last = next((size for each in reversed(self.trained) for _, size in reversed(each.pieces)), 0)
        last *= self.rules.master_width  # the last of the widened gradients to be made
        self.look(gradients=widened - last, temporary=last)
        self.add(gradients=widened)
        self.cut("step")
        for before, size in pairwise([0, *self.pieces]):
            copies = self.rules.step_copies * size + self.rules.step_kept * before
            self.look(temporary=copies * self.rules.stepped_width)
        self.add(gradients=-widened)
        self.cut("step done")
