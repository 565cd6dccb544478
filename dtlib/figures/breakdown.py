"""Stacked bars: what a total is made of. Breakdowns of `theory` and readings of `lab`, in one look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtlib.theory import units

from . import style
from .style import Look

PARTS: dict[str, Look] = {
    # what `lab.memory` calls its kinds, and the parts of `ModelStates`
    "parameters": Look("#3a6ca5"),
    "weights": Look("#3a6ca5"),
    "gradients": Look("#b8622e", hatch="//"),
    "optimizer": Look("#8a8038", hatch="--"),
    "master weights": Look("#6b86a8", hatch="\\\\"),
    "main gradients": Look("#c08558", hatch="xx"),
    "first moment": Look("#8a8038", hatch="--"),
    "second moment": Look("#6f7a52", hatch="||"),
    "moment scales": Look("#94846a", hatch="++++"),
    # what a step adds
    "activations": Look("#7a66a6", hatch="+"),
    "layer activations": Look("#7a66a6", hatch="+"),
    "recomputed layer": Look("#9370a8", hatch="x"),
    "embedding activations": Look("#a0738f", hatch="-----"),
    "head activations": Look("#8f7a9c", hatch="|||||"),
    "logits": Look("#a86a7f", hatch="xxxxx"),
    "gathered weights": Look("#3f8490", hatch="\\\\\\\\\\"),
    "unsharded gradients": Look("#a5714f", hatch="//////"),
    "logits gradient": Look("#b98a72", hatch="////-"),
    "buffers": Look("#5d8a94", hatch="\\\\|"),
    "all to all": Look("#4f7f73", hatch="//\\\\-"),
    "fp8 copies": Look("#7d7a3f", hatch="\\\\--"),
    "temporary": Look("#7c7c74", hatch="/-"),
}
"""The look of each part of memory, by its name with spaces: colour, and a hatch for a reader who sees none.

Hatches are lines alone: dots and circles would make the picture a hundred times as large.
"""

_SPARE_COLORS = (
    "#5f7fa8", "#b56576", "#5e8c6a", "#9a7b4f", "#84709b", "#6d7a80", "#3f8f96", "#a8602f", "#5b5ea6", "#8c8c3a",
    "#a05a93", "#7a4a3a",
)  # fmt: skip
_SPARE_HATCHES = ("", "//", "\\\\", "--", "||", "xx", "++", "/", "\\", "-", "|")
_UNITS = {name: getattr(units, name) for name in ("MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")}
_UNITS |= {"B": 1, "kB": units.KB}
_NUMBER = 0.1  #: of the longest bar: how wide a total is, written
_SHOWN_FROM = 1 / 500  #: of the longest bar: a thinner part would be all outline, and is left white


def part_look(name: str, *, spare: int | None = None) -> Look:
    """The look of the part called `name`: ``part_look("gradients").color``.

    Hyphens, underscores and case do not matter. A name without a look of its own gets the `spare`-th look that means
    nothing where `spare` is passed; otherwise ``ValueError`` lists the names.
    """
    known = PARTS.get(_words(name))
    if known is not None:
        return known
    if spare is None:
        raise ValueError(f"name must be one of {', '.join(PARTS)}, not {name!r}")
    return Look(_SPARE_COLORS[spare % len(_SPARE_COLORS)], hatch=_SPARE_HATCHES[spare % len(_SPARE_HATCHES)])


def breakdown_bars(
    bars: Mapping[str, Any],
    *,
    unit: str | None = None,
    measured: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
    axes: Any = None,
    legend: bool = True,
) -> Any:
    """Draw one stacked bar for each of `bars`, from a label to its parts; returns the matplotlib figure.

    The parts are a `Breakdown`, a reading of `lab.memory` (``memory.now``, ``memory.at_peak``), or a mapping from names
    to numbers; parts that are 0 are left out. The total stands behind each bar.

    `unit` is ``"B"``, ``"kB"``, ``"MB"``, ``"GB"``, ``"TB"`` or ``"KiB"`` to ``"TiB"`` for parts in bytes (default:
    the power of 1000 that fits); any other words name what the parts are counted in, and they are drawn as they are
    (``"bytes a parameter"``). `measured` maps labels of bars to totals that somebody measured: a marker each, in the
    same axes as the theory. `limits` maps names to amounts that are drawn as a line across, such as the memory of a
    device. `axes` draws into existing axes.

    Raises ``ValueError`` for no bars, parts that are negative or not finite, and a measurement without its bar.
    """
    parts = {str(label): _parts(label, given) for label, given in bars.items()}
    _check(parts, measured or {}, limits or {})
    totals = {label: sum(own.values()) for label, own in parts.items()}
    longest = max([*totals.values(), *(measured or {}).values(), *(limits or {}).values()])
    name, scale = _unit(unit, longest)
    looks = _looks(part for own in parts.values() for part in own)
    with style.context():
        if axes is None:
            axes = _new_axes(len(parts), len(looks) if legend else 0)
        _draw(axes, parts, looks, scale, longest * _SHOWN_FROM)
        _add_totals(axes, totals, measured or {}, list((limits or {}).values()), scale, longest)
        _add_limits(axes, limits or {}, scale)
        axes.set_xlim(0, longest / scale * 1.16)
        axes.set_xlabel(f"memory ({name})" if name in _UNITS else name)
        if legend:
            seen = [part for part in looks if any(own.get(part, 0) > longest * _SHOWN_FROM for own in parts.values())]
            _add_legend(axes, {part: looks[part] for part in seen}, bool(measured))
    axes.set_label(_caption(parts, totals, name, scale))
    figure = axes.figure
    if not figure.get_label():
        figure.set_label(axes.get_label())
    return figure


def _parts(label: str, given: Any) -> dict[str, float]:
    found = given
    if not isinstance(given, Mapping):
        found = given.as_dict() if hasattr(given, "as_dict") else getattr(given, "parts", None)
    if not isinstance(found, Mapping):
        raise ValueError(f"bars[{label!r}] must be a Breakdown or a mapping from names to numbers, not {given!r}")
    return {str(name).replace("_", " "): value for name, value in found.items() if value}


def _check(parts: Mapping[str, dict[str, float]], measured: Mapping[str, float], limits: Mapping[str, float]) -> None:
    if not parts or not any(parts.values()):
        raise ValueError("bars must hold one part at least")
    numbers = {f"bars[{label!r}][{name!r}]": value for label, own in parts.items() for name, value in own.items()}
    numbers |= {f"measured[{label!r}]": value for label, value in measured.items()}
    numbers |= {f"limits[{label!r}]": value for label, value in limits.items()}
    for where, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{where} must be a finite number of at least 0, not {value!r}")
    if not max(numbers.values()):
        raise ValueError("bars must hold one part above 0 at least")
    for label in measured:
        if label not in parts:
            raise ValueError(f"measured must name bars ({', '.join(parts)}), not {label!r}")


def _unit(unit: str | None, longest: float) -> tuple[str, float]:
    if unit is None:
        unit = next((name for name in ("TB", "GB", "MB", "kB") if longest >= _UNITS[name]), "B")
    return unit, _UNITS.get(unit, 1)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ").strip().lower()


def _looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each of `names`, once each: those with a meaning in the order of the book, the others as they come."""
    known, once = list(PARTS), list(dict.fromkeys(names))
    unknown = [name for name in once if _words(name) not in PARTS]
    once.sort(key=lambda name: known.index(_words(name)) if name not in unknown else len(known))
    return {name: part_look(name, spare=unknown.index(name) if name in unknown else None) for name in once}


def _new_axes(num_bars: int, num_parts: int) -> Any:
    from matplotlib.figure import Figure  # not pyplot: a notebook would show the figure a second time

    return Figure(figsize=(6.4, 0.9 + 0.42 * num_bars + 0.24 * -(-num_parts // 3))).subplots()


def _bar(look: Look) -> dict[str, Any]:
    return {"facecolor": look.color, "edgecolor": style.INK, "hatch": look.hatch, "linewidth": 0.5}


def _draw(
    axes: Any, parts: Mapping[str, dict[str, float]], looks: Mapping[str, Look], scale: float, hairline: float
) -> None:
    for row, own in enumerate(parts.values()):
        left = 0.0
        for name, value in own.items():
            if value > hairline:
                axes.barh(row, value / scale, left=left, height=0.66, **_bar(looks[name]))
            left += value / scale
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_yticks(range(len(parts)), list(parts))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _add_totals(
    axes: Any, totals: Mapping[str, float], measured: Mapping[str, float], limits: list[float], scale: float,
    longest: float,
) -> None:  # fmt: skip
    rows = {label: row for row, label in enumerate(totals)}
    if measured:
        xs, ys = [value / scale for value in measured.values()], [rows[label] for label in measured]
        axes.plot(xs, ys, linestyle="none", marker="D", markersize=7, markerfacecolor="none", markeredgewidth=1.8,
                  color=style.INK)  # fmt: skip
    for label, total in totals.items():
        right = max(total, measured.get(label, 0)) + longest * (0.022 if label in measured else 0.012)
        for limit in sorted(limits):  # a line across does not strike the number through
            if right - longest * 0.012 < limit < right + longest * _NUMBER:
                right = limit + longest * 0.012
        axes.text(right / scale, rows[label], f"{total / scale:.4g}", va="center", ha="left", fontsize=9.5)


def _add_limits(axes: Any, limits: Mapping[str, float], scale: float) -> None:
    for name, value in limits.items():
        axes.axvline(value / scale, color=style.INK, linestyle=(0, (5, 2)), linewidth=1.4)
        axes.text(value / scale, 1.01, name, transform=axes.get_xaxis_transform(), va="bottom", ha="center", fontsize=9)


def _add_legend(axes: Any, looks: Mapping[str, Look], measured: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(label=name, **_bar(look)) for name, look in looks.items()]
    if measured:
        handles.append(Line2D([], [], label="measured", linestyle="none", marker="D", markerfacecolor="none",
                              color=style.INK))  # fmt: skip
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=2.2, handleheight=1.1)


def _caption(parts: Mapping[str, dict[str, float]], totals: Mapping[str, float], unit: str, scale: float) -> str:
    said = [
        f"{label}: {totals[label] / scale:.4g} ("
        + ", ".join(f"{name} {value / scale:.4g}" for name, value in own.items())
        + ")"
        for label, own in parts.items()
    ]
    return f"stacked bars, {unit}; " + "; ".join(said)
