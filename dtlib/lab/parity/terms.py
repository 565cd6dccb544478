"""Explanations that are no sum over parts of the batch: another name's tensor in it, what was reduced too late, copies
that came apart, a coarser dtype."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import torch

from .case import Case, Kind, Predict, joined
from .expected import COARSE
from .norms import members
from .pieces import Array

_FEW = 6
"""Through fewer numbers than this a line fits too often by chance."""
_COARSE = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


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


def of_own_part(case: Case) -> Kind | None:
    """Pieces of activations, where each rank has what the reference makes of its part alone."""
    pieces, data = case.expected.pieces.get(case.name, []), case.expected.data
    off = size = 0.0
    for h in case.held:
        own = [
            p
            for p, at in zip(pieces, case.parts, strict=False)
            if all(at[a] == case.axes.places[h.rank][a] for a in data)
        ]
        if len(own) != 1 or own[0].size != h.values.size:
            return None
        off, size = off + float(np.sum((h.values - own[0]) ** 2)), size + float(np.sum(h.values**2))
    if not case.held or off > max(case.near, 1e-9) ** 2 * size:
        return None
    text = (
        "each rank has what the reference makes of its own part alone: a statistic of the batch (a batch norm's?) is "
        f"not reduced over {joined(data)}"
    )
    return Kind("never reduced", data, text)


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
    index = np.concatenate([h.index for h in held])
    terms = [other.ravel()[index] for _, other in _candidates(case)]
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


def other_rows(case: Case) -> Kind | None:
    """Whether rows are off by rows of another name: an embedding that looks up what is another rank's."""
    h = next(h for h in case.held if h.rank in case.differing)
    if not (width := case.row(h)):
        return None
    off, limit = ((each.reshape(-1, width)) for each in (h.values - case.right[h.index], case.limit(h)))
    odd = off[(np.abs(off) > limit).any(1)]
    for name, rows in case.expected.whole.items():
        if name == case.name or len(odd) < 3:
            return None
        for sign, words in ((1, "too much"), (-1, "too little")) if rows.ndim == 2 and rows.shape[1] == width else ():
            nearest = ((odd[:, None] - sign * rows[None, :4096]) ** 2).sum(2).min(1)
            if np.sqrt(nearest.sum()) <= min(case.near, 0.05) * np.linalg.norm(odd):
                text = f"{len(odd)} of {len(off)} rows are off by a row of {name!r} {words}: another rank's to look up?"
                return Kind("another term", (), text)
    return None


def _candidates(case: Case) -> Iterator[tuple[str, Array]]:
    """Names of the same step, computed before, that are about the same parameter, and then vectors as long as a row."""
    every = list(case.expected.whole)
    head, tail = ends(case.name)
    same = {n: case.expected.whole[n] for n in every[: every.index(case.name)] if ends(n)[0] == head}
    yield from ((n, each) for n, each in same.items() if each.shape == case.shape and ends(n)[1] == tail)
    for dim in range(len(case.shape) - 1, -1, -1) if len(case.shape) > 1 else ():  # a bias of a convolution is not last
        along = [1] * dim + [-1] + [1] * (len(case.shape) - dim - 1)
        yield from ((n, np.broadcast_to(each.reshape(along), case.shape)) for n, each in same.items()
                    if each.shape == case.shape[dim : dim + 1])  # fmt: skip


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
    held = [h for h in case.held if not case.differing or h.rank in case.differing]
    values, wanted = (
        np.concatenate(each) for each in zip(*((h.values, case.right[h.index]) for h in held), strict=True)
    )
    if np.count_nonzero(values) < _FEW:
        return None
    for dtype in _COARSE:
        eps = float(torch.finfo(dtype).eps)
        rounded, due = (torch.from_numpy(each).to(dtype).double().numpy() for each in (values, wanted))
        near = np.linalg.norm(values - wanted) <= min(4 * eps, 0.15) * np.linalg.norm(wanted)
        if case.expected.eps < eps and near and np.array_equal(rounded, values) and not np.array_equal(due, wanted):
            name = str(dtype)
            text = f"each value is one of {name.removeprefix('torch.')}, and off by no more than its rounding: " \
                   f"computed, kept or sent in it (where that is meant, say dtype={name})"  # fmt: skip
            return Kind("coarser", (), text)
    return None


def copies_apart(case: Case) -> Kind | None:
    """Along which axes ranks hold the same elements with other values: one of them, or all together, further apart than
    two perturbed runs of the reference."""
    held = {h.rank: h for h in case.held}
    noise = case.expected.perturbed.get(case.name, np.zeros((1, case.right.size)))
    # Once in a million Student's t is beyond so many spreads (Wallace's approximation), as the limit of one element is.
    times = len(noise) * np.expm1(24 / len(noise))

    def is_apart(axis: str) -> bool:
        for rank, h in held.items():
            spread = 2 * float((noise[:, h.index] ** 2).sum(1).mean())
            least = max(times * spread, (3 * case.expected.eps * float(np.linalg.norm(case.right[h.index]))) ** 2)
            for other in (held[r] for r in case.axes.group(rank, (axis,), held) if r > rank):
                if np.array_equal(h.index, other.index):
                    off = h.values - other.values
                    if (np.abs(off) > case.limit(h)).any() or (case.expected.eps > COARSE and float(off @ off) > least):
                        return True
        return False

    axes = tuple(axis for axis, size in case.axes.sizes.items() if size > 1 and is_apart(axis))
    if not axes:
        return None
    over = joined(axes)
    text = f"ranks of {over} hold other values where they should hold the same: something before it is not reduced " \
           f"over {over} (in the backward pass?), or drawn apart; which is not known. {case.numbers()}"  # fmt: skip
    return Kind("copies apart", axes, text)
