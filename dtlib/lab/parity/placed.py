"""Explanations by place and time: another order, another rank's piece, another step, one rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import Case, Kind, Predict, joined
from .pieces import Array

_FEW = 6
"""So many zeros do not come about by chance."""
_SAME = 1e-3
"""Values further apart than this, sorted, are near each other by chance: all that are drawn alike are."""


def swapped(case: Case) -> Kind | None:
    """Whether ranks hold pieces that belong to others."""
    if len({tuple(h.index[:1]) for h in case.held}) < 2:
        return None
    whose = {}
    for h in (h for h in case.held if h.rank in case.differing):
        near = [
            other.rank
            for other in case.held
            if other.index.size == h.index.size
            and not np.array_equal(other.index, h.index)
            and np.linalg.norm(h.values - case.right[other.index]) <= max(case.near, 1e-9) * np.linalg.norm(h.values)
        ]
        if not near or not h.values.any():
            return None
        whose[h.rank] = near[0]
    axes = tuple(sorted({axis for pair in whose.items() for axis in case.axes.apart(pair)}))
    if set(axes) <= set(case.expected.data) and _depends(case) and set(whose.values()) != set(whose):
        text = ", ".join(f"rank {rank} those of rank {other}" for rank, other in list(whose.items())[:6])
        return Kind("same samples", axes, f"ranks of {joined(axes)} read the samples of others: {text}", tuple(whose))
    said = ", ".join(f"rank {rank} that of rank {other}" for rank, other in list(whose.items())[:6])
    return Kind("pieces swapped", axes, f"pieces swapped over {joined(axes)}: {said}", tuple(whose))


def _depends(case: Case) -> bool:
    """Whether it is another one for each part of the batch; a weight of before the step is not."""
    parts = case.expected.alone.get(case.name)  # none of what has another shape for a part: rows of activations
    return parts is None or any(not np.array_equal(part, case.expected.whole[case.name]) for part in parts)


def zeros(case: Case) -> Kind | None:
    """Whether all that differs is zero. A zero counts where the reference has more than rounding makes of nothing."""
    held = [(h, (h.values == 0) & (np.abs(case.right[h.index]) > case.allowed.spread[h.index])) for h in case.held]
    lost = [np.empty(0, int), *(h.index[zero] for h, zero in held)]
    if any((~zero & (np.abs(h.values - case.right[h.index]) > case.limit(h))).any() for h, zero in held):
        return None
    index = np.unique(np.concatenate(lost))
    if len(index) < min(_FEW, case.right.size):
        return None
    if not any(h.values.any() for h in case.held):
        return Kind("zeros", (), "zero: nothing has arrived")
    where = ""
    for dim, size in enumerate(case.shape):
        at = np.unique(np.unravel_index(index, case.shape)[dim])
        if len(at) < size and len(index) > 0.5 * len(at) * case.right.size / size:
            where = f": {joined(at[:6])}{' …' if len(at) > 6 else ''} along dimension {dim} of {size}"
            break
    return Kind("zeros", (), f"zero where something is due, in {len(index)} of {case.right.size} elements{where}")


def over_pieces(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """Pieces of a whole, added up or averaged over ranks that hold different ones."""
    held = {h.rank: h for h in case.held}
    for axes in case.axes.subsets():
        groups = {rank: case.axes.group(rank, axes, held) for rank in held}
        if any(len({held[r].index.size for r in g}) > 1 or len({held[r].index[:1].tobytes() for r in g}) < len(g)
               for g in groups.values()):  # fmt: skip
            continue
        over, n = joined(axes), case.axes.size(axes)
        words = f"{{}} over {over}, whose ranks hold different pieces: the group of another parameter"
        for how, by in (("averaged", n), ("added up", 1)):

            def predict(rank: int, groups: Any = groups, by: int = by) -> Array:
                whole = case.right.copy()
                whole[held[rank].index] = sum(case.right[held[r].index] for r in groups[rank]) / by
                return whole

            yield Kind("wrong group", axes, words.format(how)), predict


def reordered(case: Case) -> Kind | None:
    """Whether the same values stand in another order, and in which."""
    whole = case.assembled()
    if whole is None:
        ranks = case.differing
        first = next(h for h in case.held if h.rank in ranks)
        if first.index.size != case.right.size:
            return None
        whole = np.empty_like(case.right)
        whole[first.index] = first.values
    wanted, near = case.right, max(case.near, 1e-12)
    if whole.size < 2 or np.ptp(wanted) <= near * np.abs(wanted).max():
        return None
    if np.linalg.norm(np.sort(whole) - np.sort(wanted)) > near * np.linalg.norm(wanted):
        return None
    shape = case.shape
    for dim in range(len(shape)):
        found = _order(np.moveaxis(whole.reshape(shape), dim, 0), np.moveaxis(wanted.reshape(shape), dim, 0), near)
        if found is not None:
            n, block = len(found), _block(found)
            blocks = found[::block] // block
            order = " ".join(map(str, blocks[:12])) + (" …" if len(blocks) > 12 else "")
            what = "entries" if block == 1 else f"blocks of {block}"
            return Kind("another order", (), f"the same values in another order: along dimension {dim} of {n} the "
                        f"{what} stand as {order}{_hint(blocks, block)}")  # fmt: skip
    if len(shape) == 2 and shape[0] == shape[1]:
        turned = whole.reshape(shape).T.ravel()
        if np.linalg.norm(turned - wanted) <= near * np.linalg.norm(wanted):
            return Kind("another order", (), "the same values in another order: transposed")
    apart = np.count_nonzero(np.diff(np.sort(wanted)) > max(near, 1e-6) * np.ptp(wanted))
    if near > _SAME or 2 * apart < wanted.size:  # few values, as after Adam's first step, are alike in any order
        return None
    return Kind("another order", (), "the same values in another order, of no one dimension")


def _hint(blocks: Array, block: int) -> str:
    n = len(blocks)
    for rows in range(2, n):
        if n % rows == 0 and np.array_equal(blocks, np.arange(n).reshape(rows, -1).T.ravel()):
            return f" (interleaved by {rows}: gate and up, or q, k and v, cut in the wrong place?)"
    return " (heads or experts in another order?)" if block > 1 else ""


def _order(found: Array, wanted: Array, near: float) -> Array | None:
    """Which slice of `wanted` each slice of `found` is; None where they are not a permutation of each other."""
    a, b = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    if not 2 <= len(a) <= 4096:
        return None
    apart = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    order = apart.argmin(1)
    for row in range(len(a)):  # equal slices: stay where you are
        if np.array_equal(b[row], b[order[row]]):
            order[row] = row
    if len(set(order.tolist())) < len(order) or np.array_equal(order, np.arange(len(order))):
        return None
    return order if np.linalg.norm(a - b[order]) <= near * np.linalg.norm(b) else None


def _block(order: Array) -> int:
    """The largest blocks in which slices moved."""
    n = len(order)
    for block in range(n // 2, 0, -1):
        if n % block == 0:
            rows = order.reshape(-1, block)
            if (np.diff(rows, axis=1) == 1).all() and (rows[:, 0] % block == 0).all():
                return block
    return 1


def of_steps(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """What another step found, and sums over steps."""
    if not case.name.startswith("step "):
        return
    number, name = case.name.removeprefix("step ").split(": ", 1)
    now = int(number)
    whole = case.expected.whole
    past = {n: whole[f"step {n}: {name}"].ravel() for n in range(now) if f"step {n}: {name}" in whole}
    past = {n: each for n, each in past.items() if each.size == case.right.size}
    for n, each in sorted(past.items(), reverse=True):
        late = f"{now - n} step{'s' if now - n > 1 else ''}"
        yield Kind("stale", (), f"stale by {late}: what step {n} has"), lambda rank, each=each: each  # type: ignore[misc]
    if past:
        total = case.right + sum(past.values())
        yield Kind("not zeroed", (), "what all steps so far found: not set to zero between them"), lambda rank: total
        if len(past) > 1 and now - 1 in past:
            two = case.right + past[now - 1]
            yield Kind("not zeroed", (), "what this step and the last found: zeroed too late"), lambda rank: two
        mean = total / (len(past) + 1)
        yield Kind("not zeroed", (), "the mean of what all steps so far found"), lambda rank: mean


def of_names(case: Case) -> Kind | None:
    """Whether what differs is what another name with the same last part has: weights of before, where an update went
    missing."""
    own = case.name.split(": ")[-1].split("/", 1)
    for name, other in case.expected.whole.items():
        parts = name.split(": ")[-1].split("/", 1)
        if name == case.name or len(parts) < 2 or len(own) < 2 or parts[1] != own[1] or other.shape != case.shape:
            continue
        flat, far = other.ravel(), 0.0
        for h in (h for h in case.held if h.rank in case.differing):
            near = np.minimum(np.abs(h.values - flat[h.index]), np.abs(h.values - case.right[h.index]))
            far = max(far, float(near.max()) / max(float(np.abs(h.values).max()), 1e-300))
        if far <= max(4 * case.expected.eps, 1e-12) and np.linalg.norm(flat - case.right) > 0:
            where = case.axes.apart(case.differing) or case.axes.apart(case.ranks)
            return Kind("stale", where, f"on {case.axes.words(case.differing[0])} what differs is still {name!r}: what "
                        "was computed since has not arrived", tuple(case.differing))  # fmt: skip
    return None


def some_rows(case: Case) -> Kind | None:
    """Of tensors that ranks have cut, whether rows are right beside others that are not: tokens treated otherwise."""
    count, odd = 0, list[int]()
    for h in case.held:
        if not (width := case.row(h)) or h.index.size == case.right.size:
            return None
        off = (np.abs(h.values - case.right[h.index]) > case.limit(h)).reshape(-1, width)
        if off.any(1).all():  # a piece that is wrong as a whole
            return None
        count, odd = count + len(off), [*odd, *(h.index[::width][off.any(1)] // width).tolist()]
    if not odd or 8 * len(odd) > 7 * count:
        return None
    some = f"{joined(sorted(odd)[:6])}{' …' if len(odd) > 6 else ''}"
    text = f"{len(odd)} of {count} rows differ ({some}), and the others are right: routed, dropped or masked otherwise"
    return Kind("some rows", case.axes.apart(case.ranks), text, tuple(case.differing))


def alone(case: Case) -> Kind | None:
    """Some ranks differ and the others are right."""
    wrong, right = case.differing, [r for r in case.ranks if r not in case.differing]
    if not right:
        return None
    copies = all(h.index.size == case.right.size for h in case.held)
    for axes in case.axes.subsets():
        if copies and sorted(right) == sorted(r for r in case.ranks if all(case.axes.places[r][a] == 0 for a in axes)):
            over = joined(axes)
            firsts = " and ".join(f"{a} 0" for a in axes)
            words = f"the ranks with {firsts} are right and no other: not broadcast over {over}"
            return Kind("not broadcast", axes, words, tuple(wrong))
    if len(wrong) == 1:
        at = case.axes.words(wrong[0])
        words = f"{at} alone differs" + (": it was left out of a broadcast or a reduction" if copies else "")
        return Kind("rank alone", tuple(case.axes.apart(case.ranks)), words, tuple(wrong))
    fixed = {a: {case.axes.places[r][a] for r in wrong} for a in case.axes.sizes}
    same = [f"{a} {next(iter(at))}" for a, at in fixed.items() if len(at) == 1 and case.axes.sizes[a] > 1]
    who = f"the ranks with {joined(same)}" if same else f"ranks {joined(wrong)}"
    axes = tuple(a for a, at in fixed.items() if len(at) == 1 and case.axes.sizes[a] > 1) or case.axes.apart(wrong)
    return Kind("some ranks", axes, f"{who} differ, and the others are right; {case.numbers()}", tuple(wrong))
