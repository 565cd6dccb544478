"""Explanations that are sums: a factor, what was never added, what was added twice or to the wrong ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from dtlib.theory.decompose import decompose

from .case import Case, Kind, Predict, joined
from .pieces import Array

MICRO = "micro-batches"


def factors(case: Case) -> Iterator[tuple[float, Kind]]:
    """Multiples of the right result that sizes of the mesh explain."""
    n = case.axes.size
    sized = [(axes, n(axes)) for axes in case.axes.subsets()]
    sized.sort(key=lambda each: (len(each[0]), not set(each[0]) <= set(case.expected.data)))
    for axes, size in sized:
        over, some = joined(axes), f"{size} ranks of {joined(axes)}"
        if set(axes) <= set(case.expected.data):
            yield size, Kind("sum for mean", axes, f"{size} times too much, as by a sum over {over} for a mean")
        else:
            yield size, Kind("once per rank", axes, f"{size} times too much, as if counted once for each of the {some}")
        yield 1 / size, Kind("mean for sum", axes, f"1/{size} of what is due, as by a mean over {over} for a sum, or "
                             "by a division too many")  # fmt: skip
    if (m := case.micro_batches) > 1:
        yield m, Kind("sum for mean", (MICRO,), f"{m} times too much, as by a sum over the micro-batches for a mean")
        yield 1 / m, Kind("mean for sum", (MICRO,), f"1/{m} of what is due, as by dividing by the {m} micro-batches "
                          "too often, or by taking one of them alone")  # fmt: skip


def multiples(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """Each factor as an explanation."""
    for factor, kind in factors(case):
        yield kind, lambda rank, factor=factor: factor * case.right  # type: ignore[misc]


def never_reduced(case: Case) -> list[Kind]:
    """Whether what the ranks of some axes hold adds up, or averages, to what each should hold."""
    values = {h.rank: h for h in case.held}
    for axes in case.axes.subsets():
        groups = [case.axes.group(rank, axes, case.ranks) for rank in case.ranks]
        if any(len(group) != case.axes.size(axes) for group in groups):
            continue
        if any(not np.array_equal(values[a].index, values[group[0]].index) for group in groups for a in group):
            continue
        sums, due, size, apart = 0.0, 0.0, 0.0, 0.0
        for group in groups:
            total, held = np.sum([values[r].values for r in group], 0), values[group[0]]
            wanted = case.right[held.index]
            sums, due = sums + float(total @ wanted), due + float(wanted @ wanted)
            apart += float(np.sum((total / len(group) - held.values) ** 2))
            size += float(np.sum([values[r].values @ values[r].values for r in group]))
        n = case.axes.size(axes)
        if not due or apart < max(1e-12, 4 * case.share) ** 2 * size:
            continue
        for factor, extra in ((1.0, "a sum"), (float(n), "a mean"), *_odd(case, axes)):
            off = sum(
                float(np.sum((np.sum([values[r].values for r in g], 0) - factor * case.right[values[g[0]].index]) ** 2))
                for g in groups
            )
            if size and np.sqrt(off / size) <= max(case.near, 1e-12) * np.sqrt(n):
                over = joined(axes)
                if extra.startswith("a "):
                    return [Kind("never reduced", axes, f"never reduced over {over}: {extra} is due")]
                return [Kind("wrong group", axes, f"never reduced over {over}, but {extra}")]
    return []


def _odd(case: Case, axes: tuple[str, ...]) -> Iterator[tuple[float, str]]:
    n = case.axes.size(axes)
    for others in case.axes.subsets():
        if not set(others) & set(axes):
            m = case.axes.size(others)
            for factor in (float(m), float(n * m)):
                yield factor, f"summed over {joined(others)}"
            yield n / m, f"divided by the {m} of {joined(others)}"


Weights = Array
"""How often each part is in what a rank holds; 1 is right."""


def of_parts(case: Case) -> Iterator[tuple[Kind, list[Weights]]]:
    """What mistakes make of the parts of the batch: for each rank how often each is counted."""
    parts, data, m = case.parts, case.expected.data, case.micro_batches
    shares = case.expected.shares
    if case.terms is None or shares is None:
        return
    ranks = case.axes.places
    ones, total = np.ones(len(parts)), float(shares.sum())

    def where(**at: int) -> Array:
        return np.array([all(part[name] == value for name, value in at.items()) for part in parts])

    for k in range(1, len(data) + 1):
        for axes in combinations(data, k):
            own = [where(**{a: place[a] for a in axes}) for place in ranks]
            n, over = case.axes.size(axes), joined(axes)
            if n == 1:
                continue
            alone = Kind("never reduced", axes, f"never reduced over {over}: each rank holds what its own part gives")
            yield alone, [1.0 * each for each in own]
            yield alone, [float(n) * each for each in own]
            yield alone, [each * total / shares[each].sum() for each in own]
            for others in case.axes.subsets():
                if not set(others) & set(axes):
                    words = f"reduced over {joined(others)} in the place of {over}"
                    by = case.axes.size(others)
                    for factor in (by, n * by, by / n):
                        yield Kind("wrong group", axes, words), [float(factor) * each for each in own]
    if np.ptp(shares) > 1e-9 * abs(total):
        names = [*[a for a in data if case.axes.sizes[a] > 1], *(["micro_batch"] if m > 1 else [])]
        for k in range(1, len(names) + 1):
            for some in combinations(names, k):
                mine = [where(**{a: part[a] for a in some}) for part in parts]
                groups = len({tuple(part[a] for a in some) for part in parts})
                over = joined(MICRO if a == "micro_batch" else a for a in some)
                kind = Kind("mean of means", tuple(over.split(" and ")),
                            f"a mean over {over} of means of parts that do not count alike")  # fmt: skip
                means = np.array([total / groups / shares[each].sum() for each in mine])
                yield kind, [means] * len(ranks)
                if "micro_batch" in some:
                    yield kind, [m * means] * len(ranks)
    for j in range(m if m > 1 else 0):
        one = where(micro_batch=j)
        said = Kind("micro-batch missing", (MICRO,), f"micro-batch {j} of {m} is missing")
        yield said, [ones - one] * len(ranks)
        yield said, [(ones - one) * m / (m - 1)] * len(ranks)
        alone = Kind("micro-batch missing", (MICRO,), f"only micro-batch {j} of {m} counts")
        for factor in (1.0, m, 1 / m):
            yield alone, [one * float(factor)] * len(ranks)
        yield Kind("counted twice", (MICRO,), f"micro-batch {j} of {m} is counted twice"), [ones + one] * len(ranks)
    for axis in data:
        n = case.axes.sizes[axis]
        for v in range(n if n > 1 else 0):
            one = where(**{axis: v})
            said = Kind("part missing", (axis,), f"what {axis} {v} contributes is missing")
            yield said, [ones - one] * len(ranks)
            yield said, [(ones - one) * n / (n - 1)] * len(ranks)
            yield (
                Kind("counted twice", (axis,), f"what {axis} {v} contributes is counted twice"),
                [ones + one] * len(ranks),
            )
            if n > 2:
                for u in range(n):
                    words = f"{axis} {v} reads the samples of {axis} {u}"
                    if u != v:
                        yield Kind("same samples", (axis,), words), [ones - one + where(**{axis: u})] * len(ranks)
            yield (Kind("same samples", (axis,), f"all ranks of {axis} read the samples of {axis} {v}"),
                   [one * float(n)] * len(ranks))  # fmt: skip


def weighted(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """Each of `of_parts` as an explanation."""
    if case.terms is None:
        return
    columns = np.stack(case.terms, 1)
    for kind, weights in of_parts(case):
        yield kind, lambda rank, weights=weights: columns @ weights[rank]  # type: ignore[misc]


def decoded(case: Case) -> Kind | None:
    """The contributions with whatever weights fit, said with numbers."""
    if case.terms is None:
        return None
    lines = []
    for h in case.held:
        found = decompose(h.values, [term[h.index] for term in case.terms], rtol=max(1e-9, case.near))
        if found is None or case.is_chance(h.values.size, len(found)):
            return None
        lines.append((h.rank, found))
    rank, first = next(((r, w) for r, w in lines if not np.allclose(w, 1, atol=0.02)), lines[0])
    if np.allclose(first, 1, atol=0.02):
        return None
    if kind := _pattern(case, first):
        return kind
    said = ", ".join(
        f"{' '.join(f'{name} {at}'.replace('_', '-') for name, at in part.items())}: {weight:.3g}"
        for part, weight in list(zip(case.parts, first, strict=True))[:8]
    )
    return Kind("other weights", (), f"on rank {rank} the parts count with other weights than 1 ({said})")


def _pattern(case: Case, weights: Weights) -> Kind | None:
    """What weights of 0, 1 and 2 say, up to a common factor: which parts are missing, and which are in it twice."""
    unit = float(np.median(weights[np.abs(weights) > 0.02 * np.abs(weights).max()]))
    often = np.round(weights / unit)
    if np.abs(weights / unit - often).max() > 0.02 or often.min() < 0 or often.max() > 2:
        return None
    for name in (*case.expected.data, "micro_batch"):
        by: dict[int, set[int]] = {}
        for part, count in zip(case.parts, often, strict=True):
            by.setdefault(part[name], set()).add(int(count))
        if len(by) < 2 or any(len(counts) > 1 for counts in by.values()):
            continue
        none, twice = ([at for at, counts in by.items() if counts == {k}] for k in (0, 2))
        axis = MICRO if name == "micro_batch" else name
        tail = f", and all is scaled by {unit:.4g}" if abs(unit - 1) > 0.01 else ""
        if none and name != "micro_batch" and (twice or len(none) == len(by) - 1):
            text = f"no rank of {axis} reads the samples of {axis} {joined(none)}{tail}"
            return Kind("same samples", (axis,), text)
        if none:
            code = "micro-batch missing" if axis == MICRO else "part missing"
            return Kind(code, (axis,), f"{axis} {joined(none)}: what they contribute is missing{tail}")
        if twice:
            return Kind("counted twice", (axis,), f"{axis} {joined(twice)}: what they contribute counts twice{tail}")
    return None


def scaled(case: Case) -> Kind | None:
    """A multiple that no size explains."""
    each = {}
    for h in case.held:
        wanted = case.right[h.index]
        if h.values.size < 4 or not wanted.any():
            return None
        factor = float(h.values @ wanted) / float(wanted @ wanted)
        if np.linalg.norm(h.values - factor * wanted) > max(case.near, 1e-9) * np.linalg.norm(h.values):
            return None
        each[h.rank] = factor
    if max(abs(factor - 1) for factor in each.values()) < 0.02 or not any(each.values()):
        return None
    if max(each.values()) - min(each.values()) <= max(case.near, 1e-9) * max(map(abs, each.values())):
        factor = next(iter(each.values()))
        power = round(float(np.log2(abs(factor))))
        scale = (
            f" (2^{power}: a loss scale left in it?)" if abs(power) > 4 and abs(factor / 2.0**power - 1) < 0.01 else ""
        )
        return Kind("factor", (), f"{factor:.6g} times what is due, which no size of the mesh explains{scale}")
    said = ", ".join(f"rank {rank} {factor:.4g}" for rank, factor in list(each.items())[:8])
    return Kind("factor", case.axes.apart(each), f"a multiple that differs between ranks: {said}")
