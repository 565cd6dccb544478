"""The bank of an exercise: for each mistake what a teacher would say, and programs that make it.

It stands beside the checks, in ``<exercise>.md``. Under the first heading come wrong answers, under
``# Right in another way`` answers that earn all points. A section is headed ``## check: mistake`` (or
``## one check, another: mistake``; of a right answer, by what is different); its text is the feedback,
``checks/shared.md`` has that of mistakes with one shape everywhere. Each block of code is a program that the check
refuses for that mistake: in Python as a whole, or as a ``diff`` to the reference, or to the first program of another
section (``diff check: mistake``). Of a diff, the lines with `` `` and ``-`` must stand in the original as they are, one
after another; ``@@`` goes on further below.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import plain
from .exercise import Check, Exercise, Fits, Mistake
from .seen import Case, Observed

HERE = Path(__file__).parent
SHIPPED = HERE / "shipped.json"
_RIGHT = "# Right in another way"
_FENCE = re.compile(r"^```(?P<kind>python|diff)(?P<base>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)


class BankError(ValueError):
    """A bank cannot be read; the text says where and why."""


@dataclass(frozen=True)
class Section:
    """What stands under one heading: the checks, the mistake (or what is different), the feedback, and programs as
    (kind, base, text)."""

    checks: Sequence[str]
    mistake: str
    feedback: str
    programs: Sequence[tuple[str, str, str]]

    @property
    def heading(self) -> str:
        """The heading, as other sections name it."""
        return f"{', '.join(self.checks)}: {self.mistake}" if self.checks else self.mistake


@dataclass(frozen=True)
class Program:
    """An answer of the bank: wrong for `mistake` in `check`, or right (both "")."""

    check: str
    mistake: str
    source: str


@dataclass(frozen=True)
class Bank:
    """The sections of an exercise: wrong answers, and right ones."""

    wrong: Sequence[Section]
    right: Sequence[Section] = ()

    def programs(self, reference: str) -> list[Program]:
        """Every program as a whole, `reference` being the answer from which differences are told."""
        wholes: dict[str, str] = {"": reference}
        found = []
        for section in (*self.wrong, *self.right):
            for kind, base, text in section.programs:
                if base not in wholes:
                    raise BankError(f"{section.heading!r} differs from {base!r}, which does not stand above it")
                source = text if kind == "python" else patched(wholes[base], text, section.heading)
                wholes.setdefault(section.heading, source)
                wrong_for = ("", "") if section in self.right else (section.checks[0], section.mistake)
                found.append(Program(*wrong_for, source))
        return found


@cache
def read(path: Path) -> Bank:
    """The bank in a file. Raises `BankError` for a section that cannot be read."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    wrong, _, right = text.partition(f"{_RIGHT}\n")
    return Bank(_sections(wrong, path.name), _sections(right, path.name, right=True))


def _sections(text: str, name: str, *, right: bool = False) -> list[Section]:
    found: list[Section] = []
    before, *parts = re.split(r"^## ", text, flags=re.M)
    if "```" in before:
        raise BankError(f"{name}: a program stands before the first heading, and nobody would run it")
    for part in parts:
        heading, _, body = part.partition("\n")
        checks, colon, mistake = heading.partition(": ")
        if not right and not colon:
            raise BankError(f"{name}: {heading!r} does not say which check it is about")
        programs = [(each["kind"], each["base"].strip(), each["text"]) for each in _FENCE.finditer(body)]
        feedback = " ".join(_FENCE.sub("", body).split())
        if "```" in feedback:
            raise BankError(f"{name}: the code under {heading!r} does not end")
        if any(each.heading == heading for each in found):
            raise BankError(f"{name}: {heading!r} stands there twice")
        about = Section([], heading, feedback, programs)
        found.append(about if right else replace(about, checks=checks.split(", "), mistake=mistake))
    return found


def patched(source: str, diff: str, where: str) -> str:
    """`source` with a difference applied. Raises `BankError` where its lines do not stand there, or in two places."""
    done: list[str] = []
    lines = source.rstrip("\n").split("\n")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        changes = [(line[:1] or " ", line[1:]) for line in hunk.rstrip("\n").split("\n")] if hunk.strip("\n") else []
        old = [text for sign, text in changes if sign in " -"]
        new = [text for sign, text in changes if sign in " +"]
        if not old:
            lines, done = [], [*done, *lines, *new]
            continue
        places = [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
        if len(places) != 1:
            raise BankError(f"{where}: {old[0]!r} and what follows stands in {len(places)} places, not in one")
        done += [*lines[: places[0]], *new]
        lines = lines[places[0] + len(old) :]
    return "\n".join([*done, *lines]) + "\n"


def reference(cell: str) -> str:
    """The answer in a cell of the solutions, without marks and docstrings: what differences are told from."""
    kept, in_text = [], False
    for line in cell.rstrip("\n").split("\n"):
        quotes = line.count('"""')
        if in_text or line.strip().startswith('"""'):
            in_text = in_text != (quotes % 2 == 1)
        elif not re.match(r"\s*### (BEGIN|END) SOLUTION$", line):
            kept.append(line)
    return "\n".join(kept) + "\n"


# Feedback and replay: what makes an exercise of checks and bank


def equipped(exercise: Exercise, bank: Bank, shared: Bank) -> Exercise:
    """`exercise`, each of its checks with the mistakes of its bank, in the bank's order and with their feedback.

    A mistake of `shared` counts for every check that can recognise it. On paper the programs of the bank, which must be
    whole, are replayed: a mistake is recognised by an answer that is the same as theirs in every case.
    """
    return replace(exercise, checks=tuple(_equipped(exercise, check, bank, shared) for check in exercise.checks))


def _equipped(exercise: Exercise, check: Check, bank: Bank, shared: Bank) -> Check:
    common = {section.mistake: section.feedback for section in shared.wrong}
    known = {mistake.name: mistake for mistake in reversed(check.mistakes)}  # an exercise's own sign counts first
    mistakes = []
    for section in bank.wrong:
        if check.name not in section.checks:
            continue
        name = section.mistake
        feedback = section.feedback or common.get(name, "")
        if not feedback:
            raise BankError(f"{exercise.id}, {section.heading!r} has no feedback, here or among the shared ones")
        if name in known:
            mistakes.append(replace(known[name], feedback=feedback))
        elif is_on_paper(exercise) and check.agrees is not None:
            programs = [text for _, _, text in section.programs]
            mistakes.append(Mistake(name, _same_as(programs, exercise.function, check.agrees), feedback))
        else:
            raise BankError(f"{exercise.id}: nothing recognises {section.heading!r}")
    named = {mistake.name for mistake in mistakes}
    mistakes += [replace(known[name], feedback=text) for name, text in common.items() if name in known.keys() - named]
    return replace(check, mistakes=tuple(mistakes))


def _same_as(sources: Sequence[str], function: str, agrees: Callable[[Observed, Any], bool]) -> Fits:
    """Recognise an answer that is, in every case, what one of the programs gives."""

    def is_same(observed: Observed, source: str) -> bool:
        answer = replayed(source, function, observed.case)
        if isinstance(answer, Exception):
            trouble = observed.trouble
            return trouble is not None and trouble.kind == "raised" and type(answer).__name__ in trouble.text
        return observed.has_come and agrees(observed, answer)

    return lambda failing, passing: any(
        all(is_same(each, source) for each in (*failing, *passing)) for source in sources
    )


def replayed(source: str, function: str, case: Case) -> Any:
    """What a program of the bank answers in a case on paper, as plain data, or the exception that it raises."""
    try:
        with np.errstate(all="ignore"):  # whoever reads the verdict need not hear what a wrong program overflows
            arguments = plain.unpack(plain.pack(list(case["arguments"])))  # a copy
            return plain.simplify(_space(source)[function](*arguments))
    except Exception as error:
        return error


@cache
def _space(source: str) -> dict[str, Any]:
    space: dict[str, Any] = {"np": np, "math": math}
    exec(compile(source, "<a program of the bank>", "exec"), space)
    return space


# Shipping: what learners get of the banks. They need no solutions, and get no right answer.


def is_on_paper(exercise: Exercise) -> bool:
    """Whether an answer to it is numbers alone, so that programs of its bank can be replayed."""
    return exercise.harness.startswith("paper.")


def shortened(exercise: Exercise, bank: Bank, reference: str) -> Bank:
    """What ships of a bank: the wrong sections, and of an exercise on paper their programs, as wholes."""
    wholes: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for each in bank.programs(reference):  # raises for one that cannot be put together, of any exercise
        if is_on_paper(exercise):
            wholes.setdefault((each.check, each.mistake), []).append(("python", "", each.source))
    return Bank([replace(each, programs=wholes.get((each.checks[0], each.mistake), ())) for each in bank.wrong])


def ship(banks: Mapping[str, Bank]) -> str:
    """Shortened banks, as the text of `SHIPPED`."""
    told = {
        name: [[each.checks, each.mistake, each.feedback, *(text for *_, text in each.programs)] for each in bank.wrong]
        for name, bank in banks.items()
    }
    return json.dumps(told, indent=0, ensure_ascii=False) + "\n"


@cache
def shipped() -> dict[str, Bank]:
    """The shortened banks, by exercise; under ``"shared"`` the mistakes of all."""

    def section(checks: list[str], mistake: str, feedback: str, *programs: str) -> Section:
        return Section(checks, mistake, feedback, [("python", "", text) for text in programs])

    told = json.loads(SHIPPED.read_text("utf-8"))
    return {name: Bank([section(*each) for each in sections]) for name, sections in told.items()}
