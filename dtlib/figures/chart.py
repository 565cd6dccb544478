"""The small SVG chart under a slider: axes, curves, markers. Numbers in, text out; no state."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .style import Look

Scale = Literal["linear", "log", "log2"]
WIDTH, HEIGHT = 480, 270
_TOP, _RIGHT, _BOTTOM = 26, 18, 42


@dataclass(frozen=True)
class Axis:
    """One axis: what it measures, its scale and limits, and where it lies in the picture (pixels)."""

    label: str
    scale: Scale
    low: float
    high: float
    format: Callable[[float], str]
    start: float = 0.0
    end: float = 1.0

    def place(self, value: float) -> float:
        """The pixel of `value`."""
        scale = math.log if self.scale != "linear" else float
        low, high = scale(self.low), scale(self.high)
        return self.start + (self.end - self.start) * (scale(value) - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers inside the limits, about five of them."""
        from matplotlib import ticker

        found: Any = []
        if self.scale == "log2":
            found = ticker.LogLocator(base=2, numticks=6).tick_values(self.low, self.high)
        elif self.scale == "log" and self.high / self.low >= 100:
            found = ticker.LogLocator(numticks=6).tick_values(self.low, self.high)
        inside = [float(tick) for tick in found if self._holds(tick)]
        if len(inside) < 2:
            found = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
            inside = [float(tick) for tick in found if self._holds(tick)]
        return inside

    def _holds(self, value: float) -> bool:
        slack = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - slack <= value <= self.high + slack

    def at(self, start: float, end: float) -> Axis:
        """The same axis, laid from pixel `start` to pixel `end`."""
        return Axis(self.label, self.scale, self.low, self.high, self.format, start, end)


def limits(values: Sequence[float], scale: Scale, *, padded: bool) -> tuple[float, float]:
    """The ends of an axis that shows all of `values`; with `padded`, some air, and zero where it is near."""
    low, high = min(values), max(values)
    if scale != "linear":
        if low == high:
            return low / 2, high * 2
        air = (high / low) ** 0.04 if padded else 1.0
        return low / air, high * air
    if low == high:
        return low - 1, high + 1
    if not padded:
        return low, high
    if 0 < low < 0.5 * high:
        return 0.0, high * 1.05
    air = 0.05 * (high - low)
    return (low - air if low else 0.0), high + air


def layout(x: Axis, y: Axis) -> tuple[Axis, Axis]:
    """Both axes placed in the picture, with room at the left for the longest tick label of `y`."""
    longest = max(len(y.format(tick)) for tick in y.ticks())
    return x.at(12 + 7.2 * longest, WIDTH - _RIGHT), y.at(HEIGHT - _BOTTOM, _TOP)


def path(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """The ``d`` of a curve through the points; a missing `y` (None) leaves a gap."""
    d, pen = "", "M"
    for one_x, one_y in zip(xs, ys, strict=True):
        if one_y is None:
            pen = "M"
            continue
        d += f"{pen}{x.place(one_x):.1f} {y.place(one_y):.1f}"
        pen = "L"
    return d


def draw(
    x: Axis,
    y: Axis,
    xs: Sequence[float],
    curves: Mapping[str, Sequence[float | None]],
    looks: Mapping[str, Look],
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    probe: float,
    at: Sequence[float | None],
    alt: str,
) -> str:
    """The chart as an ``<svg>``: `curves` over `xs`, measured `points`, and a dotted line at `probe`."""
    parts = [*_frame(x, y)]
    for label, (point_xs, point_ys) in points.items():
        stroke = f'stroke="{looks[label].color}"'
        for one_x, one_y in zip(point_xs, point_ys, strict=True):
            shape = marker(looks[label].marker, x.place(one_x), y.place(one_y))
            parts.append(f'<path class="point" {stroke} d="{shape}"/>')
    where = x.place(probe)
    ends = f'x1="{where:.1f}" x2="{where:.1f}" y1="{y.start}" y2="{y.end}"'
    parts.append(f'<line class="probe" {ends}/>')
    for label, ys in curves.items():
        stroke = f'stroke="{looks[label].color}" stroke-dasharray="{dashes(looks[label])}"'
        parts.append(f'<path class="curve" {stroke} d="{path(x, y, xs, ys)}"/>')
    for label, value in zip(curves, at, strict=True):
        hidden = ' style="display:none"' if value is None else ""
        height = y.place(value if value is not None else y.low)
        place = f'cx="{where:.1f}" cy="{height:.1f}" r="4"'
        parts.append(f'<circle class="dot" {place} fill="{looks[label].color}"{hidden}/>')
    said = html.escape(alt)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">{"".join(parts)}</svg>'


def swatch(known: Look, *, measured: bool) -> str:
    """The sample of a curve, or of a marker, in the list under the chart."""
    if measured:
        inner = f'<path class="point" stroke="{known.color}" d="{marker(known.marker, 18, 6)}"/>'
    else:
        dash = dashes(known)
        inner = f'<path class="curve" stroke="{known.color}" stroke-dasharray="{dash}" d="M0 6L36 6"/>'
    return f'<svg viewBox="0 0 36 12" aria-hidden="true">{inner}</svg>'


def dashes(known: Look) -> str:
    """The look's dash for ``stroke-dasharray``."""
    return " ".join(f"{2 * step:g}" for step in known.dash) or "none"


def marker(shape: str, x: float, y: float) -> str:
    """The ``d`` of a marker centred at (`x`, `y`), about nine pixels wide."""
    outline = _MARKERS.get(shape, _MARKERS["o"])
    return f"M{x:.1f} {y:.1f}{outline}"


_MARKERS = {
    "o": "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0",
    "s": "m-4 -4h8v8h-8z",
    "^": "m0 -5l4.6 8.4h-9.2z",
    "v": "m0 5l4.6 -8.4h-9.2z",
    "D": "m0 -5.2l5.2 5.2l-5.2 5.2l-5.2 -5.2z",
    "P": "m-4.5 0h9m-4.5 -4.5v9",
    "X": "m-4 -4l8 8m-8 0l8 -8",
    "*": "m-4.5 0h9m-6.8 -4l4.6 8m-4.6 0l4.6 -8",
}


def _frame(x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick in y.ticks():
        at = y.place(tick)
        parts.append(f'<path class="grid" d="M{x.start:.1f} {at:.1f}H{x.end:.1f}"/>')
        text = html.escape(y.format(tick))
        parts.append(f'<text x="{x.start - 6:.1f}" y="{at + 4.5:.1f}" text-anchor="end">{text}</text>')
    for tick in x.ticks():
        at = x.place(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {y.start:.1f}V{y.end:.1f}"/>')
        anchor = "end" if at > x.end - 20 and len(x.format(tick)) > 5 else "middle"
        text = html.escape(x.format(tick))
        parts.append(f'<text x="{at:.1f}" y="{y.start + 17:.1f}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<path class="axis" fill="none" d="M{x.start:.1f} {y.end:.1f}V{y.start:.1f}H{x.end:.1f}"/>')
    middle = (x.start + x.end) / 2
    under = f'x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle"'
    parts.append(f"<text {under}>{html.escape(x.label)}</text>")
    parts.append(f'<text x="4" y="14">{html.escape(y.label)}</text>')
    return parts
