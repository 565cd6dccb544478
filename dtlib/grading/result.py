"""What a check answers: a status, a reason, points for each check, and a form that is pleasant to read."""

from __future__ import annotations

import html
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "partly right", "fail", "not attempted", "not known"]
Verdict = Literal["pass", "fail", "not known", "not counted", "not looked at"]
SIGNS = {
    "pass": "✓",
    "partly right": "◐",
    "fail": "✗",
    "not attempted": "○",
    "not known": "?",
    "not counted": "–",
    "not looked at": "○",
}
_GREY = "#757575"
_COLOURS = {"pass": "#2e7d32", "partly right": "#b26a00", "fail": "#c62828"}


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one check: `mistake` is the name of the known mistake it recognised, `message` what to tell.

    A check is ``not counted`` behind a gate that failed (see `Check`), ``not known`` where what it wants to see did not
    come to an end and nobody can tell why, ``not looked at`` where there was nothing to look at. `is_told` says that it
    rests on what the submission's own processes tell.
    """

    name: str
    kind: str
    description: str
    points: int
    max_points: int
    verdict: Verdict
    mistake: str = ""
    message: str = ""
    is_told: bool = False

    @property
    def passed(self) -> bool:
        """Whether it earned its points."""
        return self.verdict == "pass"

    @property
    def sign(self) -> str:
        """✓, ✗, ? where nobody knows, – where it was not counted."""
        return SIGNS[self.verdict]


@dataclass(frozen=True)
class Result:
    """The verdict on one exercise. It shows itself as a table in a notebook and as lines of text elsewhere.

    `message` is the reason in one text; `printed` what the learner's function printed; `again` how to repeat the cases.
    """

    exercise: str
    title: str
    status: Status
    message: str
    checks: tuple[CheckResult, ...] = ()
    withheld_points: int = 0
    printed: str = ""
    again: str = ""

    @classmethod
    def of(cls, exercise: str, title: str, checks: tuple[CheckResult, ...], withheld_points: int = 0) -> Result:
        """The verdict that its checks amount to. Nothing is known as long as one of them is not known."""
        verdicts = {each.verdict for each in checks if each.verdict != "not looked at" or each.max_points}
        messages = list(dict.fromkeys(each.message for each in checks if each.message))
        status: Status = "pass"
        if "not known" in verdicts:
            status = "not known"
        elif verdicts - {"pass"}:
            status = "partly right" if any(each.points for each in checks) else "fail"
        return cls(exercise, title, status, "\n".join(messages) or "All checks passed.", checks, withheld_points)

    @property
    def points(self) -> int:
        """The points earned."""
        return sum(check.points for check in self.checks)

    @property
    def max_points(self) -> int:
        """The points that could be earned here; `withheld_points` more are decided when the instructor grades."""
        return sum(check.max_points for check in self.checks)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Names of the known mistakes that were recognised, in the order of the checks."""
        return tuple(check.mistake for check in self.checks if check.mistake)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data for JSON."""
        return {**asdict(self), "checks": [asdict(check) for check in self.checks], "points": self.points}

    def __str__(self) -> str:
        lines = [self._heading()]
        if self._tells_checks:
            for check, message in self._told():
                lines.append(f"  {check.sign} {check.description} ({check.points}/{check.max_points})")
                if message:
                    lines.append(f"      {message}")
        elif self.message:
            lines.append(f"  {self.message}")
        if self.withheld_points and self.status != "not attempted":
            lines.append(f"  {self._withheld()}")
        if self.again:
            lines.append(f"  {self.again}")
        if self.printed:
            lines += ["  Your function printed:", *(f"    {line}" for line in self.printed.splitlines())]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = _COLOURS.get(self.status, _GREY)
        rows = []
        if self._tells_checks:
            for check, message in self._told():
                shade = _COLOURS.get(check.verdict, _GREY)
                reason = f'<div style="opacity:.85">{_prose(message)}</div>' if message else ""
                rows.append(
                    f'<tr><td style="color:{shade};font-weight:bold;vertical-align:top">{check.sign}</td>'
                    f'<td style="text-align:left">{_prose(check.description)}{reason}</td>'
                    f'<td style="vertical-align:top;white-space:nowrap">{check.points} / {check.max_points}</td></tr>'
                )
        body = f'<table style="margin:.4em 0 0 0">{"".join(rows)}</table>' if rows else _paragraph(self.message)
        if self.withheld_points and self.status != "not attempted":
            body += _paragraph(self._withheld())
        if self.again:
            body += _paragraph(self.again)
        if self.printed:
            text = html.escape(self.printed)
            body += f"<details><summary>What your function printed</summary><pre>{text}</pre></details>"
        return (
            f'<div class="dtlib-check" style="border-left:4px solid {colour};padding:.3em .8em">'
            f'<strong style="color:{colour}">{html.escape(self._heading())}</strong>{body}</div>'
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # nbgrader reads the number of points from the plain text of a grade cell's result.
        text = str(float(self.points)) if under_nbgrader() else str(self)
        return {"text/plain": text, "text/html": self._repr_html_()}

    @property
    def _tells_checks(self) -> bool:
        return self.status not in ("pass", "not attempted") and bool(self.checks)

    def _told(self) -> list[tuple[CheckResult, str]]:
        """Each check with what to tell about it; what an earlier check said is not said again.

        A gate that is worth no points is told only where it fails; of one that had nothing to look at, nobody knows.
        """
        said: set[str] = set()
        told = []
        for check in self.checks:
            if not check.max_points and check.verdict != "fail":
                continue
            told.append((check, "As above." if check.message in said else check.message))
            said.update([check.message] if check.message else [])
        return told

    def _heading(self) -> str:
        name = f"{self.exercise} · {self.title}" if self.title else self.exercise
        points = f" · {self.points} of {self.max_points} points" if self.checks else ""
        return f"{SIGNS[self.status]} {name}: {self.status}{points}"

    def _withheld(self) -> str:
        return f"{self.withheld_points} more points are decided when the exercise is graded."


class NoPoints(AssertionError):
    """Raised under nbgrader alone, which reads an error in a grade cell as zero points."""


def under_nbgrader() -> bool:
    """Whether nbgrader is executing the notebook (it says so in the environment)."""
    return os.environ.get("NBGRADER_EXECUTION", "") in ("autograde", "validate")


def _paragraph(text: str) -> str:
    return f'<div style="margin-top:.3em">{_prose(text)}</div>' if text else ""


def _prose(text: str) -> str:
    """Escaped text in which `code` stands between backquotes."""
    parts = html.escape(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts).replace("\n", "<br>")
    pieces = [f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts)]
    return "".join(pieces).replace("\n", "<br>")
