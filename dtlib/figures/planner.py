"""The planner on a page without Python: a reader chooses model, card and number, and sees the answer and why."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape

from dtlib.cli import told
from dtlib.theory.planner import Answer, PlanMemory, StepTime, regime

from . import control
from .breakdown import part_look

Choice = tuple[str, str, int]
_CONTROLS = ("model", "card", "cards")
_MARKS = {
    "§": " plans looked at</p><div class='plans'><table><thead><tr><th scope='col'>",
    "¶": "</tbody></table></div><div class='terms'><table><caption>time of the first plan</caption><tbody>",
    "¤": "</tbody></table><table><caption>memory of its fullest rank</caption><tbody>",
    "¥": " is the error that nine of ten stay within of ",
    "¦": "Whether the plans marked ≟ are slower is unknown: the fastest plan has no interval.",
    "{": "<tr><th scope='row'>", "}": "</th><td>", "~": "</td><td class='bar'><span style='width:",
    "^": "%;background:", "`": "'></span></td></tr>", "|": "</td><td>", "[": "<tr><td>", "]": "</td></tr>",
    "$": "<li>", "@": "</li>", "!": "</th><th scope='col'>",
    "?": regime.SEEN,
}  # fmt: skip
"""One letter for each piece that many answers repeat, the long ones first; it makes the page two fifths lighter."""


def planner(answers: Mapping[Choice, Answer | str], *, start: Choice, caption: str = "") -> Planner:
    """Show the answer of ``planner.search`` for a model, a card and a number of cards that the reader chooses.

    `answers` has for every combination of three controls an `Answer`, or the words that say why there is none;
    `start` is shown first. Everything is in the words of ``dtlib plan`` and travels inside the page. The same controls
    work in JupyterLab. ``ValueError`` where a combination is missing or `start` is none of them.
    """
    options = [list(dict.fromkeys(choice[place] for choice in answers)) for place in range(3)]
    missing = [choice for choice in itertools.product(*options) if choice not in answers]
    if missing:
        raise ValueError(
            f"answers must have every combination of its models, cards and numbers; {missing[0]} is missing"
        )
    if start not in answers:
        raise ValueError(f"start must be one of answers, not {start!r}")
    return Planner(dict(answers), options, start, caption)


@dataclass(eq=False)
class Planner:
    """What :func:`planner` returns: shows itself as HTML."""

    answers: dict[Choice, Answer | str]
    options: list[list[str | int]]
    start: Choice
    caption: str

    def html(self) -> str:
        """The fragment of a page: controls, the first answer, the others as data, and the script."""
        answers = (self.answers[choice] for choice in itertools.product(*self.options))  # type: ignore[index]
        shown = {"marks": _MARKS, "answers": [_shortened(answer_html(answer)) for answer in answers]}
        controls = "".join(
            control.select(name, name, values, first)
            for name, values, first in zip(_CONTROLS, self.options, self.start, strict=True)
        )
        answer = f'<div class="answer" aria-live="polite">{answer_html(self.answers[self.start])}</div>'
        body = f"<form>{controls}</form>{answer}{control.NO_SCRIPT}"
        return control.figure("planner", body, shown, caption=self.caption)

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        """Name the choices, for a terminal."""
        return f"<planner: {' × '.join(str(len(values)) for values in self.options)} answers>"


def answer_html(answer: Answer | str) -> str:
    """One answer: the best plans, the terms of the first, and what is said of it; or why there is none."""
    if isinstance(answer, str):
        return f'<p class="none">{escape(answer)}</p>'
    columns = "".join(f'<th scope="col">{name}</th>' for name in told.columns(answer))
    plans = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in told.row(answer, each)) + "</tr>"
        for each in answer.plans[:3]
    )
    time, memory = told.terms(answer.best)
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in told.sentences(answer))
    return (
        f'<p class="step">{escape(told.head(answer))}</p>'
        f'<div class="plans"><table><thead><tr>{columns}</tr></thead><tbody>{plans}</tbody></table></div>'
        f'<div class="terms">{_terms("time of the first plan", time, StepTime)}'
        f"{_terms('memory of its fullest rank', memory, PlanMemory)}</div><ul>{said}</ul>"
    )


def _shortened(html: str) -> str:
    """With `_MARKS` for what they stand for, and with single quotes: JSON would escape double ones."""
    used = [mark for mark in _MARKS if mark in html]
    if used:
        raise ValueError(f"the words of an answer must have none of {''.join(_MARKS)}, not {used[0]!r}")
    html = html.replace('"', "'")
    for mark, piece in _MARKS.items():
        html = html.replace(piece, mark)
    return html


def _terms(title: str, parts: Sequence[tuple[str, str, float]], kind: type[StepTime] | type[PlanMemory]) -> str:
    order = [each.name.replace("_", " ") for each in fields(kind)]
    colors = {name: part_look(name, spare=number).color for number, name in enumerate(order)}
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{amount}</td><td class="bar">'
        f'<span style="width:{100 * share:.1f}%;background:{colors[name]}"></span></td></tr>'
        for name, amount, share in parts
    )
    return f"<table><caption>{title}</caption><tbody>{rows}</tbody></table>"
