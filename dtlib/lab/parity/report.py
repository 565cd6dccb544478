"""What a comparison says: a table of names in the order of computation, as text, HTML and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from dtlib.lab.html import table_html

from .case import KINDS, Kind, joined

_FINE = ("equal", "rounding")
_LOOSE = ("unknown", "follows", "copies apart", "some ranks", "some rows")
"""Behind one mistake all names differ in one of these ways, each by numbers of its own."""
_SHOWN = 24


class ParityError(AssertionError):
    """A parallel step does something else than one process. `report` says what."""

    def __init__(self, report: Report | Reports) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Row:
    """One name: its kind, how many times further off it is than rounding explains, and on which ranks."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    off: float
    ranks: tuple[int, ...]
    blind: float = 0.0  #: a difference of this share of it could not be told from rounding

    @property
    def agrees(self) -> bool:
        """Whether it is the reference's, but for rounding."""
        return self.kind.code in _FINE

    @property
    def is_checked(self) -> bool:
        """Whether something of half its size, added to it, would be told from rounding."""
        return self.blind < 0.5

    @property
    def words(self) -> str:
        """What is said of it."""
        if self.is_checked or not self.agrees:
            return str(self.kind)
        return f"not checked: its rounding is {100 * self.blind:.2g} % of it"


@dataclass
class Report:
    """The rows in the order of the reference. Shows itself as a table; ``print`` it elsewhere."""

    rows: list[Row]
    mesh: dict[str, int]
    noticed: Sequence[str] = field(default=())
    copy_bytes: int = 0
    needs_bytes: int = 0

    @property
    def agrees(self) -> bool:
        """Whether every name does."""
        return all(row.agrees for row in self.rows)

    @property
    def differing(self) -> list[Row]:
        """The rows that differ by more than rounding, in their order."""
        return [row for row in self.rows if not row.agrees]

    @property
    def first(self) -> Row | None:
        """The first name that differs in the order of computation."""
        return next(iter(self.differing), None)

    @property
    def cause(self) -> Row | None:
        """The first that differs with a kind that is known, else the first: what to look at."""
        for vague in (("unknown", "follows", "factor", "other weights"), ("unknown", "follows")):
            known = [row for row in self.differing if row.kind.code not in vague]
            if known and (known[0].kind.code != "another term" or "factor" not in vague):
                return known[0]
        return self.first

    @property
    def kind(self) -> str:
        """The kind of `cause`, a key of `KINDS`; where all agrees, ``equal`` or ``rounding``."""
        if self.cause is not None:
            return self.cause.kind.code
        return "rounding" if any(row.kind.code == "rounding" for row in self.rows) else "equal"

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which axes, as `cause` has it."""
        return () if self.cause is None else self.cause.kind.axes

    def bisect(self) -> str:
        """From the loss to the layer to the tensor, in three lines."""
        first = self.first
        if first is None:
            return "nothing differs"
        loss = next((row for row in self.rows if not row.shape and "loss" in row.name), None)
        said = [] if loss is None else [f"{loss.name}: {'right' if loss.agrees else str(loss.kind)}"]
        said.append(f"first layer that differs: {_layer(first.name)} (everything before it, {self.rows.index(first)} "
                    "names, agrees)")  # fmt: skip
        return "\n".join([*said, f"first tensor: {first.name} {list(first.shape)}: {first.kind}"])

    def summary(self) -> str:
        """One or two sentences."""
        where = " × ".join(f"{name} {size}" for name, size in self.mesh.items())
        if self.first is None:
            spread = max((row.off for row in self.rows), default=0.0)
            how = f"within {100 * spread:.2g} % of what rounding explains" if spread else "to the bit"
            widest = max(self.rows, key=lambda row: row.blind)
            unseen = f"; {widest.name!r} could be {100 * widest.blind:.2g} % off unseen: of this size is its rounding"
            dark = sum(not row.is_checked for row in self.rows)
            seen = len(self.rows) - dark
            said = (
                f"all {seen} names agree"
                if not dark
                else f"{seen} of {len(self.rows)} names agree, {dark} are not checked"
            )
            return f"parity on {where}: {said}, {how}{unseen if widest.blind > 0.01 else ''}"
        told = f"parity on {where}: {len(self.differing)} of {len(self.rows)} names differ, first {self.first.name!r}: "
        told += str(self.first.kind)
        if self.cause is not None and self.cause is not self.first:
            told += f"; and {self.cause.name!r}: {self.cause.kind}"
        return told

    def _shown(self) -> tuple[list[tuple[Row, int]], int]:
        """The first row of each kind, how many are like it, and how many kinds are not shown. Of the
        kinds in `_LOOSE` rows are alike whose numbers are not."""
        alike: dict[str, list[Row]] = {}
        for row in self.rows:
            loose = row.agrees or row.kind.code in _LOOSE
            like = f"{row.kind.code} {row.kind.axes} {row.is_checked}" if loose else str(row.kind)
            alike.setdefault(like, []).append(row)
        some = [(rows[0], len(rows)) for rows in alike.values()]
        return some[:_SHOWN], len(some) - min(len(some), _SHOWN)

    def __str__(self) -> str:
        rows, rest = self._shown()
        width = max((len(row.name) for row, _ in rows), default=0)
        lines = [self.summary(), *(f"note: {each}" for each in self.noticed)]
        for row, alike in rows:
            mark = "✗" if not row.agrees else "✓" if row.is_checked else "?"
            more = f"  (and {alike - 1} more)" if alike > 1 else ""
            lines.append(f"{mark} {row.name:<{width}}  {row.words}{more}")
        return "\n".join([*lines, *([f"  … and {rest} other kinds"] if rest else [])])

    def _repr_html_(self) -> str:
        rows, rest = self._shown()
        cells = [
            (row.name, str(alike), "×".join(map(str, row.shape)) or "1", row.kind.code, ", ".join(row.kind.axes) or "–",
             row.words, "–" if row.agrees else f"{row.off:.3g}")
            for row, alike in rows
        ]  # fmt: skip
        table = table_html(("name", "alike", "shape", "kind", "axis", "what", "× rounding"), cells)
        notes = "".join(f"<p>{html.escape(each)}</p>" for each in self.noticed)
        more = f"<p>… and {rest} other kinds</p>" if rest else ""
        return f"<p>{html.escape(self.summary())}</p>{notes}{table}{more}"

    def json(self) -> str:
        """All of it for other programs: ``agrees``, ``kind`` and ``axes`` of the `cause`, the name of the ``first``
        that differs (or null), ``mesh``, ``needs_bytes``, and ``rows``: of each its name, shape, kind and what that
        ``means``, axes, words and ranks, whether it could be ``checked``, ``off`` in multiples of what rounding
        explains (null: infinitely), and in ``or`` what looks the same."""
        return json.dumps(self.plain())

    def plain(self) -> dict[str, Any]:
        """What `json` writes."""
        return {
            "agrees": self.agrees, "kind": self.kind, "axes": list(self.axes),
            "first": None if self.first is None else self.first.name,
            "mesh": self.mesh, "needs_bytes": self.needs_bytes, "rows": [_plain(row) for row in self.rows],
        }  # fmt: skip


@dataclass
class Reports:
    """A report for each of several meshes. Shows itself as a list of them, and the first that differs as a table."""

    reports: list[Report]

    @property
    def agrees(self) -> bool:
        """Whether all names do on all meshes."""
        return all(each.agrees for each in self.reports)

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which axes: the one of `choices`, none where these meshes do not tell."""
        return self.choices[0] if len(self.choices) == 1 else ()

    @property
    def choices(self) -> list[tuple[str, ...]]:
        """The fewest axes of which all have several ranks in each mesh that differs, and in none that agrees."""
        long = [({axis for axis, size in each.mesh.items() if size > 1}, each.agrees) for each in self.reports]
        common = set.intersection(*(axes for axes, agrees in long if not agrees)) if not self.agrees else set()
        every = [set(some) for k in range(1, len(common) + 1) for some in combinations(sorted(common), k)]
        found = [some for some in every if not any(agrees and some <= axes for axes, agrees in long)]
        return [tuple(sorted(some)) for some in found if len(some) == len(found[0])]

    def __str__(self) -> str:
        lines = [f"{'✓' if each.agrees else '✗'} {each.summary()}" for each in self.reports]
        if not self.agrees:
            where = "no axes are in all that differ, and not in one that agrees"
            if self.choices:
                each = "has" if len(self.choices[0]) == 1 else "have each"
                where = f"wherever {' or '.join(map(joined, self.choices))} {each} several ranks, and nowhere else"
                where += "" if self.axes else " (these meshes do not tell which)"
            lines.append(f"where it differs: {where}")
            lines.append(str(next(each for each in self.reports if not each.agrees)))
        return "\n".join(lines)

    def json(self) -> str:
        """``agrees``, ``axes``, ``choices``, and in ``reports`` what `Report.json` has of each mesh."""
        every = [each.plain() for each in self.reports]
        return json.dumps({"agrees": self.agrees, "axes": self.axes, "choices": self.choices, "reports": every})


def _plain(row: Row) -> dict[str, Any]:
    kind = row.kind
    return {
        "name": row.name, "shape": list(row.shape), "kind": kind.code, "means": KINDS[kind.code],
        "axes": list(kind.axes), "words": str(kind), "ranks": list(row.ranks),
        "checked": row.is_checked, "off": row.off if row.off < float("inf") else None,
        "or": [{"kind": each.code, "axes": list(each.axes)} for each in kind.others],
    }  # fmt: skip


def _layer(name: str) -> str:
    """The module that a name belongs to: without what stands before a slash or colon, and without its last word."""
    plain = name.split(": ")[-1].split("/")[-1]
    return plain.rsplit(".", 1)[0] if "." in plain else plain
