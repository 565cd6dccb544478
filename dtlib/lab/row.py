"""How one comparison looks: a row of a table in a notebook and in the static page, a line of text
elsewhere."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from dtlib.theory import units

from . import here

Number = int | float

# The class "dataframe" keeps the book's theme from painting a light box behind the row in dark mode; colours
# are inherited, so the row follows the page.
_TABLE = (
    "border-collapse:collapse;table-layout:fixed;width:100%;max-width:52rem;margin:.25rem 0;border:0;"
    "font-size:.9em;color:inherit"
)
_HEAD = "padding:.1rem .35rem;border:0;font-weight:normal;font-size:.8em;opacity:.75"
_CELL = "padding:.15rem .35rem .3rem;border:0;border-bottom:1px solid rgba(128,128,128,.4)"

_SEEN = {"published": "published", "simulation": "simulated", "derivation": "derived", "definition": "defined"}


@dataclass(frozen=True)
class Row:
    """One comparison. In a notebook it shows itself as a row of a table, elsewhere as a line of text (`str`).

    `theory` and `measured` are the two numbers in base units: of arrays, those of the element that agrees
    worst, with `element` its index (None for plain numbers). `ratio` is measured over theory; `rtol` the
    relative difference allowed, None where the number was only shown. `recorded` tells whether the ledger
    took the line.
    """

    formula: str
    title: str
    theory: Number
    measured: Number
    ratio: float
    by: str
    rtol: float | None
    passed: bool
    element: tuple[int, ...] | None = None
    recorded: bool = True
    shown_in: int | None = None  #: the notebook's execution count when the row was shown

    @property
    def seen(self) -> str:
        """What the second number is: measured, or what it is instead."""
        return _SEEN.get(self.by, "measured")

    def __str__(self) -> str:
        """One line of text, for where there is no notebook."""
        predicted, measured = format_pair(self.formula, self.theory, self.measured)
        return (
            f"{self._mark} {self.title}{self.element_words}: predicted {predicted}, {self.seen} {measured}, "
            f"ratio {format_ratio(self.ratio)} ({self.allowed_words}), by {self.by}"
        )

    def _repr_html_(self) -> str:
        predicted, measured = format_pair(self.formula, self.theory, self.measured)
        allowed = f'<span style="opacity:.7">{html.escape(self._allowed_briefly)}</span>'
        cells = (
            ("formula", f"{self._mark} {html.escape(self.title + self.element_words)}", "left", 34),
            ("predicted", html.escape(predicted), "right", 20),
            (self.seen, f"<strong>{html.escape(measured)}</strong>", "right", 20),
            ("ratio", f"{format_ratio(self.ratio)} {allowed}", "right", 13),
            ("by", html.escape(self.by), "left", 13),
        )
        head = "".join(
            f'<th scope="col" style="{_HEAD};text-align:{side};width:{width}%">{name}</th>'
            for name, _, side, width in cells
        )
        body = "".join(
            f'<td data-label="{name}" style="{_CELL};text-align:{side}">{content}</td>'
            for name, content, side, _ in cells
        )
        name = html.escape(self.formula)
        return (
            f'<table class="dataframe dtlib-check" data-formula="{name}" style="{_TABLE}">'
            f"<thead><tr>{head}</tr></thead><tbody><tr>{body}</tr></tbody></table>"
        )

    def _ipython_display_(self) -> None:
        # `lab.check` already showed the row; when it is also the last value of that cell, once is enough.
        shell = here.shell()
        if shell is None or self.shown_in != shell.execution_count:
            self.show()

    def show(self) -> None:
        """Display the row in a notebook, print it elsewhere."""
        if here.in_notebook():
            from IPython.display import display

            display({"text/html": self._repr_html_(), "text/plain": str(self)}, raw=True)
        else:
            print(self)  # noqa: T201 - outside a notebook the row is the page

    @property
    def _mark(self) -> str:
        return "✗" if not self.passed else "·" if self.rtol is None else "✓"

    @property
    def element_words(self) -> str:
        """Which element of an array the row is about; nothing for plain numbers."""
        if self.element is None:
            return ""
        return f" (worst element {list(self.element)})"

    @property
    def allowed_words(self) -> str:
        """How far the measured number was allowed to be off."""
        if self.rtol is None:
            return "shown, not asserted"
        return "allowed: exactly equal" if self.rtol == 0 else f"allowed: ±{self.rtol:.3g} of theory"

    @property
    def _allowed_briefly(self) -> str:
        if self.rtol is None:
            return "shown"
        if self.rtol <= 1e-6:
            return "to rounding" if self.rtol else "exact"
        return f"±{100 * self.rtol:.3g} %"


def format_ratio(ratio: float) -> str:
    """`ratio` with four digits, or what it takes to tell it from 1."""
    if ratio == 1.0:
        return "1"
    if abs(ratio - 1) < 1e-6:
        return f"1 {'+' if ratio > 1 else '−'} {abs(ratio - 1):.0e}"
    text = f"{ratio:.4g}"
    return text if float(text) != 1.0 else f"{ratio:.7g}"


def _is_rounding(ratio: float) -> bool:
    """Whether two floating-point numbers of this ratio may differ by the order of their additions alone."""
    return abs(ratio - 1) < 1e-12


def format_pair(formula: str, theory: Number, measured: Number) -> tuple[str, str]:
    """Both numbers in the unit that the formula's name ends in, with digits enough to tell them apart."""
    if isinstance(theory, float) and theory and _is_rounding(measured / theory):
        return _format(formula, theory, 6), _format(formula, measured, 6)  # the ratio tells them apart
    for digits in (4, 6, 9, 17):
        pair = _format(formula, theory, digits), _format(formula, measured, digits)
        if theory == measured or pair[0] != pair[1]:
            return pair
    return repr(theory), repr(measured)


def _format(formula: str, value: Number, digits: int) -> str:
    if not math.isfinite(value):
        return str(value)
    words = formula.rsplit(".", 1)[-1].split("_")
    if words[-3:] == ["flop", "per", "s"]:
        return f"{value / 1e9:.{digits}g} GFLOP/s"
    if words[-2:] == ["per", "s"]:
        return f"{units.format_bytes(value, decimal=True, digits=digits)}/s"
    if words[-1] == "seconds":
        return units.format_seconds(value, digits=digits)
    if words[-1] in ("fraction", "share"):
        return f"{100 * value:.{digits}g} %"
    if "bytes" in words and words[-1] not in ("ratio", "factor"):
        return units.format_bytes(value, digits=digits)
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
