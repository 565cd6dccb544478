"""threed.1: the ranks that differ along some axes of a mesh; on paper."""

from functools import partial
from math import prod
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

#: Axes in an order, the farthest ranks first, and those along which the ranks differ.
KINDS = (
    ((("dp", 2), ("pp", 2), ("tp", 2)), ("pp",)), ((("tp", 2), ("dp", 3)), ("tp",)),
    ((("dp", 4), ("tp", 8)), ("dp",)), ((("pp", 3), ("dp", 2), ("tp", 4)), ("tp",)),
    ((("dp", 3), ("cp", 2), ("pp", 4)), ("cp",)), ((("cp", 2), ("tp", 1), ("dp", 5)), ("tp",)),
    ((("dp", 2), ("pp", 3), ("tp", 4)), ("dp", "tp")), ((("tp", 2), ("dp", 3), ("cp", 4)), ("dp", "cp")),
    ((("pp", 2), ("dp", 2), ("cp", 3), ("tp", 2)), ("pp", "cp")), ((("dp", 3), ("pp", 2)), ("dp", "pp")),
    ((("dp", 4), ("pp", 2), ("cp", 1), ("tp", 3)), ("dp", "cp", "tp")),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind, and meshes that are drawn, for the first rank, the last one and one between; names in any order."""
    cases = []
    for axes, along in (*KINDS, *(drawn(rng, several) for several in (1, 1, 2, 3))):
        n = prod(size for _, size in axes)
        ranks = (0, n - 1, int(rng.integers(1, n - 1)))
        cases += [case(dict(axes), rank, [str(each) for each in rng.permutation(along)]) for rank in ranks]
    return [cases[place] for place in rng.permutation(len(cases))]


def drawn(rng: Rng, several: int) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """A mesh of four axes, and the `several` of them along which the ranks differ."""
    names = [str(each) for each in rng.permutation(["dp", "cp", "pp", "tp"])]
    return tuple((name, int(rng.integers(2, 5))) for name in names), tuple(rng.permutation(names)[:several].tolist())


def case(axes: dict[str, int], rank: int, along: list[str]) -> dict[str, Any]:
    words = f"rank {rank} of {', '.join(f'{name} {size}' for name, size in axes.items())}, along {' and '.join(along)}"
    return call(words, [axes, rank, along], **{"one axis": len(along) == 1})


def right(case: Case) -> list[int]:
    axes, rank, along = case["arguments"]
    here = place(axes, rank)
    others = [name for name in axes if name not in along]
    return [r for r in range(prod(axes.values())) if all(place(axes, r)[name] == here[name] for name in others)]


def place(axes: dict[str, int], rank: int) -> dict[str, int]:
    """Where a rank stands on each axis: the last one varies fastest."""
    found = {}
    for name, size in reversed(axes.items()):
        rank, found[name] = divmod(rank, size)
    return found


of = partial(values, right=right, kind="value")
EXERCISE = on_paper(
    "threed.1", "ranks_along", "Who is in my group?", draw,
    of(3, "one", "the ranks that differ along one axis", where="one axis"),
    of(2, "several", "the ranks that differ along several axes", where="not one axis"),
)  # fmt: skip
