"""Answers that are dictionaries of whole numbers: a check looks at some of the entries, to the last digit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlib.grading.compare import answer, compare, gives, show
from dtlib.grading.exercise import Case, Finding, FormError, Run, describe_case

Entries = Mapping[str, int]


def entry(run: Run, name: str, names: Sequence[str]) -> Any:
    """One entry of the answer; `FormError` where there is none. `names` are those that the task asks for."""
    value = answer(run)
    listed = ", ".join(f"`{each}`" for each in names)
    if not isinstance(value, dict) or "not_plain" in value:
        raise FormError(show(value), f"a dictionary with {listed}")
    if name not in value:
        raise FormError(f"a dictionary without `{name}`", f"one with {listed}")
    return value[name]


def inspect_entries(
    expected: Callable[[Case], Entries], names: Sequence[str], looked_at: Sequence[str]
) -> Callable[[Run], Finding | None]:
    """A check that the entries `looked_at` are exactly those of ``expected(case)``."""

    def inspect(run: Run) -> Finding | None:
        wanted = expected(run.case)
        for name in looked_at:
            where = f"`{name}`, {describe_case(run.case)}"
            finding = compare(entry(run, name, names), wanted[name], where, rtol=0.0)
            if finding:
                return finding
        return None

    return inspect


def entry_gives(name: str, wrong: Callable[[Case], int | None], names: Sequence[str]) -> Any:
    """Recognise a mistake by what the entry `name` would be, in runs that passed as well."""
    return gives(lambda run: entry(run, name, names), wrong, rtol=0.0, always=True)
