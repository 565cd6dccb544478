"""A pipeline to play with: a schedule's time grid, its bubble and its memory, on a page without Python too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtlib.theory.pp import Schedule

from . import control

_LEFT, _WIDTH, _ROW = 50, 586, 28  # of a picture 640 wide
_PRICES = {
    "input": ("gradient of the input", 2, 1.0),
    "weight": ("gradient of the weights", 2, 1.0),
    "message": ("message", 1, 0.0),
}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_KEY = {"F": "forward", "B": "backward, both gradients", "I": "gradient of the input", "W": "gradient of the weights"}
_CHUNKS = "3 is micro-batch 3 in a rank's first chunk, 3′ in its second, 3″ in its third"

Generator = Callable[[int, int], Schedule]
"""Gives the schedule of p ranks and m micro-batches; a ``ValueError`` says why there is none."""


def pipeline(
    schedules: Mapping[str, Mapping[int, Generator]], *, ranks: Sequence[int] = (2, 4, 6, 8),
    micro_batches: Sequence[int] = (4, 8, 12, 16),
) -> Pipeline:  # fmt: skip
    """Schedules to choose from, with the numbers of ranks, micro-batches and chunks, and what each action costs.

    `schedules` maps a name to its generators by the number of chunks v. Every choice of `ranks` p, of `micro_batches`
    m and of v is generated now and travels inside the page as orders of actions; when each begins is computed there,
    for a forward pass of one rank's layers as the unit, and gradients and messages at the prices that are set. What a
    generator refuses is shown with its reason. In JupyterLab the same controls work on the same data.

    ``ValueError`` for no schedules, and for p or m of more than 36, which one digit has to hold.
    """
    if not schedules or not all(schedules.values()):
        raise ValueError("schedules must map each name to generators by their number of chunks, and none is there")
    for argument, numbers in (("ranks", ranks), ("micro_batches", micro_batches)):
        if not numbers or not all(1 <= each <= len(_DIGITS) for each in numbers):
            raise ValueError(f"{argument} must be numbers from 1 to {len(_DIGITS)}, not {numbers!r}")
    found = {
        name: {
            v: {f"{p} {m}": _orders(generate, p, m) for p in ranks for m in micro_batches}
            for v, generate in by_v.items()
        }
        for name, by_v in schedules.items()
    }
    return Pipeline(found, list(ranks), list(micro_batches))


@dataclass(eq=False)
class Pipeline:
    """What :func:`pipeline` returns: shows itself as HTML, `schedules[name][v]["p m"]` being orders or a reason."""

    schedules: dict[str, dict[int, dict[str, Any]]]
    ranks: list[int]
    micro_batches: list[int]

    def html(self) -> str:
        """The fragment of a page: controls, picture, readings and all orders; it needs nothing else."""
        chunks = sorted({v for by_v in self.schedules.values() for v in by_v})
        choices = (("schedule", "schedule", list(self.schedules), 0), ("p", "ranks p", self.ranks, 1),
                   ("m", "micro-batches m", self.micro_batches, 1), ("v", "chunks v", chunks, 0))  # fmt: skip
        selects = "".join(
            control.select(name, label, options, options[min(first, len(options) - 1)])
            for name, label, options, first in choices
        )
        prices = "".join(_price(name, *each) for name, each in _PRICES.items())
        key = " ".join(
            f'<span data-kind="{kind}"><svg viewBox="0 0 16 12"><rect class="{kind}" width="16" height="12"/></svg> '
            f"{text}</span>"
            for kind, text in _KEY.items()
        )
        key += f'<span data-kind="chunk"> {_CHUNKS}</span>'
        body = (
            f'<div class="controls">{selects}</div><div class="controls">{prices}</div>'
            f'<noscript><p>The controls need JavaScript.</p></noscript><p class="refused" aria-live="polite"></p>'
            '<div class="shown"><div class="scroll">'
            '<svg role="img" aria-label="time grid"><g class="bars"></g></svg></div>'
            f'<p class="key">{key}</p>'
            '<p aria-live="polite">From the first start to the last end, as with a barrier before the optimizer: '
            '<b class="span"></b> forward passes, of which the bubble is <b class="bubble"></b>. From its own first '
            'action to its own last, the longest rank: <b class="own"></b>, idle <b class="waits"></b>. A rank holds '
            'at most, in activations of its layers for a micro-batch: <b class="held"></b>.</p>'
            "</div>"
        )
        return control.figure("pipeline", body, {"schedules": self.schedules}, width=_WIDTH, left=_LEFT, row=_ROW)

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        """The names, for a terminal."""
        return f"<pipeline: {', '.join(self.schedules)}>"


def _orders(generate: Generator, p: int, m: int) -> dict[str, Any] | str:
    """The orders of actions as text, three characters each: kind, stage and micro-batch; or why there is none."""
    try:
        schedule = generate(p, m)
    except ValueError as refused:
        return str(refused)
    return {
        "placed": list(schedule.placed),
        "ranks": [
            "".join(f"{kind}{_DIGITS[stage]}{_DIGITS[batch]}" for kind, stage, batch, _ in own)
            for own in schedule.actions
        ],
    }


def _price(name: str, label: str, most: float, start: float) -> str:
    return (
        f'<label>{label} <input type="range" name="{name}" min="0" max="{most}" step="0.05" value="{start}" '
        f'aria-valuetext="{start:.2f} forward passes" autocomplete="off" disabled><output>{start:.2f}</output></label>'
    )
