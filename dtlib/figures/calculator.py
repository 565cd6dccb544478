"""A sum of parts over choices, on a page without Python: what a rank keeps in memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from dtlib.theory.units import format_bytes

from . import control
from .breakdown import part_look

_MAX_NUMBERS = 20_000  # in a page's JSON: some 200 kB
_LABELS = {"zero": "ZeRO stage", "device": "card"}
"""What stands beside a control, where the argument's name does not say it."""


def calculator(
    fn: Callable[..., Mapping[str, float]],
    choices: Mapping[str, Sequence[Any]],
    *,
    start: Mapping[str, Any],
    limits: Mapping[str, float],
    limit: str,
    kept_free: float = 0.1,
    caption: str = "",
) -> Calculator:
    """``fn(**choice)`` gives bytes by part; a reader chooses, and sees the parts, their sum, and whether it fits.

    Every combination of `choices` is computed now and travels inside the page, a part only along the choices on which
    it depends. `start` is the combination that is shown first, `limits` are the devices that can be chosen, `limit` the
    first of them, and `kept_free` the share of a device that is not to be used. The same controls work in JupyterLab.

    ``ValueError`` where a choice has no values or `start` is none of them, for another `limit`, for parts that are not
    the same everywhere, and for more than 20,000 numbers.
    """
    for name, values in choices.items():
        if not values or start.get(name) not in values:
            raise ValueError(f"start must have one of {list(values)} for {name}, not {start.get(name)!r}")
    if limit not in limits:
        raise ValueError(f"limit must be one of {', '.join(limits)}, not {limit!r}")
    given = Calculator(
        fn,
        {name: list(values) for name, values in choices.items()},
        dict(start),
        dict(limits),
        limit,
        kept_free,
        caption,
    )
    size = sum(table.size for table in given.tables.values())
    if size > _MAX_NUMBERS:
        raise ValueError(f"choices must give at most {_MAX_NUMBERS} numbers, not {size}")
    return given


@dataclass(eq=False)
class Calculator:
    """What :func:`calculator` returns: shows itself as HTML."""

    fn: Callable[..., Mapping[str, float]]
    choices: dict[str, list[Any]]
    start: dict[str, Any]
    limits: dict[str, float]
    limit: str
    kept_free: float
    caption: str

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """The bytes of each part, an axis a choice: of length 1 where the part does not depend on it."""
        sizes = [len(values) for values in self.choices.values()]
        found: dict[str, np.ndarray] = {}
        for place in np.ndindex(*sizes):
            chosen = {name: values[k] for (name, values), k in zip(self.choices.items(), place, strict=True)}
            parts = self.fn(**chosen)
            found = found or {part: np.zeros(sizes) for part in parts}
            if list(parts) != list(found):
                raise ValueError(f"fn must return the same parts everywhere, not {list(parts)} at {chosen}")
            for part, value in parts.items():
                found[part][place] = value
        return {part: _squeezed(table) for part, table in found.items() if table.any()}

    def parts(self, **chosen: Any) -> dict[str, float]:
        """The bytes of each part that is not zero everywhere, for a choice."""
        places = [self.choices[name].index(chosen[name]) for name in self.choices]
        return {part: float(table[_within(table, places)]) for part, table in self.tables.items()}

    def html(self) -> str:
        """The fragment of a page: controls, the parts and their sum for the first choice, and the script."""
        data = {
            "choices": [[str(value) for value in values] for values in self.choices.values()],
            "parts": [[list(table.shape), [int(each) for each in table.flat]] for table in self.tables.values()],
            "limits": list(self.limits.values()), "free": self.kept_free,
        }  # fmt: skip
        named = {**self.choices, "device": list(self.limits)}
        first = {**self.start, "device": self.limit}
        controls = "".join(
            control.select(name, _LABELS.get(name, name), values, first[name]) for name, values in named.items()
        )
        parts = self.parts(**self.start)
        total = sum(parts.values())
        colors = {part: part_look(part, spare=number).color for number, part in enumerate(parts)}
        rows = "".join(
            f'<tr><th scope="row"><i style="background:{colors[part]}"></i>{escape(part)}</th>'
            f'<td>{format_bytes(value)}</td><td class="bar"><span style="background:{colors[part]}"></span></td></tr>'
            for part, value in parts.items()
        )
        body = (
            f"<form>{controls}</form>"
            f'<table><tbody>{rows}</tbody><tfoot><tr><th scope="row">in all</th><td>{format_bytes(total)}</td>'
            f'<td></td></tr></tfoot></table><p class="verdict" aria-live="polite">{self.verdict(total)}</p>'
        )
        return control.figure("calculator", body + control.NO_SCRIPT, data, caption=self.caption)

    def verdict(self, total: float) -> str:
        """Whether it fits into the first device, in words."""
        memory = self.limits[self.limit]
        usable = (1 - self.kept_free) * memory
        fits = "It fits" if total <= usable else "It does not fit"
        left = f"{format_bytes(abs(usable - total), digits=3)} {'are left' if total <= usable else 'are missing'}"
        return f"{fits}: {self.kept_free:.0%} of {format_bytes(memory, digits=3)} kept free, {left}."

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        """Name the choices, for a terminal."""
        return f"<calculator: {', '.join(self.tables)} by {', '.join(self.choices)}>"


def _squeezed(table: np.ndarray) -> np.ndarray:
    for axis in range(table.ndim):
        first = table.take([0], axis)
        table = first if (table == first).all() else table
    return table


def _within(table: np.ndarray, places: Sequence[int]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else place for size, place in zip(table.shape, places, strict=True))
