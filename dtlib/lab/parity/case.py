"""One name: what the ranks hold under it, what one process has, and how well an explanation fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .expected import Expected
from .mesh import Axes
from .pieces import Array
from .rounding import TIMES

KINDS = {
    "equal": "the same bits",
    "rounding": "off by no more than the rounding of its operations explains",
    "sum for mean": "a sum where a mean is due",
    "mean for sum": "a mean where a sum is due, or divided once too often",
    "once per rank": "counted once for each rank",
    "never reduced": "each rank holds what it found alone",
    "wrong group": "reduced over other ranks than is due",
    "not broadcast": "the first rank alone is right",
    "rank alone": "one rank alone differs",
    "some ranks": "some ranks differ, and the others are right",
    "some rows": "some rows differ, and the others are right",
    "micro-batch missing": "what some micro-batches contribute is not in it",
    "part missing": "what some ranks contribute is not in it",
    "counted twice": "what some ranks or micro-batches contribute is in it twice",
    "same samples": "ranks that should read different samples read the same",
    "mean of means": "a mean of the means of parts that do not count alike",
    "reduced too late": "a sum or mean of what is no sum over parts: due before that operation",
    "norm": "a norm of other tensors, or of tensors counted otherwise",
    "another order": "the same values in another order",
    "pieces swapped": "the piece of another rank",
    "stale": "what belongs to an earlier step",
    "not zeroed": "what earlier steps found is still in it",
    "zeros": "zero where something is due",
    "cut off": "a gradient that does not flow back through one place",
    "recomputed": "computed again, for its backward pass, from another input than the forward pass had",
    "noise": "another stream of random numbers",
    "factor": "another multiple",
    "other weights": "the contributions with other weights",
    "another term": "a multiple of another tensor is in it too much, or too little",
    "coarser": "off as the rounding of a coarser dtype is",
    "copies apart": "ranks that should hold the same hold different values",
    "nobody holds": "no rank holds some of its elements",
    "not finite": "not finite",
    "follows": "what follows from a difference before it",
    "unknown": "no explanation that this instrument knows",
}

LUCK = 1e-4
"""A fit that would come about by chance as often as this says nothing."""


@dataclass(frozen=True)
class Kind:
    """A kind of mistake: `code` is a key of `KINDS`, `axes` says over what, the likeliest first where several would do
    the same; `words` says it in a sentence, with numbers."""

    code: str
    axes: tuple[str, ...] = ()
    words: str = ""
    ranks: tuple[int, ...] = ()
    others: tuple[Kind, ...] = ()  #: what would look the same here
    alone: Kind | None = None  #: said instead where no other name is sure to be of this kind: so few fit by chance

    def __str__(self) -> str:
        return self.words or KINDS[self.code]


@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor, and where it belongs in the flattened whole."""

    rank: int
    values: Array
    index: Array


Predict = Callable[[int], Array]
"""What a rank would have as the whole, were an explanation true."""


@dataclass
class Case:
    """A name to be judged."""

    name: str
    shape: tuple[int, ...]
    right: Array
    held: list[Held]
    axes: Axes
    expected: Expected
    micro_batches: int = 1
    others: dict[str, list[Held]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allowed = self.expected.allowed[self.name]
        self.share = max(self.allowed.share(self.right), 1e-15)
        self.near = min(12 * self.share, 0.2)  # an explanation may be off by this share of what is held
        self.off = {h.rank: self.allowed.beyond(h.values, self.right[h.index], h.index) for h in self.held}
        self.differing = [h.rank for h in self.held if self.off[h.rank] > 1]
        self.ranks = [h.rank for h in self.held]
        self.parts = self.expected.parts
        self.terms = self.expected.contributed.get(self.name)

    def row(self, h: Held) -> int:
        """How many elements a row has, where a rank holds whole rows of several; else 0."""
        width = self.shape[-1] if len(self.shape) > 1 else 0
        return 0 if width < 2 or h.index.size % width or (h.index[::width] % width).any() else width

    def misfit(self, predict: Predict, ranks: Iterable[int] | None = None) -> float:
        """How far an explanation is from what is held: root of the squares, as a share of what is held."""
        some = set(self.ranks if ranks is None else ranks)
        off = size = 0.0
        for h in self.held:
            if h.rank in some:
                wanted = predict(h.rank)[h.index]
                off += float(np.sum((h.values - wanted) ** 2))
                size += max(float(np.sum(h.values**2)), float(np.sum(wanted**2)))
        return float(np.sqrt(off / size)) if size else 0.0

    def is_right(self, misfit: float, ranks: Iterable[int] | None = None) -> bool:
        """Whether an explanation is near enough: within the rounding, and far nearer than "it is right" is."""
        mistake = self.misfit(lambda rank: self.right, ranks)
        return misfit <= max(self.near, 1e-12) and misfit <= 0.25 * mistake

    def is_chance(self, count: int, free: int = 0) -> bool:
        """Whether any `count` numbers may happen to come so near to an explanation of which `free` were fitted."""
        return max(self.near, 1e-12) ** (count - free) > LUCK

    def best(self, explanations: Iterable[tuple[Kind, Predict]], ranks: Iterable[int] | None = None) -> list[Kind]:
        """The explanations that fit, and as well as the best of them; in their order."""
        some = None if ranks is None else list(ranks)
        fits = [(self.misfit(predict, some), kind) for kind, predict in explanations]
        fits = [(misfit, kind) for misfit, kind in fits if self.is_right(misfit, some)]
        least = min((misfit for misfit, _ in fits), default=0.0)
        return [kind for misfit, kind in fits if misfit <= 3 * least + 1e-13 + 2 * self.share]

    def where_it_differs(self) -> Case | None:
        """The same name, with the elements alone that some rank has wrong; None where these are all."""
        off = np.zeros(self.right.size, bool)
        for h in self.held:
            off[h.index[np.abs(h.values - self.right[h.index]) > self.limit(h)]] = True
        if off.all() or not off.any():
            return None
        held = [Held(h.rank, h.values[off[h.index]], h.index[off[h.index]]) for h in self.held]
        held = [h for h in held if h.values.size]
        return replace(self, held=held)

    def limit(self, h: Held) -> Array:
        """How far each element that a rank holds may be off."""
        return TIMES * self.allowed.spread[h.index] + self.allowed.floor

    def assembled(self) -> Array | None:
        """The whole, put together from the pieces; None where ranks that hold the same elements disagree."""
        whole = np.full(self.right.size, np.nan)
        for h in self.held:
            there = whole[h.index]
            if (~np.isnan(there) & (np.abs(there - h.values) > 1e-6 * np.abs(h.values).max(initial=0))).any():
                return None
            whole[h.index] = h.values
        return None if np.isnan(whole).any() else whole

    def numbers(self) -> str:
        """What can be said of any difference: how large, how parallel, how many elements."""
        h = max(self.held, key=lambda each: self.off[each.rank])
        wanted = self.right[h.index]
        size, due = float(np.linalg.norm(h.values)), float(np.linalg.norm(wanted))
        if h.values.size == 1:
            return f"{h.values[0]:.6g} for {wanted[0]:.6g}, ratio {h.values[0] / wanted[0] if due else np.inf:.4g}"
        angle = float(h.values @ wanted) / (size * due) if size * due else 0.0
        count = int(np.sum(~(np.abs(h.values - wanted) <= self.limit(h))))
        ratio = f"{size / due:.4g}" if due else "∞"
        return f"{count} of {h.values.size} elements differ on rank {h.rank}; size × {ratio}, cosine {angle:.4g}"


def joined(names: Iterable[Any]) -> str:
    """Names with "and" before the last."""
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last
