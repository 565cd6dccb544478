"""The ledger: one JSON line for every number of theory that was held against another one, and what that one was.

`lab.check` appends; the ledger page of the book, `dtlib ledger` and the coverage test read. The file is the
one that the environment variable ``DTLIB_LEDGER`` names, else one in the user's own state folder.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dtlib.theory.formula import Formula, formulas

OFF = 0.03  #: of its value: a formula that is so far off fails whatever is called measured

#: The kinds of evidence, strongest first, each with what is said of the formulas that have no stronger one.
EVIDENCE = {
    "measured": "were measured by something that does not know the formula",
    "compared": "were compared with a clock or an estimate, shown or allowed to differ by 3 % or more",
    "published": "were held against measurements that others published",
    "derived": "were held against another derivation or a simulation",
    "defined": "are definitions",
}

#: How a number was obtained, and which evidence that is where it is asserted within less than `OFF`.
METHODS = dict.fromkeys(("wire", "count", "memory", "clock", "values"), "measured") | {
    "published": "published",
    "simulation": "derived",
    "derivation": "derived",
    "definition": "defined",
}


class LedgerWarning(UserWarning):
    """The ledger could not be written, or holds a line that cannot be read."""


@dataclass(frozen=True)
class Line:
    """One line of the ledger: a predicted number, the one it was held against, and how and where that was found.

    `ratio` is measured over theory. `rtol` is the relative difference that was allowed, None where the number
    was shown without being asserted. `where` names the notebook, test or script. `run` tells apart the
    processes that wrote: a page that runs again replaces what it measured before. `time` is in ISO 8601, UTC.
    """

    formula: str
    theory: int | float
    measured: int | float
    ratio: float
    by: str
    rtol: float | None
    passed: bool
    where: str
    machine: str
    time: str
    run: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def evidence(self) -> str:
        """What the line is evidence of, a key of `EVIDENCE`."""
        found = METHODS[self.by]
        is_wide = self.rtol is None or self.rtol >= OFF
        return "compared" if found == "measured" and is_wide else found

    def to_json(self) -> str:
        """The line as strict JSON: numbers that JSON has no word for are the strings ``"nan"`` and
        ``"inf"``."""
        return json.dumps({key: _encode(value) for key, value in asdict(self).items()}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Line:
        """The line that `text` holds. Raises ``ValueError`` for anything that `to_json` did not write."""
        record = json.loads(text)
        names = {each.name for each in fields(cls)}
        if not isinstance(record, dict) or not names <= record.keys():
            raise ValueError("not a line of a ledger")
        if record["by"] not in METHODS:
            raise ValueError(f"by is {record['by']!r}, not one of {', '.join(METHODS)}")
        for name in ("theory", "measured", "ratio"):
            if isinstance(record[name], str):
                record[name] = float(record[name])
            if isinstance(record[name], bool) or not isinstance(record[name], int | float):
                raise ValueError(f"{name} is not a number")
        return cls(**{name: record[name] for name in names})


@dataclass(frozen=True)
class Entry:
    """What the ledger knows of one registered formula.

    `evidence` is the strongest of the lines that agreed, None where there is none; of those of that evidence `where`
    and `by` list, without repetition, the places and the methods. `worst_ratio` is the asserted measured/theory
    furthest from 1; of numbers that were only shown (`asserted` is False), the furthest of those. `num_lines` counts
    all that agreed, `failed` those that disagreed: they are evidence of nothing.
    """

    formula: Formula
    evidence: str | None
    where: tuple[str, ...]
    by: tuple[str, ...]
    worst_ratio: float | None
    asserted: bool
    num_lines: int
    failed: int

    def as_dict(self) -> dict[str, Any]:
        """The entry as plain data for JSON: the formula's registered fields, then its evidence."""
        known = self.formula
        return {
            "formula": known.name,
            "title": known.title,
            "equation": known.equation,
            "source": known.source,
            "chapter": known.chapter,
            "evidence": self.evidence,
            "where": list(self.where),
            "by": list(self.by),
            "worst_ratio": self.worst_ratio,
            "asserted": self.asserted,
            "lines": self.num_lines,
            "failed": self.failed,
        }


@dataclass(frozen=True)
class Coverage:
    """Every registered formula with its evidence, in the order of the names."""

    entries: tuple[Entry, ...]
    unregistered: tuple[str, ...]  #: names that the file holds and the registry does not

    @property
    def missing(self) -> tuple[str, ...]:
        """The registered formulas without any evidence. The course promises that there are none."""
        return tuple(entry.formula.name for entry in self.entries if entry.evidence is None)

    @property
    def counts(self) -> dict[str, int]:
        """How many formulas have each evidence as their strongest; "missing" counts those without any."""
        found = [entry.evidence or "missing" for entry in self.entries]
        return {kind: found.count(kind) for kind in (*EVIDENCE, "missing")}

    def __str__(self) -> str:
        """The counts as a sentence."""
        sayings = EVIDENCE | {"missing": "have no evidence"}
        counts = {kind: count for kind, count in self.counts.items() if count or kind == "measured"}
        words = "; ".join(f"{count} {sayings[kind]}" for kind, count in counts.items())
        return f"Of {len(self.entries)} formulas, {words}."


def default_path() -> Path:
    """The file that `lab.check` appends to: ``$DTLIB_LEDGER``, else ``ledger.jsonl`` in the user's state folder."""
    named = os.environ.get("DTLIB_LEDGER")
    if named:
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_state_dir("dtlib", appauthor=False)) / "ledger.jsonl"


def built_path() -> Path | None:
    """The ledger of the last ``make book`` in this folder or in one above it; None where there is none."""
    here = Path.cwd()
    found = (folder / "_build" / "ledger.jsonl" for folder in (here, *here.parents))
    return next((path for path in found if path.is_file()), None)


def append(line: Line, path: str | os.PathLike[str] | None = None) -> bool:
    """Add `line` to the ledger; True if it was written.

    The line goes out in one write to a file opened for appending, so processes that write at once do not mix
    their lines. A ledger that cannot be written (a read-only disk) never stops a page: it warns once with
    `LedgerWarning`.
    """
    target = Path(path) if path is not None else default_path()
    data = (line.to_json() + "\n").encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data  # the last line was cut off: it must not take this one with it
            if os.write(descriptor, data) != len(data):
                raise OSError("the disk is full")
        finally:
            os.close(descriptor)
    except OSError as error:
        warnings.warn(f"the ledger {target} was not written: {error}", LedgerWarning, stacklevel=3)
        return False
    return True


def read(path: str | os.PathLike[str] | None = None) -> list[Line]:
    """All lines of the ledger in the order written; an empty list where there is no file yet.

    A line that cannot be read (cut off by a full disk, edited by hand) is left out with a `LedgerWarning`
    that gives its number.
    """
    source = Path(path) if path is not None else default_path()
    try:
        texts = source.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            lines.append(Line.from_json(text.decode()))
        except (ValueError, TypeError, KeyError) as error:
            warnings.warn(f"line {number} of the ledger {source} was left out: {error}", LedgerWarning, stacklevel=2)
    return lines


def coverage(path: str | os.PathLike[str] | None = None, *, chapter: str | None = None) -> Coverage:
    """The evidence that the ledger at `path` holds of every registered formula, or of those of one `chapter`.

    Of each formula in each place only the lines of the last process count: a page that was run again does not
    keep what its older self measured.
    """
    registered = formulas(chapter)
    by_formula: dict[str, list[Line]] = {}
    for line in _latest(read(path)):
        by_formula.setdefault(line.formula, []).append(line)
    entries = tuple(_entry(known, by_formula.get(name, [])) for name, known in registered.items())
    return Coverage(entries, tuple(sorted(by_formula.keys() - formulas().keys())))


def _latest(lines: Iterable[Line]) -> list[Line]:
    lines = list(lines)
    last_run = {(line.formula, line.where): line.run for line in lines}
    return [line for line in lines if line.run == last_run[line.formula, line.where]]


def _entry(known: Formula, lines: list[Line]) -> Entry:
    agreed = [line for line in lines if line.passed]
    evidence = min((line.evidence for line in agreed), key=list(EVIDENCE).index, default=None)
    strongest = [line for line in agreed if line.evidence == evidence]
    asserted = [line for line in strongest if line.rtol is not None]
    ratios = [line.ratio for line in asserted or strongest]
    return Entry(
        formula=known,
        evidence=evidence,
        where=tuple(dict.fromkeys(line.where for line in strongest)),
        by=tuple(dict.fromkeys(line.by for line in strongest)),
        worst_ratio=max(ratios, key=lambda ratio: abs(ratio - 1)) if ratios else None,
        asserted=bool(asserted),
        num_lines=len(agreed),
        failed=len(lines) - len(agreed),
    )


def _encode(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
