"""The memory of a rank through a step: what it holds at each moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import style
from .breakdown import _bar, _looks, _parts, _unit

_BANDS = {"forward": "forward", "backward": "backward", "step": "optimizer"}
_PHASES = {"begin": "rest", "end": "rest", "gradient": "backward"}
_PANEL_INCHES = 1.75


@dataclass(frozen=True)
class _At:
    """One moment of a step: its phase, the module that is at work ("" for none), and bytes by part."""

    phase: str
    module: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def memory_timeline(
    rows: Mapping[str, Sequence[Any]],
    *,
    peaks: Mapping[str, float] | None = None,
    unit: str | None = None,
    legend: bool = True,
) -> Any:
    """Draw the memory of a step, moment by moment, a panel for each of `rows`; returns the matplotlib figure.

    `rows` maps a label to spans of ``lab.memory_spans``, at the same events in all rows; each is drawn at its
    `fullest`. The parts are stacked in the looks of `breakdown_bars`, their total is a line; under the panels stand the
    phases, and the numbers of the modules at work. `peaks` are bytes by label that theory has for the fullest moment, a
    dashed line. `unit` as in `breakdown_bars`.

    Raises ``ValueError`` for no spans, rows with different events, or `peaks` of another label.
    """
    played = {str(label): _moments(str(label), own) for label, own in rows.items()}
    peaks = {str(label): float(peak) for label, peak in (peaks or {}).items()}
    _check(played, peaks)
    totals = {label: [moment.total for moment in own] for label, own in played.items()}
    highest = max(value for own in (*totals.values(), peaks.values()) for value in own)
    name, scale = _unit(unit, highest)
    looks = _looks(part for own in played.values() for moment in own for part in moment.parts)
    with style.context():
        figure, panels = _panels(len(played), len(looks) if legend else 0)
        for (label, own), axes in zip(played.items(), panels, strict=True):
            _stack(axes, [moment.parts for moment in own], looks, scale)
            _total(axes, totals[label], scale)
            if label in peaks:
                axes.axhline(peaks[label] / scale, color=style.INK, linestyle="--", linewidth=1.2)
            axes.set_ylim(0, highest / scale * 1.08)
            axes.set_ylabel(f"{label} ({name})")
            axes.grid(False, axis="x")
        _phases(panels[-1], next(iter(played.values())))
        if legend:
            _legend(figure, looks, bool(peaks))
    figure.set_label(_caption(played, totals, peaks, name, scale))
    for axes in panels:
        axes.set_label(figure.get_label())  # which tells the numbers of all panels
    return figure


def _moments(label: str, spans: Sequence[Any]) -> list[_At]:
    units = [each.name for each in spans if each.event == "forward" and each.name]
    found: list[_At] = []
    for i, each in enumerate(spans):
        phase, module = _where(each, units, found[-1].module if found else "")
        found.append(_At(phase, module, _parts(f"{label}, moment {i}", each.fullest)))
    return found


def _where(span: Any, units: Sequence[str], before: str) -> tuple[str, str]:
    """The phase of a span, and the unit at work in it: a gradient belongs to the unit it comes out of, and a unit's
    backward pass may be done when that of the next, `before`, has begun."""
    event = span.event.removesuffix(" done")
    phase = _PHASES.get(event, event)
    if event == "gradient":
        return phase, next((unit for unit in units if span.name.startswith(f"{unit}.")), "")
    if span.event == "backward done":
        return phase, before
    return phase, span.name if span.event in ("forward", "backward") else ""


def _check(played: Mapping[str, list[_At]], peaks: Mapping[str, float]) -> None:
    if not played or not all(played.values()):
        raise ValueError("rows must hold one moment at least in each row")
    first = [(moment.phase, moment.module) for moment in next(iter(played.values()))]
    for label, own in played.items():
        if [(moment.phase, moment.module) for moment in own] != first:
            raise ValueError(f"rows must have the same moments, and rows[{label!r}] has others than the first")
    for label in peaks:
        if label not in played:
            raise ValueError(f"peaks must name rows ({', '.join(played)}), not {label!r}")


def _panels(num_rows: int, num_parts: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure  # not pyplot: a notebook would show the figure a second time

    height = _PANEL_INCHES * num_rows + 0.5 + 0.24 * -(-(num_parts + 1) // 3)
    figure = Figure(figsize=(6.4, height))
    return figure, list(figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0])


def _stack(axes: Any, moments: Sequence[Mapping[str, float]], looks: Mapping[str, Any], scale: float) -> None:
    bottoms = [0.0] * len(moments)
    for name, look in looks.items():
        heights = [parts.get(name, 0) / scale for parts in moments]
        steps = [
            (bottom, bottom + height if height else math.nan) for bottom, height in zip(bottoms, heights, strict=True)
        ]
        if any(heights):
            edges, steps = _long_steps(steps)
            tops, lows = [top for _, top in steps], [low for low, _ in steps]
            axes.stairs(tops, edges, baseline=lows, fill=True, **{**_bar(look), "linewidth": 0.3})
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _total(axes: Any, totals: Sequence[float], scale: float) -> None:
    edges, values = _long_steps([value / scale for value in totals])
    axes.stairs(values, edges, color=style.INK, linewidth=1.8, fill=False)


def _long_steps(steps: Sequence[Any]) -> tuple[list[float], list[Any]]:
    """Edges and steps of a stair in which neighbours that are equal are one step, which keeps the picture small."""
    runs = _runs([repr(step) for step in steps])  # as text, in which a gap equals a gap
    return [start - 0.5 for start, _, _ in runs] + [len(steps) - 0.5], [steps[start] for start, _, _ in runs]


def _phases(axes: Any, moments: Sequence[_At]) -> None:
    """Numbers of the modules as ticks, and under them a band for each phase."""
    ticks, names = [], []
    for start, stop, (phase, module) in _runs([(moment.phase, moment.module) for moment in moments]):
        if module and phase in ("forward", "backward"):
            ticks.append((start + stop - 1) / 2)
            names.append(module.rpartition(".")[2])
    axes.set_xticks(ticks, names)
    axes.set_xlim(-0.5, len(moments) - 0.5)
    across = axes.get_xaxis_transform()
    for start, stop, phase in _runs([moment.phase for moment in moments]):
        color = style.color(_BANDS[phase]) if phase in _BANDS else style.INK
        ends = [start - 0.45, stop - 0.55]
        axes.plot(ends, [-0.2] * 2, color=color, linewidth=3, transform=across, clip_on=False, solid_capstyle="butt")
        if stop - start > len(moments) / 20 or len(moments) < 20:
            axes.text(sum(ends) / 2, -0.24, phase, transform=across, ha="center", va="top", fontsize=9)
    axes.set_xlabel("module and phase", labelpad=22)


def _runs(keys: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """(start, stop, key) of each stretch of equal keys."""
    starts = [at for at, key in enumerate(keys) if at == 0 or keys[at - 1] != key]
    return [(start, stop, keys[start]) for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True)]


def _legend(figure: Any, looks: Mapping[str, Any], peaks: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(label=name, **_bar(look)) for name, look in looks.items()]
    handles.append(Line2D([], [], label="total", color=style.INK, linewidth=1.8))
    if peaks:
        handles.append(Line2D([], [], label="peak in theory", color=style.INK, linestyle="--", linewidth=1.2))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=2.2, handleheight=1.1)


def _caption(
    played: Mapping[str, list[_At]],
    totals: Mapping[str, list[float]],
    peaks: Mapping[str, float],
    unit: str,
    scale: float,
) -> str:
    said = []
    for label, own in totals.items():
        at = own.index(max(own))
        moment = played[label][at]
        module = f" of {moment.module}" if moment.module else ""
        text = f"{label}: at most {own[at] / scale:.4g} {unit} ({moment.phase}{module})"
        if label in peaks:
            text += f", in theory {peaks[label] / scale:.4g}"
        said.append(text)
    return "memory of a rank through a step; " + "; ".join(said)
