"""The memory of a rank through a step: what theory says it holds at each moment, and what was measured there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import style
from .breakdown import _bar, _looks, _parts, _unit

_BANDS = {"forward": "forward", "backward": "backward", "step": "optimizer", "update": "optimizer"}
_PANEL_INCHES = 1.75


def memory_timeline(
    rows: Mapping[str, Sequence[Any]],
    *,
    measured: Mapping[str, Sequence[float]] | None = None,
    unit: str | None = None,
    legend: bool = True,
) -> Any:
    """Draw the memory of a step, moment by moment, a panel for each of `rows`; returns the matplotlib figure.

    `rows` maps a label to the moments that theory plays, as ``theory.zero.step_timeline`` makes them: objects with a
    `phase` (``"forward"``), the number of a `module` (below 0 for none), and what is `held` (a `Breakdown`). All rows
    have the same moments. The parts are stacked in the looks of `breakdown_bars`, their total is a line, and the
    phases stand under the panels. `measured` maps labels to the bytes that were measured at those moments: a marker
    each (not a number: none). `unit` as in `breakdown_bars`.

    Raises ``ValueError`` for no moments, rows with different moments, or measurements of another number or label.
    """
    played = {str(label): list(moments) for label, moments in rows.items()}
    seen = {str(label): [float(value) for value in values] for label, values in (measured or {}).items()}
    _check(played, seen)
    stacks = {
        label: [_parts(f"{label}, moment {i}", m.held) for i, m in enumerate(own)] for label, own in played.items()
    }
    totals = {label: [sum(parts.values()) for parts in own] for label, own in stacks.items()}
    highest = max(value for own in (*totals.values(), *seen.values()) for value in own if math.isfinite(value))
    name, scale = _unit(unit, highest)
    looks = _looks(part for own in stacks.values() for parts in own for part in parts)
    first = next(iter(played.values()))
    with style.context():
        figure, panels = _panels(len(played), len(looks) if legend else 0)
        for (label, own), axes in zip(stacks.items(), panels, strict=True):
            _stack(axes, own, looks, scale)
            _total(axes, totals[label], scale)
            if label in seen:
                _markers(axes, seen[label], scale)
            axes.set_ylim(0, highest / scale * 1.08)
            axes.set_ylabel(f"{label} ({name})")
        _phases(panels[-1], first)
        if legend:
            _legend(figure, looks, bool(seen))
    figure.set_label(_caption(played, totals, seen, name, scale))
    return figure


def _check(played: Mapping[str, list[Any]], seen: Mapping[str, list[float]]) -> None:
    if not played or not all(played.values()):
        raise ValueError("rows must hold one moment at least in each row")
    first = [(moment.phase, moment.module) for moment in next(iter(played.values()))]
    for label, own in played.items():
        if [(moment.phase, moment.module) for moment in own] != first:
            raise ValueError(f"rows must have the same moments, and rows[{label!r}] has others than the first")
    for label, values in seen.items():
        if label not in played:
            raise ValueError(f"measured must name rows ({', '.join(played)}), not {label!r}")
        if len(values) != len(first):
            raise ValueError(f"measured[{label!r}] must hold one number for each of {len(first)} moments")


def _panels(num_rows: int, num_parts: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure  # not pyplot: a notebook would show the figure a second time

    height = _PANEL_INCHES * num_rows + 0.5 + 0.24 * -(-(num_parts + 1) // 3)
    figure = Figure(figsize=(6.4, height))
    return figure, list(figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0])


def _stack(axes: Any, moments: Sequence[Mapping[str, float]], looks: Mapping[str, Any], scale: float) -> None:
    bottoms = [0.0] * len(moments)
    for name, look in looks.items():
        tops = [bottom + parts.get(name, 0) / scale for bottom, parts in zip(bottoms, moments, strict=True)]
        if tops != bottoms:
            axes.stairs(tops, _edges(tops), baseline=bottoms, fill=True, **{**_bar(look), "linewidth": 0.3})
        bottoms = tops


def _total(axes: Any, totals: Sequence[float], scale: float) -> None:
    axes.stairs([value / scale for value in totals], _edges(totals), color=style.INK, linewidth=1.8, fill=False)


def _edges(values: Sequence[float]) -> list[float]:
    return [at - 0.5 for at in range(len(values) + 1)]


def _markers(axes: Any, values: Sequence[float], scale: float) -> None:
    axes.plot(
        range(len(values)), [value / scale for value in values], linestyle="none", marker="D", markersize=6,
        markerfacecolor="none", markeredgewidth=1.6, color=style.INK,
    )  # fmt: skip


def _phases(axes: Any, moments: Sequence[Any]) -> None:
    """Numbers of the modules as ticks, and under them a band for each phase."""
    axes.set_xticks(range(len(moments)), [str(m.module) if m.module >= 0 else "" for m in moments])
    axes.set_xlim(-0.5, len(moments) - 0.5)
    axes.grid(False, axis="x")
    start = 0
    for at in range(1, len(moments) + 1):
        if at < len(moments) and moments[at].phase == moments[start].phase:
            continue
        phase = moments[start].phase
        across = axes.get_xaxis_transform()
        color = style.color(_BANDS[phase]) if phase in _BANDS else style.INK
        ends = [start - 0.45, at - 0.55]
        axes.plot(ends, [-0.2] * 2, color=color, linewidth=3, transform=across, clip_on=False, solid_capstyle="butt")
        axes.text(sum(ends) / 2, -0.24, phase, transform=across, ha="center", va="top", fontsize=9)
        start = at
    axes.set_xlabel("module and phase", labelpad=22)


def _legend(figure: Any, looks: Mapping[str, Any], measured: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(label=name, **_bar(look)) for name, look in looks.items()]
    handles.append(Line2D([], [], label="total", color=style.INK, linewidth=1.8))
    if measured:
        handles.append(Line2D([], [], label="measured", linestyle="none", marker="D", markerfacecolor="none",
                              color=style.INK))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=2.2, handleheight=1.1)


def _caption(
    played: Mapping[str, list[Any]],
    totals: Mapping[str, list[float]],
    seen: Mapping[str, list[float]],
    unit: str,
    scale: float,
) -> str:
    said = []
    for label, own in totals.items():
        at = own.index(max(own))
        moment = played[label][at]
        module = f" of module {moment.module}" if moment.module >= 0 else ""
        text = f"{label}: at most {own[at] / scale:.4g} {unit} ({moment.phase}{module})"
        if label in seen:
            text += f", measured {max(value for value in seen[label] if math.isfinite(value)) / scale:.4g}"
        said.append(text)
    return "memory of a rank through a step; " + "; ".join(said)
