"""What a picture shows, in words with its numbers: for who hears the page instead of seeing it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_MOST = 8
"""Of series in a picture's panel, and of values in a series, that are told one by one; more are told by their range."""


def alternative(figure: Any) -> str:
    """The label of the matplotlib `figure`, then for each of its axes what is drawn there, read from what was drawn.

    Axes with a label of their own (``axes.set_label``) are told by it, once; of others: bars, lines, markers, stairs.
    """
    own = str(figure.get_label())
    shown = [axes for axes in figure.axes if axes.get_visible()]
    said = [own, *(_panel(axes) for axes in shown if not (axes.get_label() and str(axes.get_label()) in own))]
    return ". ".join(each.rstrip(". ") for each in said if each)


def _panel(axes: Any) -> str:
    label = str(axes.get_label())
    if label.startswith("<"):  # matplotlib's own: the scale of colours beside a picture
        return ""
    shown = [label] if label else [*_bars(axes), *_lines(axes), *_stairs(axes), *_clouds(axes)]
    if not shown:
        return ""
    many = [] if len(shown) <= _MOST else [f"and {len(shown) - _MOST} more"]
    across, up = _plain(axes.get_xlabel()), _plain(axes.get_ylabel())
    head = up if label else " against ".join(each for each in (up, across) if each)
    return (f"{head}: " if head and head not in shown[0] else "") + "; ".join([*shown[:_MOST], *many])


def _bars(axes: Any) -> Iterator[str]:
    for container in axes.containers:
        bars = [each for each in getattr(container, "patches", ()) if hasattr(each, "get_width")]
        if not bars:
            continue
        lying = getattr(container, "orientation", "vertical") == "horizontal"
        sizes = [each.get_width() if lying else each.get_height() for each in bars]
        places = [
            each.get_y() + each.get_height() / 2 if lying else each.get_x() + each.get_width() / 2 for each in bars
        ]
        names = _names(axes.yaxis if lying else axes.xaxis)
        told = [names.get(round(place), _number(place)) for place in places]
        yield _named(container.get_label(), "bars", _listed(told, sizes))


def _names(axis: Any) -> dict[int, str]:
    """The words that stand at whole places of an axis, where they are more than the number of the place."""
    words = [_plain(each.get_text()) for each in axis.get_ticklabels()]
    ticks = zip(axis.get_ticklocs(), words, strict=False)
    return {round(place): text for place, text in ticks if place == round(place) and text not in _numerals(place)}


def _numerals(place: float) -> set[str]:
    return {"", *(f"{place:.{digits}f}".replace("-", "−") for digits in range(4))}


def _lines(axes: Any) -> Iterator[str]:
    for line in axes.lines:
        if line.get_transform() is not axes.transData or not line.get_visible():
            continue  # a line across, or beside the axes, is none of the data
        at = _shown(line.get_xydata())
        if len(at):
            kind = "line" if line.get_linestyle() not in ("None", "none", " ", "") else "marks"
            yield _named(line.get_label(), kind, _course(at[:, 0], at[:, 1], each=kind == "marks"))


def _stairs(axes: Any) -> Iterator[str]:
    for patch in axes.patches:
        if hasattr(patch, "get_data"):
            values, edges, _ = patch.get_data()
            middle = (np.asarray(edges[:-1]) + edges[1:]) / 2
            shown = np.isfinite(values)
            if shown.any():
                yield _named(patch.get_label(), "steps", _course(middle[shown], np.asarray(values)[shown], each=False))


def _clouds(axes: Any) -> Iterator[str]:
    for collection in axes.collections:
        at = _shown(collection.get_offsets())
        if len(at) > 1:
            x, y = at[:, 0], at[:, 1]
            yield _named(collection.get_label(), f"{len(at)} points", f"{_span(y)} at {_span(x)}")


def _shown(points: Any) -> np.ndarray:
    """The points that are drawn: gaps are masked, or not numbers."""
    at: np.ndarray = np.array(np.ma.filled(np.ma.asarray(points, dtype=float), np.nan))
    return at[np.isfinite(at).all(axis=1)]


def _course(x: np.ndarray, y: np.ndarray, *, each: bool) -> str:
    """Each value of a few marks; of more, and of a line, its ends, and what is lowest and highest between them."""
    if each and len(x) <= _MOST:
        return ", ".join(f"{_number(b)} at {_number(a)}" for a, b in zip(x, y, strict=True))
    said = f"{_number(y[0])} at {_number(x[0])} to {_number(y[-1])} at {_number(x[-1])}"
    for word, at in (("lowest", int(np.argmin(y))), ("highest", int(np.argmax(y)))):
        if y[at] not in (y[0], y[-1]):
            said += f", {word} {_number(y[at])} at {_number(x[at])}"
    return said


def _listed(names: Sequence[str], sizes: Sequence[float]) -> str:
    if len(sizes) <= 2 * _MOST:
        pairs = [(name, _number(size)) for name, size in zip(names, sizes, strict=True)]
        return ", ".join(
            f"{name} {size}" if re.search("[^-\\d.]", name) else f"{size} at {name}" for name, size in pairs
        )
    return f"{len(sizes)} from {_span(np.asarray(sizes))}"


def _span(values: np.ndarray) -> str:
    return f"{_number(values.min())} to {_number(values.max())}"


def _named(label: object, kind: str, told: str) -> str:
    name = str(label)
    return f"{kind} {told}" if name.startswith("_") or not name else f"{_plain(name)}: {told}"


def _plain(text: str) -> str:
    """Words without the marks of formulas, which would be read aloud."""
    return re.sub(r"[${}\\]|\\mathrm", "", text.replace("\n", " ")).strip()


def _number(value: float) -> str:
    """Three digits, and whole numbers whole."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
