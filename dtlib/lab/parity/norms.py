"""A norm of many tensors that comes out wrong: what was counted how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import Case, Held, Kind, Predict, joined


def members(case: Case) -> list[str]:
    """The names whose norm this number is in the reference: all tensors, or those that begin alike."""
    if case.right.size != 1 or "loss" in case.name:
        return []
    step = case.name.split(": ")[0] + ": " if case.name.startswith("step ") else ""
    names = [n for n, each in case.expected.whole.items() if each.ndim and n.startswith(step) and n != case.name]
    heads = sorted({name[: i + 1] for name in names for i, c in enumerate(name) if c in "./ :"}, key=len)
    for some in ([n for n in names if n.startswith(head)] for head in ["", *heads]):
        squares = sum(float(np.sum(case.expected.whole[n] ** 2)) for n in some)
        if some and abs(np.sqrt(squares) - case.right[0]) <= min(max(40 * case.share, 1e-9), 0.02) * case.right[0]:
            return some
    return []


def of_norms(case: Case) -> Iterator[tuple[Kind, Predict]]:
    """What such a norm is where tensors are counted otherwise."""
    names = members(case)
    if not names:
        return
    squares = {n: float(np.sum(case.expected.whole[n] ** 2)) for n in names}
    total = sum(squares.values())

    def norm(kind: Kind, square: float) -> tuple[Kind, Predict]:
        return kind, lambda rank: np.array([np.sqrt(max(square, 0.0))])

    found = sum(_square_of(case.others.get(n, [])) for n in names)
    yield norm(Kind("follows", (), "the norm of tensors that differ themselves"), found)
    for axes in case.axes.subsets():
        every_copy = sum(_counted(case, each, axes) for each in names)
        ranks = f"{case.axes.size(axes)} ranks of {joined(axes)}"
        yield norm(Kind("norm", axes, f"a norm: what several of the {ranks} hold is counted once for each"), every_copy)
    for axes in case.axes.subsets():
        n, over = case.axes.size(axes), joined(axes)
        copies = [each for each in names if _is_copied(case, each, axes)]
        extra = sum(squares[each] for each in copies)
        if len(copies) < len(names):
            for place in (dict.fromkeys(axes, 0), {axis: case.axes.sizes[axis] - 1 for axis in axes}):
                at = [rank for rank, own in enumerate(case.axes.places) if place.items() <= own.items()]
                text = f"a norm: of what is cut over {over}, only the pieces of {case.axes.words(at[0])} are counted"
                yield norm(Kind("norm", axes, text), extra + _union(case, [e for e in names if e not in copies], at))
        if copies and len(copies) < len(names):
            yield norm(Kind("norm", axes, f"a norm: tensors that all ranks of {over} hold are left out"), total - extra)
            yield norm(Kind("norm", axes, f"a norm: tensors that all ranks of {over} hold count 1/{n}"),
                       total - (1 - 1 / n) * extra)  # fmt: skip
            yield norm(Kind("norm", axes, f"a norm: pieces on {over} are squared after division"),
                       extra + (total - extra) / n)  # fmt: skip
        rest, every = set(case.axes.sizes) - set(axes), range(case.axes.world_size)
        own = {rank: _union(case, names, case.axes.group(rank, rest, every)) for rank in case.ranks}
        if any(abs(each - total) > 1e-9 * total for each in own.values()):
            kind = Kind("norm", axes, f"a norm never reduced over {over}: each rank has that of its own pieces")
            yield kind, lambda rank, own=own: np.array([np.sqrt(own[rank])])  # type: ignore[misc]
            firsts = {tuple(sorted(case.axes.group(r, rest, case.ranks))): own[r]
                      for r in case.ranks}  # fmt: skip
            added = sum(np.sqrt(each) for each in firsts.values())
            yield norm(Kind("norm", axes, f"a norm: norms are added over {over}, and not their squares"), added**2)
    for axes in case.axes.subsets():
        n, over = case.axes.size(axes), joined(axes)
        yield norm(Kind("norm", axes, f"a norm √{n} times too large, as if each of {over} counted all"), n * total)
        yield norm(Kind("norm", axes, f"a norm √{n} times too small, as if each of {over} had a part"), total / n)
    yield from _left_out(case, squares, total, norm)


def _left_out(
    case: Case, squares: dict[str, float], total: float, norm: Callable[[Kind, float], tuple[Kind, Predict]]
) -> Iterator[tuple[Kind, Predict]]:
    for name, square in squares.items():
        tied = " (tied weights?)" if any(word in name for word in ("emb", "head", "wte", "lm_")) else ""
        yield norm(Kind("norm", (), f"a norm: {name} is counted twice{tied}"), total + square)
        yield norm(Kind("norm", (), f"a norm: {name} is left out"), total - square)
    words = sorted({word for name in squares for word in name.replace("/", ".").replace(" ", ".").split(".")})
    for word in words:
        some = [name for name in squares if word in name.replace("/", ".").replace(" ", ".").split(".")]
        if 1 < len(some) < len(squares):
            extra = sum(squares[name] for name in some)
            yield norm(Kind("norm", (), f"a norm: all names with {word!r} are left out"), total - extra)
            yield norm(Kind("norm", (), f"a norm: all names with {word!r} are counted twice"), total + extra)
            for axes in case.axes.subsets():
                n = case.axes.size(axes)
                text = f"a norm: all names with {word!r} are counted for each of the {n} ranks of {joined(axes)}"
                yield norm(Kind("norm", axes, text), total + (n - 1) * extra)
    if len(squares) > 1:
        added = sum(np.sqrt(each) for each in squares.values())
        yield norm(Kind("norm", (), "a norm: norms of tensors are added, and not their squares"), added**2)
    yield norm(Kind("norm", (), "a norm: the square, without the root"), total**2)


def _square_of(held: list[Held]) -> float:
    """The square of the norm of a tensor, each element once."""
    seen: dict[bytes, Held] = {}
    for each in held:
        seen.setdefault(each.index.tobytes(), each)
    return sum(float(each.values @ each.values) for each in seen.values())


def _is_copied(case: Case, name: str, axes: tuple[str, ...]) -> bool:
    """Whether ranks that differ along `axes` alone hold the same elements."""
    held = {h.rank: h for h in case.others.get(name, [])}
    groups = [case.axes.group(rank, axes, held) for rank in held]
    return bool(groups) and all(
        len(group) == case.axes.size(axes) and all(np.array_equal(held[a].index, held[group[0]].index) for a in group)
        for group in groups
    )


def _counted(case: Case, name: str, axes: tuple[str, ...]) -> float:
    """The square of a tensor's norm, each element as often as there are places along `axes` that hold it."""
    right = case.expected.whole[name].ravel()
    times = np.zeros(right.size)
    for at in {tuple(case.axes.places[h.rank][a] for a in axes) for h in case.others.get(name, [])}:
        here = np.zeros(right.size, bool)
        for h in case.others[name]:
            if tuple(case.axes.places[h.rank][a] for a in axes) == at:
                here[h.index] = True
        times += here
    return float(np.sum(times * right**2))


def _union(case: Case, names: list[str], ranks: list[int]) -> float:
    """The square of the norm of all elements that some of `ranks` hold."""
    square = 0.0
    for name in names:
        there = [h.index for h in case.others.get(name, []) if h.rank in ranks]
        if there:
            every = np.unique(np.concatenate(there))
            square += float(np.sum(case.expected.whole[name].ravel()[every] ** 2))
    return square
