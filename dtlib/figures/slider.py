"""A slider that works on a page without Python, and recomputes where there is."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import chart

_MAX_GRID = 20_000  # numbers in a page's JSON: about 200 kB


def slider(
    fn: Callable[[Any], Any],
    *,
    name: str,
    values: Sequence[Any],
    start: Any = None,
    x: ArrayLike | None = None,
    x_label: str = "",
    y_label: str = "",
    x_scale: chart.Scale = "linear",
    y_scale: chart.Scale = "linear",
    probe: float | None = None,
    points: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    note: Callable[[Any], str] | None = None,
    format_value: Callable[[Any], str] = str,
    format_x: Callable[[float], str] = "{:.4g}".format,
    format_y: Callable[[float], str] = "{:.4g}".format,
    caption: str = "",
    alt: str = "",
) -> Slider:
    """A chart of `fn` with a slider that moves one variable; show it by making it the last line of a cell.

    Two kinds, told apart by `x`:

    - **curves over x**: `x` is an array, and ``fn(value)`` returns what is drawn over it for this position of
      the slider: ``{label: array as long as x}``, or one such array. Moving the slider moves the curves; a
      dotted line marks one abscissa, the one of `x` nearest to `probe` (its middle by default), and the
      readings there stand under the chart.
    - **curves over the variable itself**: without `x`, ``fn(value)`` returns ``{label: number}`` or one number.
      The curves stand still, and the dotted line with its readings follows the slider.

    ::

        figures.slider(
            lambda n: {"ring": ring_all_reduce_seconds(sizes, n, ALPHA, RATE),
                       "tree": tree_all_reduce_seconds(sizes, n, ALPHA, RATE)},
            name="ranks N", values=[2, 4, 8, 16, 32, 64], start=8,
            x=sizes, x_label="buffer size", y_label="time", x_scale="log2", y_scale="log",
            probe=units.MiB, format_x=units.format_bytes, format_y=units.format_seconds,
            note=lambda n: f"The curves cross at {units.format_bytes(crossover_bytes(n))}.",
            caption="Ring against tree: the crossover moves right as ranks are added.",
        )

    In the built book (environment variable ``DTLIB_STATIC``), and wherever ipywidgets or a kernel is missing,
    all positions are computed now and travel inside the page: a native range input, an inline SVG, a table of
    the readings for readers without JavaScript, no request to anywhere. In JupyterLab the same call gives an
    ipywidgets slider that calls `fn` at each move.

    Labels that have a look in ``figures.style`` (``"ring"``, ``"all-reduce"``, ``"ring, 64 ranks"``) get its
    colour and dash. `points` adds measurements as markers: ``{label: (xs, ys)}``; a label that is also a curve
    shares its colour. `note` gives the sentence under the chart for a position. NaN, infinity and, on a
    logarithmic scale, numbers that are not positive leave a gap. The ``format_*`` functions turn a position, an
    abscissa and a reading into the text that is shown. Scales are ``linear``, ``log`` or ``log2``. `caption`
    and `alt` (for screen readers) are plain text.

    Bad arguments raise ``ValueError`` naming the argument.
    """
    given = Slider(
        fn=fn, name=name, values=list(values), start=start,
        x=None if x is None else np.asarray(x, dtype=float), x_label=x_label or (name if x is None else ""),
        y_label=y_label, x_scale=x_scale, y_scale=y_scale, probe=probe, points=dict(points or {}), note=note,
        format_value=format_value, format_x=format_x, format_y=format_y, caption=caption, alt=alt,
    )  # fmt: skip
    _check(given)
    _ = given.grid, given.axes  # computes every position now, so that a mistake shows in this cell
    return given


@dataclass(frozen=True)
class Step:
    """What one slider position shows."""

    text: str
    curves: list[list[float | None]]
    probe: float
    at: list[float | None]
    readings: list[str]
    note: str


@dataclass(eq=False)
class Slider:
    """What :func:`slider` returns: shows itself in a notebook; :meth:`html` is the static page's fragment."""

    fn: Callable[[Any], Any]
    name: str
    values: list[Any]
    start: Any
    x: np.ndarray | None
    x_label: str
    y_label: str
    x_scale: chart.Scale
    y_scale: chart.Scale
    probe: float | None
    points: dict[str, tuple[ArrayLike, ArrayLike]]
    note: Callable[[Any], str] | None
    format_value: Callable[[Any], str]
    format_x: Callable[[float], str]
    format_y: Callable[[float], str]
    caption: str
    alt: str

    @property
    def first(self) -> int:
        """The index of the position that is shown at first."""
        return self.values.index(self.start) if self.start is not None else len(self.values) // 2

    @cached_property
    def answers(self) -> list[dict[str, np.ndarray]]:
        """What `fn` returned at each position, as ``{label: array}``."""
        answers = [self.ask(index) for index in range(len(self.values))]
        for value, answer in zip(self.values, answers, strict=True):
            if list(answer) != list(answers[0]):
                found = f"{list(answers[0])} and, at {value!r}, {list(answer)}"
                raise ValueError(f"fn must return the same labels at every position, not {found}")
        return answers

    def ask(self, index: int) -> dict[str, np.ndarray]:
        """Call `fn` at position `index`: one array a label, as long as `x`, or of length one without it."""
        return _as_curves(self.fn(self.values[index]), self.x, self.values[index])

    @cached_property
    def labels(self) -> list[str]:
        """The names of the curves."""
        return list(self.answers[0])

    @cached_property
    def grid(self) -> np.ndarray:
        """``grid[i, j, k]``: position i, curve j, abscissa k (a single one where `x` was not given)."""
        grid = np.array([list(answer.values()) for answer in self.answers])
        if grid.size > _MAX_GRID:
            raise ValueError(f"values times x must give at most {_MAX_GRID} numbers, not {grid.size}")
        if not self._shown(grid):
            raise ValueError(f"fn must return some finite numbers that a {self.y_scale} axis can show")
        return grid

    @cached_property
    def xs(self) -> list[float]:
        """The abscissas of the curves."""
        return [float(one) for one in (self.values if self.x is None else self.x)]

    @cached_property
    def marks(self) -> dict[str, tuple[list[float], list[float]]]:
        """The measured points as plain numbers."""
        return {
            label: (np.ravel(xs).astype(float).tolist(), np.ravel(ys).astype(float).tolist())
            for label, (xs, ys) in self.points.items()
        }

    @cached_property
    def axes(self) -> tuple[chart.Axis, chart.Axis]:
        """Both axes, with limits that hold every position of the slider, so that curves stay comparable."""
        all_x = [*self.xs, *(one for xs, _ in self.marks.values() for one in xs)]
        all_y = [*self._shown(self.grid), *(one for _, ys in self.marks.values() for one in ys)]
        x_limits = chart.limits(all_x, self.x_scale, padded=False)
        y_limits = chart.limits(all_y, self.y_scale, padded=True)
        return chart.layout(
            chart.Axis(self.x_label, self.x_scale, *x_limits, self.format_x),
            chart.Axis(self.y_label, self.y_scale, *y_limits, self.format_y),
        )

    def step(self, index: int, answer: Mapping[str, np.ndarray] | None = None) -> Step:
        """What position `index` shows; a fresh `answer` of `fn` replaces the computed one where given."""
        value = self.values[index]
        found = list((answer or self.answers[index]).values())
        at = [self._or_gap(row[self._probe_index]) for row in found]
        return Step(
            text=self.format_value(value),
            curves=[[self._or_gap(y) for y in row] for row in (self.grid[:, :, 0].T if self.x is None else found)],
            probe=self.xs[index if self.x is None else self._probe_index],
            at=at,
            readings=["–" if y is None else self.format_y(y) for y in at],
            note="" if self.note is None else str(self.note(value)),
        )  # fmt: skip

    def html(self) -> str:
        """The fragment for a page without Python: it holds every position and needs nothing else."""
        from .slider_view import page

        return page(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from .slider_view import widget

        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.html()}
        live = None if os.environ.get("DTLIB_STATIC") else widget(self)
        return bundle if live is None else bundle | live._repr_mimebundle_()

    def __repr__(self) -> str:
        """Name and range, for a terminal."""
        ends = f"{self.format_value(self.values[0])} to {self.format_value(self.values[-1])}"
        return f"<slider: {', '.join(self.labels)} by {self.name}, {ends}>"

    @cached_property
    def _probe_index(self) -> int:
        if self.x is None:
            return 0
        if self.probe is None:
            return len(self.xs) // 2
        scale = np.log if self.x_scale != "linear" else np.asarray
        return int(np.argmin(np.abs(scale(self.x) - scale(self.probe))))

    def _or_gap(self, y: float) -> float | None:
        shown = math.isfinite(y) and (self.y_scale == "linear" or y > 0)
        return float(f"{y:.7g}") if shown else None

    def _shown(self, ys: np.ndarray) -> list[float]:
        return [y for y in map(self._or_gap, np.ravel(ys)) if y is not None]


def _check(given: Slider) -> None:
    if not isinstance(given.name, str) or not given.name:
        raise ValueError(f"name must be a non-empty string, not {given.name!r}")
    if len(given.values) < 2:
        raise ValueError(f"values must hold at least two slider positions, not {given.values!r}")
    if given.start is not None and given.start not in given.values:
        raise ValueError(f"start must be one of values, not {given.start!r}")
    for argument, scale in (("x_scale", given.x_scale), ("y_scale", given.y_scale)):
        if scale not in ("linear", "log", "log2"):
            raise ValueError(f"{argument} must be 'linear', 'log' or 'log2', not {scale!r}")
    if given.x_scale != "linear" and given.probe is not None and given.probe <= 0:
        raise ValueError(f"probe must be positive on a {given.x_scale} scale, not {given.probe!r}")
    for label, pair in given.points.items():
        sizes = [np.size(part) for part in pair]
        if len(sizes) != 2 or sizes[0] != sizes[1]:
            raise ValueError(f"points[{label!r}] must be two arrays of one length, not of lengths {sizes}")
    argument, xs = ("values", given.values) if given.x is None else ("x", given.x)
    try:
        numbers = np.asarray(xs, dtype=float)
    except (TypeError, ValueError):
        raise ValueError(f"values must be numbers where x is not given, not {given.values!r}") from None
    if numbers.ndim != 1 or numbers.size < 2 or not np.isfinite(numbers).all():
        raise ValueError(f"{argument} must be at least two finite numbers in one row, not {xs!r}")
    if given.x_scale != "linear" and numbers.min() <= 0:
        raise ValueError(f"{argument} must be positive on a {given.x_scale} scale, not {numbers.min():g}")


def _as_curves(answer: Any, x: np.ndarray | None, value: Any) -> dict[str, np.ndarray]:
    named = answer if isinstance(answer, Mapping) else {"value": answer}
    wanted = () if x is None else x.shape
    curves = {}
    for label, ys in named.items():
        array = np.asarray(ys, dtype=float)
        if array.shape != wanted:
            kind = "a number" if x is None else f"an array of {wanted[0]}, as long as x,"
            raise ValueError(f"fn must return {kind} for {label!r} at {value!r}, not shape {array.shape}")
        curves[str(label)] = np.atleast_1d(array)
    if not curves:
        raise ValueError(f"fn must return at least one curve at {value!r}, not {answer!r}")
    return curves
