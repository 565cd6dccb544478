"""What the exercises on memory share: readings of a rank's scale against theory, and what a failing one looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.compare import some_rank
from dtlib.grading.exercise import Case, Finding, Run, describe_case
from dtlib.theory import units

EXPORT_BYTES = 16 * units.KiB  # what a learner may turn into numbers of numpy or Python: sizes, norms, a few values
ReadingOf = Callable[[Mapping[str, Any]], float]
Theory = Callable[[Case, int], float]


def reading(data: Mapping[str, Any], label: str) -> Mapping[str, int]:
    """What `Scale.held` read as `label` (the last time): bytes by kind, and their ``"total"``."""
    return next(each for each in reversed(data["held"]) if each["label"] == label)


def peaks(data: Mapping[str, Any], label: str) -> list[Mapping[str, int]]:
    """What `Scale.peak` read in each block called `label`."""
    return [each for each in data["peaks"] if each["label"] == label]


def grown(start: str, end: str, *without: str) -> ReadingOf:
    """Takes how many bytes more were held at `end` than at `start`, the kinds in `without` left out."""

    def of(data: Mapping[str, Any]) -> float:
        before, after = reading(data, start), reading(data, end)
        return sum(after[kind] - before[kind] for kind in after if kind not in ("label", "total", *without))

    return of


def risen(label: str) -> ReadingOf:
    """Takes by how much the highest total in a block called `label` was above that at its start: the most of all."""
    return lambda data: max(each["total"] - each["before"] for each in peaks(data, label))


def inspect_at_most(of: ReadingOf, most: Theory, what: str) -> Callable[[Run], Finding | None]:
    """A check that on every rank no more is held than ``most(case, rank)`` bytes; `what` follows the bytes in words."""

    def inspect(run: Run) -> Finding | None:
        for rank, data in enumerate(run.ranks):
            where = f"on rank {rank}; {describe_case(run.case)}" if len(run.ranks) > 1 else describe_case(run.case)
            exported = data["exported_bytes"]
            if exported > EXPORT_BYTES:
                return Finding(f"a tensor of {told_bytes(exported)} turned into numbers", "tensors alone", where)
            seen, limit = of(data), most(run.case, rank)
            if seen > limit:
                return Finding(f"{told_bytes(seen)} {what}", f"at most {told_bytes(limit)}", where)
        return None

    return inspect


def held_like(of: ReadingOf, least: Theory, most: Theory | None = None) -> Any:
    """Recognise memory: in every failing run some rank held ``least(case, rank)`` bytes or more, and at most `most`."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            any(
                least(run.case, rank) <= of(data) and (most is None or of(data) <= most(run.case, rank))
                for rank, data in enumerate(run.ranks)
            )
            for run in back
        )

    return fits


EXPORTED = mistake(
    "kept as numbers",
    some_rank(lambda data, case: data["exported_bytes"] > EXPORT_BYTES),
    "A whole tensor became an array of numpy or a list, where nobody counts its bytes, and they are there all the "
    "same. Who needs them?",
)


def told_bytes(num_bytes: float) -> str:
    """A number of bytes in words."""
    return f"{num_bytes:,.0f} B ({units.format_bytes(num_bytes)})" if num_bytes >= units.KiB else f"{num_bytes:,.0f} B"
