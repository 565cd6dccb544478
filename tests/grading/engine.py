"""Exercises made for tests of the engine, and submissions of a single cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtlib.grading.exercises import inputs
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox.harness.cells import load
from dtlib.grading.sandbox.runner import Answer, Cell, Outcome, Sandbox

SETUP = "import os\nimport time\nimport numpy as np\nimport torch\nimport torch.distributed as dist\n"


def on_paper(*arguments: Any, **more: Any) -> tuple[Exercise, list[dict[str, Any]]]:
    """An exercise whose function `f` is called with each of `arguments`, one case each."""
    return Exercise("memory.1", "f", "", "paper.call", lambda rng: [], ()), [
        {"arguments": [each], "words": str(each), **more} for each in arguments
    ]


def on_ranks(
    *worlds: int, holds: Sequence[tuple[int, int, int, int]] = (), elements: int = 1000
) -> tuple[Exercise, list[dict[str, Any]]]:
    """An exercise whose function `f` gets a tensor on each rank, one case for each number of ranks."""
    exercise = Exercise(
        "collectives.5",
        "f",
        "",
        "collectives.reduce_scatter",
        lambda rng: [],
        (),
        handed_out=inputs.values,
        holds=lambda case: holds,
    )
    return exercise, [{"world_size": n, "num_elements": elements, "seed": n, "words": f"{n} ranks"} for n in worlds]


def run(sandbox: Sandbox, made: tuple[Exercise, list[dict[str, Any]]], source: str) -> Outcome:
    """What came of the function that `source` defines."""
    exercise, cases = made
    answer = Answer([Cell("setup", SETUP), Cell(exercise.id.replace(".", "-"), source)])
    return sandbox.run(exercise, answer, cases)


def troubles(outcome: Outcome) -> list[str]:
    """The kind of each case's trouble, "" where there was none."""
    return [each.trouble.kind if each.trouble else "" for each in outcome.observed]


OWN = "demo-2"


def demo(*cells: tuple[str, str] | str):
    """`f` of cell ``demo-2``; a cell without an id is an added one."""
    return load([("", each) if isinstance(each, str) else each for each in cells], OWN, "f")


def own(source: str) -> tuple[str, str]:
    return (OWN, source)
