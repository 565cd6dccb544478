"""What a check answers: a status, a reason, points for each check, and a form that is pleasant to read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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

    def __str__(self) -> str:
        lines = [self.heading]
        for check, message in self.told:
            lines.append(f"  {check.sign} {check.description} ({check.points}/{check.max_points})")
            if message:
                lines.append(f"      {message}")
        if not self.told and self.message:
            lines.append(f"  {self.message}")
        lines += [f"  {each}" for each in self.closing]
        if self.printed:
            lines += ["  Your function printed:", *(f"    {line}" for line in self.printed.splitlines())]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import jinja2

        environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__, "."), autoescape=True)
        environment.filters["prose"] = _prose
        return environment.get_template("result.html.jinja").render(result=self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # nbgrader reads the number of points from the plain text of a grade cell's result.
        text = str(float(self.points)) if under_nbgrader() else str(self)
        return {"text/plain": text, "text/html": self._repr_html_()}

    @property
    def heading(self) -> str:
        """The verdict in a line."""
        name = f"{self.exercise} · {self.title}" if self.title else self.exercise
        points = f" · {self.points} of {self.max_points} points" if self.checks else ""
        return f"{SIGNS[self.status]} {name}: {self.status}{points}"

    @property
    def told(self) -> list[tuple[CheckResult, str]]:
        """The checks that there is something to tell of, with what to tell; none where `message` says it all."""
        if self.status in ("pass", "not attempted"):
            return []
        shown = [each for each in self.checks if is_told_of(each.max_points, each.verdict)]
        return list(zip(shown, once(each.message for each in shown), strict=True))

    @property
    def closing(self) -> list[str]:
        """What stands below the checks: what is decided later, and how to repeat the cases."""
        is_later = self.withheld_points and self.status != "not attempted"
        later = f"{self.withheld_points} more points are decided when the exercise is graded." if is_later else ""
        return [each for each in (later, self.again) if each]


def is_told_of(max_points: int, verdict: str) -> bool:
    """A condition that is worth no points is only told of where it is not met."""
    return max_points > 0 or verdict == "fail"


def once(messages: Iterable[str]) -> Iterator[str]:
    """The messages, none of them twice."""
    said: set[str] = set()
    for message in messages:
        yield "As above." if message and message in said else message
        said.add(message)


class NoPoints(AssertionError):
    """Raised under nbgrader alone, which reads an error in a grade cell as zero points."""


def under_nbgrader() -> bool:
    """Whether nbgrader is executing the notebook (it says so in the environment)."""
    return os.environ.get("NBGRADER_EXECUTION", "") in ("autograde", "validate")


def _prose(text: str) -> Any:
    """Escaped text in which `code` stands between backquotes."""
    from markupsafe import Markup, escape

    parts = str(escape(text)).replace("\n", "<br>").split("`")
    if len(parts) % 2 == 0:
        return Markup("`".join(parts))
    return Markup("".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts)))
