"""threed.3: a rank's piece of a matrix under another mesh, from the pieces of the mesh that saved it; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

from .groups import place

#: Rows and columns, the axes of the mesh that saved it and of the one that reads it, the farthest ranks first.
KINDS = (
    ((4, 6), (("dp", 2), ("tp", 2)), (("dp", 3), ("tp", 2))), ((5, 8), (("dp", 3), ("tp", 4)), (("dp", 2), ("tp", 4))),
    ((3, 9), (("dp", 4), ("tp", 1)), (("dp", 5), ("tp", 1))), ((4, 6), (("tp", 2), ("dp", 2)), (("tp", 2), ("dp", 4))),
    ((3, 8), (("dp", 2), ("tp", 4)), (("dp", 4), ("tp", 2))), ((5, 6), (("dp", 2), ("tp", 3)), (("tp", 2), ("dp", 3))),
    ((4, 12), (("tp", 4), ("dp", 3)), (("dp", 2), ("tp", 6))), ((3, 4), (("tp", 4), ("dp", 2)), (("dp", 1), ("tp", 1))),
    ((3, 4), (("dp", 1), ("tp", 1)), (("dp", 5), ("tp", 2))), ((2, 4), (("tp", 2), ("dp", 5)), (("tp", 4), ("dp", 3))),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind, and some that are drawn, for the first two ranks and others.

    There are more ranks of dp than divide the elements, and more than there are elements. Small matrices say where a
    number stood, and come first; of the others only the pieces know.
    """
    cases = []
    for shape, old, new in (*KINDS, drawn(rng, True), drawn(rng, False), drawn(rng, False)):
        n = int(np.prod([size for _, size in new]))
        ranks = {0, min(1, n - 1), n - 1, int(rng.integers(n))}
        cases += [case(rng, shape, dict(old), dict(new), rank, shape[1] < 12) for rank in sorted(ranks)]
    rng.shuffle(cases)  # type: ignore[arg-type]
    return sorted(cases, key=lambda each: not each["is"]["numbered"])


def drawn(rng: Rng, same: bool) -> tuple[tuple[int, int], tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """A shape and two meshes, of the `same` number of ranks of tp or not; their axes in any order."""
    before, after = map(int, rng.permutation([1, 2, 3, 4, 6])[:2])
    meshes = []
    for tp in (before, before if same else after):
        first, second = rng.permutation([0, 1])
        pairs = (("dp", int(rng.integers(1, 7))), ("tp", tp))
        meshes.append((pairs[first], pairs[second]))
    return (int(rng.integers(2, 7)), 12), meshes[0], meshes[1]


def case(
    rng: Rng, shape: tuple[int, int], old: dict[str, int], new: dict[str, int], rank: int, numbered: bool
) -> dict[str, Any]:
    start = int(rng.integers(10)) * 100 + 0.5
    whole = start + np.add.outer(10 * np.arange(shape[0]), np.arange(shape[1]))
    if not numbered:
        whole = rng.permutation(start + np.arange(whole.size)).reshape(shape)
    pieces = [piece(whole, old, each) for each in range(old["dp"] * old["tp"])]
    named = ["{} {}, {} {}".format(*(part for pair in axes.items() for part in pair)) for axes in (old, new)]
    words = f"rank {rank} of {named[1]}, a matrix of {shape[0]} × {shape[1]} from {named[0]}"
    words += f", with {start} + 10 i + j in row i and column j, both counted from 0" * numbered
    properties = {"same slices": old["tp"] == new["tp"], "numbered": numbered}
    return call(words, [pieces, list(shape), old, new, rank], **properties) | {"right": piece(whole, new, rank)}


def piece(whole: Array, axes: dict[str, int], rank: int) -> Array:
    """What a rank has: its columns, row after row, and of these its part."""
    at = place(axes, rank)
    columns = np.split(whole, axes["tp"], axis=1)[at["tp"]]
    return np.array_split(columns.reshape(-1), axes["dp"])[at["dp"]].copy()


def right(case: Case) -> Array:
    return np.asarray(case["right"])


of = partial(values, right=right, kind="value")
EXERCISE = on_paper(
    "threed.3", "recut", "A checkpoint for another mesh", draw,
    of(2, "dp", "pieces for another number of ranks of dp", where="same slices"),
    of(4, "tp", "pieces for another number of ranks of tp", where="not same slices"),
)  # fmt: skip
