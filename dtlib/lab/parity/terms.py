"""Explanations that are no sum over parts of the batch: another name's tensor in it, what was reduced too late, copies
that came apart, a coarser dtype."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import torch

from .case import Case, Kind, Predict, joined
from .norms import members
from .pieces import Array

_FEW = 6
"""Through fewer numbers than this a line fits too often by chance."""
_COARSE = (torch.bfloat16, torch.float16)


def too_late(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """What the reference makes of each part alone, averaged or added up, where that is not what it makes of all."""
    alone, data = case.expected.alone.get(case.name), case.expected.data
    if alone is None or not data:
        return
    lines = [each.ravel() for each in alone]
    words = "what the reference makes of each part alone is {}: reduced after an operation that is no sum (clipping, " \
            "a norm, an optimizer's step), and due before it"  # fmt: skip
    mean = np.mean(lines, 0)
    yield Kind("reduced too late", data, words.format("averaged")), lambda rank: mean
    yield Kind("reduced too late", data, words.format("added up")), lambda rank: len(lines) * mean
    own = [
        np.mean([line for line, at in zip(lines, case.parts, strict=True) if all(at[a] == p[a] for a in data)], 0)
        for p in case.axes.places
    ]
    said = f"never reduced over {joined(data)}: each rank holds what its own part gives"
    yield Kind("never reduced", data, said), lambda rank: own[rank]


def of_logarithms(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """A loss that is off by the logarithm of a size: in a sum of exponentials what all ranks hold is added up."""
    for axes in case.axes.subsets() if case.right.size == 1 and not members(case) else ():
        n, over = case.axes.size(axes), joined(axes)
        text = f"ln {n} too much: a sum of exponentials counts what all {n} ranks of {over} hold once for each"
        more = case.right + np.log(n)
        yield Kind("once per rank", axes, text), lambda rank, more=more: more  # type: ignore[misc]


def another_term(case: Case) -> Kind | None:
    """Whether a multiple of another name, or one vector in each row, is in it and should not be, or is missing."""
    held = [h for h in case.held if h.rank in case.differing]
    off = np.concatenate([h.values - case.right[h.index] for h in held])
    if off.size < _FEW or not off.any():
        return None
    width = case.shape[-1] if len(case.shape) > 1 else 0
    column = np.concatenate([h.index % width for h in held]) if width else np.zeros(0, int)
    names = [name for name, _ in _candidates(case)]
    terms = [other.ravel()[column] if other.shape != case.shape
             else np.concatenate([other.ravel()[h.index] for h in held]) for _, other in _candidates(case)]  # fmt: skip
    for some in (some for k in (1, 2) for some in combinations(range(len(names)), k)):
        columns = np.stack([terms[n] for n in some], 1)
        times, *_ = np.linalg.lstsq(columns, off, rcond=None)
        if off.size >= _FEW * len(some) and times.any() and _is_near(case, off, columns @ times):
            sums = " ".join(f"{t:+.4g} × {_called(case, names[n])}" for n, t in zip(some, times, strict=True))
            text = f"off by {sums}: counted more or less often than is due (a bias, weight decay, a learning rate)"
            return Kind("another term", (), text)
    if width > 1 and off.size >= 4 * width:
        counts, totals = np.bincount(column, minlength=width), np.bincount(column, off, width)
        mean = totals / np.maximum(counts, 1)
        if _is_near(case, off, mean[column]):
            return Kind("another term", (), "off by the same vector in each row: a bias that is counted for each rank, "
                        "or left out")  # fmt: skip
    return None


def _candidates(case: Case) -> Iterator[tuple[str, Array]]:
    """Names of the same step, computed before, that are about the same parameter, and then vectors as long as a row."""
    every = list(case.expected.whole)
    head, tail = ends(case.name)
    same = {n: case.expected.whole[n] for n in every[: every.index(case.name)] if ends(n)[0] == head}
    yield from ((n, each) for n, each in same.items() if each.shape == case.shape and ends(n)[1] == tail)
    if len(case.shape) > 1:
        yield from ((n, each) for n, each in same.items() if each.shape == case.shape[-1:])


def ends(name: str) -> tuple[str, str]:
    """The step of a name, and what it is about."""
    step, _, plain = name.rpartition(": ")
    return step, plain.split("/", 1)[-1]


def _called(case: Case, name: str) -> str:
    """Its first word, where the rest is that of the case, so that like rows are said alike."""
    plain = name.rpartition(": ")[2]
    return f"its {plain.split('/', 1)[0]}" if ends(name) == ends(case.name) else repr(plain)


def _is_near(case: Case, off: Array, term: Array) -> bool:
    rest, size = float(np.linalg.norm(off - term)), float(np.linalg.norm(off))
    near = case.near * float(np.sqrt(np.mean(case.right**2) * off.size))
    return rest <= 0.02 * size and rest <= max(near, 1e-9 * size)


def coarser(case: Case) -> Kind | None:
    """Whether each value is one of a coarser dtype than the step is known to compute in, and as near as this gets."""
    held = [h for h in case.held if h.rank in case.differing]
    values, wanted = (
        np.concatenate(each) for each in zip(*((h.values, case.right[h.index]) for h in held), strict=True)
    )
    if np.count_nonzero(values) < _FEW:
        return None
    for dtype in _COARSE:
        eps = float(torch.finfo(dtype).eps)
        rounded = torch.from_numpy(values).to(dtype).double().numpy()
        near = np.linalg.norm(values - wanted) <= 4 * eps * np.linalg.norm(wanted)
        if case.expected.eps < eps and near and np.array_equal(rounded, values):
            name = str(dtype)
            text = f"each value is one of {name.removeprefix('torch.')}, and off by no more than its rounding: " \
                   f"computed, kept or sent in it (where that is meant, say dtype={name})"  # fmt: skip
            return Kind("coarser", (), text)
    return None


def copies_apart(case: Case) -> Kind | None:
    """Along which axes ranks hold the same elements with other values."""
    held = {h.rank: h for h in case.held}

    def is_apart(axis: str) -> bool:
        for rank, h in held.items():
            for other in (held[r] for r in case.axes.group(rank, (axis,), held) if r > rank):
                if np.array_equal(h.index, other.index) and (np.abs(h.values - other.values) > case.limit(h)).any():
                    return True
        return False

    axes = tuple(axis for axis, size in case.axes.sizes.items() if size > 1 and is_apart(axis))
    if not axes:
        return None
    over = joined(axes)
    text = f"ranks of {over} hold other values where they should hold the same: something before it is not reduced " \
           f"over {over} (in the backward pass?), or drawn apart; which is not known. {case.numbers()}"  # fmt: skip
    return Kind("copies apart", axes, text)
