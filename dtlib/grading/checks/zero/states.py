"""zero.1: the bytes of one rank, on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.on_paper import gives_part, inspect_part, mistake, own_formula
from dtlib.grading.exercise import Case, Check, Exercise

_PARTS = "weights, gradients, optimizer"
_FIRST_SPLIT = (3, 2, 1)  # the stage from which on a part is split


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    recipes = ((2, 2, 12), (4, 4, 8), (2, 4, 12), (2, 2, 6))
    n = int(rng.choice([4, 8]))
    even = [n * int(size) for size in rng.integers(50, 4000, 3)]
    odd = [int(rng.integers(1, 60)) * 7 + 3, 1, int(rng.integers(1000, 9000)) * 7 + 5]
    cases = [
        _case([40, 1000], 4, 1, 2, recipes[0]),
        *(_case(even, n, stage, int(rng.integers(0, n)), recipes[int(rng.integers(0, 4))]) for stage in (0, 1, 2, 3)),
        *(_case(odd, 7, stage, rank, recipes[1]) for stage, rank in ((3, 0), (3, 6), (2, 4), (1, 3))),
        _case([int(rng.integers(2, 40)) * 3 + 1, 2], 3, 3, 1, recipes[0]),
        _case([5], 1, 3, 0, recipes[2]),
    ]
    return cases


def _case(sizes: list[int], n: int, stage: int, rank: int, recipe: tuple[int, int, int]) -> dict[str, Any]:
    words = f"parameters of {', '.join(map(str, sizes))} elements, {n} ranks, stage {stage}, rank {rank}"
    return {"arguments": [sizes, n, stage, rank, *recipe], "words": f"{words}, {' + '.join(map(str, recipe))} B"}


def _is_even(case: Case) -> bool:
    sizes, n = case["arguments"][:2]
    return all(size % n == 0 for size in sizes)


def _share(size: int, n: int, rank: int) -> int:
    return size // n + (rank < size % n)


Elements = Callable[[list[int], int, int], float]


def _kept(elements: Elements, first: Sequence[int] = _FIRST_SPLIT) -> Callable[[Case], list[float]]:
    """The three parts where a part that is split counts ``elements(sizes, n, rank)`` and others all."""

    def answer(case: Case) -> list[float]:
        sizes, n, stage, rank, *recipe = case["arguments"]
        return [
            width * (elements(sizes, n, rank) if stage >= begins else sum(sizes))
            for width, begins in zip(recipe, first, strict=True)
        ]

    return answer


def _own(sizes: list[int], n: int, rank: int) -> int:
    return sum(_share(size, n, rank) for size in sizes)


_expected = _kept(_own)


def _ceiling(sizes: list[int], n: int, rank: int) -> int:
    return sum(-(-size // n) for size in sizes)


def _last_takes_rest(sizes: list[int], n: int, rank: int) -> int:
    return sum(size // n + (size % n if rank == n - 1 else 0) for size in sizes)


def _elements(case: Case) -> list[float]:
    return [value / width for value, width in zip(_expected(case), case["arguments"][4:], strict=True)]


def _part(of: Callable[[Case], Any], part: int) -> Callable[[Case], Any]:
    return lambda case: of(case)[part]


def _mistakes(part: int) -> Any:
    def like(of: Callable[[Case], Any]) -> Any:
        return gives_part(_part(of, part), part, _PARTS)

    earlier = tuple(begins - (number == part) for number, begins in enumerate(_FIRST_SPLIT))
    later = tuple(begins + (number == part) for number, begins in enumerate(_FIRST_SPLIT))
    name = _PARTS.split(", ")[part]
    return (
        mistake(
            "never split",
            like(_kept(_own, (9, 9, 9))),
            f"The {name} are never split here. From which stage on does a rank keep a share of them only?",
        ),
        mistake(
            "split at every stage",
            like(_kept(_own, (0, 0, 0))),
            f"The {name} are split at every stage. What does stage 0 split?",
        ),
        mistake(
            "split a stage too early",
            like(_kept(_own, earlier)),
            f"A stage splits the {name} here that still keeps them whole. Which part does each stage add?",
        ),
        mistake(
            "split a stage too late",
            like(_kept(_own, later)),
            f"A stage keeps the {name} whole here that splits them. Which part does each stage add?",
        ),
        mistake(
            "elements for bytes",
            like(
                lambda case: [
                    value / width for value, width in zip(_expected(case), case["arguments"][4:], strict=True)
                ]
            ),
            "These are elements. How many bytes does one of them take?",
        ),
        mistake(
            "all ranks together",
            like(lambda case: [value * case["arguments"][1] for value in _expected(case)]),
            "This is N times what one rank keeps. Whose memory does the task ask for?",
        ),
        mistake(
            "order of the parts",
            like(lambda case: _expected(case)[::-1]),
            f"The order is ({_PARTS}). Which of your numbers stands where?",
        ),
    )


def _inspect_all(run: Any) -> Any:
    for part in range(3):
        found = inspect_part(_part(_expected, part), part, _PARTS)(run)
        if found:
            return found
    return None


def _all_like(of: Callable[[Case], list[float]]) -> Any:
    def fits(failing: Any, passing: Any) -> bool:
        return all(gives_part(_part(of, part), part, _PARTS)(failing, passing) for part in range(3))

    return fits


def _flat(sizes: list[int], n: int, rank: int) -> int:
    return _share(sum(sizes), n, rank)


_UNEVEN = (
    mistake(
        "a mean over the ranks",
        _all_like(_kept(lambda sizes, n, rank: sum(sizes) / n)),
        "That is the mean over the ranks, and no rank keeps a part of an element. Who has the ones that are left over?",
    ),
    mistake(
        "rounded down",
        _all_like(_kept(lambda sizes, n, rank: sum(size // n for size in sizes))),
        "Add up what all ranks keep: some elements belong to nobody. Who keeps them?",
    ),
    mistake(
        "rounded up everywhere",
        _all_like(_kept(_ceiling)),
        "Every rank keeps as much as the one with the most. That is what a padded layout stores. Which one does the "
        "task describe?",
    ),
    mistake(
        "the rest to the last rank",
        _all_like(_kept(_last_takes_rest)),
        "The last rank gets all that is left over, so the shares differ by up to N−1 elements. How does "
        "`tensor_split` hand the rest out?",
    ),
    mistake(
        "one long tensor",
        _all_like(_kept(_flat)),
        "This cuts one long tensor of all parameters. What is cut here, and how often are elements left over then?",
    ),
    mistake(
        "the longer ones last",
        _all_like(_kept(lambda sizes, n, rank: sum(_share(size, n, n - 1 - rank) for size in sizes))),
        "The shares have the right lengths, and other ranks have them. Which ranks get one element more?",
    ),
    mistake(
        "an element for everybody",
        _all_like(_kept(lambda sizes, n, rank: sum(max(1, _share(size, n, rank)) for size in sizes))),
        "It goes wrong where a parameter has fewer elements than there are ranks. What do the ranks keep that get "
        "none?",
    ),
)


def _check(part: int, description: str) -> Check:
    name = _PARTS.split(", ")[part]
    return Check(
        name,
        "memory",
        1,
        description,
        inspect_part(_part(_expected, part), part, _PARTS),
        _mistakes(part),
        applies=_is_even,
    )


STATES = Exercise(
    id="zero.1",
    function="bytes_on_rank",
    title="What one rank keeps",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("bytes_on_rank"),
        _check(0, "bytes of the weights, where N divides"),
        _check(1, "bytes of the gradients, where N divides"),
        _check(2, "bytes of the optimizer's part, where N divides"),
        Check(
            "uneven shares",
            "memory",
            2,
            "exact where N does not divide",
            _inspect_all,
            _UNEVEN,
            applies=lambda case: not _is_even(case),
        ),
    ),
)
