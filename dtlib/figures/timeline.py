"""Timelines: who does what, when. Measured ones of `lab.timeline`, simulated ones of a schedule, in one
look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtlib.theory.units import format_count

from . import style

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_HAIRLINE = 1 / 1500  #: of the width: a narrower pause between two bars of one name cannot be seen


@dataclass(frozen=True)
class Bar:
    """One thing that goes on from `start` to `end`.

    `name` chooses the look (``"forward"``, ``"all-reduce, bucket 2"``), `lane` which strip of the row it lies
    in, `text` what is written on it (a micro-batch number).
    """

    name: str
    start: float
    end: float
    lane: str = ""
    text: str = ""


def timeline(rows: Any, *, unit: str | None = None, axes: Any = None, legend: bool | Sequence[str] = True) -> Any:
    """Draw what goes on in each row over time; returns the matplotlib figure.

    `rows` is what `lab.timeline` recorded (the timeline of a rank, a list of them, or merged ones), drawn
    from the moment the first rank began; or a mapping from the label of a row to the timeline of a rank, drawn
    from its own beginning, or to bars (`Bar`, or tuples in the order of its fields), as a simulated schedule has
    them. Lanes of a row lie below each other in the order of their first bar, computing above communicating; bars
    of a lane that overlap get a strip each.

    `unit` is ``"s"``, ``"ms"`` or ``"µs"`` for times in seconds (default: what fits), or any other word for
    times that are drawn as they are (``"forward passes"``). `axes` draws into existing axes, and `legend` says whether
    the looks are explained above, or which names are, where several axes share one legend. Raises ``ValueError`` for
    rows without a bar and for a bar that ends before it starts.
    """
    labelled = _rows(rows)
    bars = [bar for own in labelled.values() for bar in own]
    if not bars:
        raise ValueError("rows must hold one bar at least")
    for bar in bars:
        if not bar.start <= bar.end:
            raise ValueError(f"rows must hold bars that start before they end, not {bar}")
    last = max(bar.end for bar in bars)
    name, scale = _unit(unit, last)
    strips = [_strips(own, last * _HAIRLINE) for own in labelled.values()]
    with style.context():
        if axes is None:
            axes = _new_axes(sum(max(len(own), 1) for own in strips) + _gap(strips) * len(strips))
        named = [bar.name for bar in bars] if isinstance(legend, bool) else legend
        _draw(axes, list(labelled), strips, scale, named if legend else [])
        axes.set_xlim(min(0.0, *(bar.start / scale for bar in bars)), last / scale)
        axes.set_xlabel(f"time ({name})")
    axes.set_label(_in_words(labelled, last, name, scale))
    figure = axes.figure
    if not figure.get_label():
        kinds = ", ".join(_heads(bar.name for bar in bars))
        figure.set_label(f"timeline of {format_count(len(labelled), 'row')} over {last / scale:.3g} {name}: {kinds}")
    return figure


def _in_words(rows: Mapping[str, Sequence[Bar]], last: float, unit: str, scale: float) -> str:
    """How long each thing goes on in each row, what number stands on its boxes, and for which share nothing goes on."""
    told: dict[str, list[str]] = {}
    for label, bars in rows.items():
        lasting: dict[str, float] = {}
        for bar in filter(_is_work, bars):
            head = bar.name.split(",")[0].strip()
            lasting[head] = lasting.get(head, 0) + (bar.end - bar.start) / scale
        parts = [f"{head} {lasting[head]:.3g}" for head in _heads(lasting)]
        parts.append(f"idle {1 - _busy(bars) / last:.1%}" if last else "")
        told.setdefault(", ".join(filter(None, parts)), []).append(label)
    idle = 1 - sum(map(_busy, rows.values())) / last / len(rows) if last else 0
    numbers = {int(text) for bars in rows.values() for bar in bars if (text := bar.text.rstrip("′″‴")).isdecimal()}
    numbered = f", boxes {min(numbers)} to {max(numbers)}" if numbers else ""
    each = "; ".join(f"{' and '.join(labels) if len(labels) < 3 else f'{labels[0]} to {labels[-1]}'}: {said}"
                     for said, labels in told.items())  # fmt: skip
    return f"{format_count(len(rows), 'row')} over {last / scale:.3g} {unit}{numbered}, idle {idle:.1%} in all; {each}"


def _busy(bars: Sequence[Bar]) -> float:
    """For how long something other than waiting goes on."""
    total = until = 0.0
    for bar in sorted(filter(_is_work, bars), key=lambda bar: bar.start):
        if bar.end > until:
            total += bar.end - max(bar.start, until)
            until = bar.end
    return total


def _is_work(bar: Bar) -> bool:
    return style.look(bar.name, spare=0) is not style.LOOKS["idle"]


def _rows(rows: Any) -> dict[str, list[Bar]]:
    if isinstance(rows, Mapping):
        return {
            str(label): _bars(own, own.start_seconds)
            if hasattr(own, "intervals")
            else [bar if isinstance(bar, Bar) else Bar(*bar) for bar in own]
            for label, own in rows.items()
        }
    recorded = list(getattr(rows, "ranks", [rows] if hasattr(rows, "intervals") else rows))
    if not all(hasattr(each, "intervals") for each in recorded):
        raise ValueError(f"rows must be timelines or a mapping from labels to bars, not {rows!r}")
    if not recorded:
        return {}
    zero = min(each.start_seconds for each in recorded)
    return {f"rank {each.rank}": _bars(each, zero) for each in sorted(recorded, key=lambda each: each.rank)}


def _bars(recorded: Any, zero: float) -> list[Bar]:
    order = {"compute": 0, "communication": 1}
    intervals = sorted(recorded.intervals, key=lambda i: (order.get(i.kind, 2), i.start_seconds))
    return [Bar(i.name, i.start_seconds - zero, i.end_seconds - zero, i.kind) for i in intervals]


def _unit(unit: str | None, last: float) -> tuple[str, float]:
    if unit is None:
        return next(((name, scale) for name, scale in _UNITS if last >= scale), _UNITS[-1])
    return unit, dict(_UNITS).get(unit, 1.0)


def _strips(bars: Sequence[Bar], hairline: float) -> list[list[Bar]]:
    """The bars of a row in strips, top to bottom: lanes in order, each with a strip for what overlaps."""
    strips: list[list[Bar]] = []
    for lane in dict.fromkeys(bar.lane for bar in bars):
        own: list[list[Bar]] = []
        for bar in sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: (bar.start, bar.end)):
            free = next((strip for strip in own if strip[-1].end <= bar.start + 1e-12), None)
            if free is None:
                own.append([bar])
            elif _continues(free[-1], bar, hairline):
                free[-1] = Bar(bar.name, free[-1].start, bar.end, lane)
            else:
                free.append(bar)
        strips += own
    return strips


def _continues(before: Bar, bar: Bar, hairline: float) -> bool:
    return before.name == bar.name and not before.text and not bar.text and bar.start - before.end <= hairline


def _new_axes(num_strips: float) -> Any:
    from matplotlib.figure import Figure  # not pyplot: a notebook would show the figure a second time

    return Figure(figsize=(6.4, 1.0 + 0.24 * num_strips)).subplots()


def _gap(strips: list[list[list[Bar]]]) -> float:
    """The space between rows, in strips: little where every row is one strip, as in the grid of a schedule."""
    return 0.15 if all(len(own) <= 1 for own in strips) else 0.6


def _draw(axes: Any, labels: list[str], strips: list[list[list[Bar]]], scale: float, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    top, ticks = 0.0, []
    for own in strips:
        ticks.append(top + max(len(own), 1) / 2)
        for strip in own or [[]]:
            alike: dict[str, list[Bar]] = {}
            for bar in strip:
                alike.setdefault(str(_look(bar.name)), []).append(bar)
            for bars in alike.values():
                spans = [(bar.start / scale, (bar.end - bar.start) / scale) for bar in bars]
                axes.broken_barh(spans, (top + 0.06, 0.88), **_look(bars[0].name))
            for bar in strip:
                if bar.text:
                    middle = (bar.start + bar.end) / 2 / scale
                    axes.text(middle, top + 0.52, bar.text, ha="center", va="center", fontsize=8, color="white")
            top += 1
        top += _gap(strips)
    axes.set_ylim(top - _gap(strips), 0)
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    if names:
        entries: dict[str, list[str]] = {}
        for head in _heads(names):
            entries.setdefault(str(_look(head)), []).append(head)
        handles = [Patch(label=" or ".join(heads), **_look(heads[0])) for heads in entries.values()]
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)


def _look(name: str) -> dict[str, Any]:
    return {**style.bar(name), "linewidth": 0.4}


def _heads(names: Iterable[str]) -> list[str]:
    """What the names say before the first comma, each once, in the order of the book's looks."""
    known = list(style.LOOKS)
    heads = dict.fromkeys(name.split(",")[0].strip() for name in names)
    return sorted(heads, key=lambda head: known.index(head) if head in known else len(known))
