"""Who holds what: matrices beside each other, each entry in the look of the rank that has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import style

EVERY = -1
"""An entry that every rank holds."""
ADDENDS = -2
"""An entry of which every rank holds an addend: the ranks' values have to be added up."""
NOBODY = -3
"""An entry that no rank has: nothing is drawn."""


def owners(matrices: Mapping[str, ArrayLike], *, columns: int | None = None, box: float = 0.17) -> Any:
    """Draw matrices by who holds their entries; returns the matplotlib figure.

    `matrices` maps what stands under each to a matrix of whole numbers: the rank that holds the entry, `EVERY`, or
    `ADDENDS`, or `NOBODY`. `columns` of them stand in a row (by default all), `box` is the side of an entry in inches.
    ``ValueError`` for something that is no matrix, or for a number below `NOBODY`.
    """
    held = {label: _checked(label, matrix) for label, matrix in matrices.items()}
    ranks = sorted({int(rank) for matrix in held.values() for rank in np.unique(matrix) if rank >= 0})
    import matplotlib.pyplot as plt

    per_row = columns or len(held)
    rows = [list(held.items())[first : first + per_row] for first in range(0, len(held), per_row)]
    gap = 2.2  # boxes between two matrices
    width = max(sum(matrix.shape[1] + gap for _, matrix in row) for row in rows) + 0.5
    height = sum(max(matrix.shape[0] for _, matrix in row) + 2.2 for row in rows) + 1.4
    with style.context():
        figure, axes = plt.subplots(figsize=(box * width, box * height))
        top = 0.0
        for row in rows:
            tallest, left = max(matrix.shape[0] for _, matrix in row), 0.5
            for label, matrix in row:
                bottom = top - tallest / 2 - matrix.shape[0] / 2
                for (i, j), rank in np.ndenumerate(matrix):
                    if rank != NOBODY:
                        axes.add_patch(_entry(left + j, bottom + matrix.shape[0] - 1 - i, int(rank)))
                middle = left + matrix.shape[1] / 2
                axes.text(middle, top - tallest - 0.35, label, ha="center", va="top", fontsize=9)
                left += matrix.shape[1] + gap
            top -= tallest + 2.2
        axes.set(xlim=(0, width), ylim=(top - 1.4, 0.3), aspect="equal")
        axes.axis("off")
        shown = [number for matrix in held.values() for number in np.unique(matrix)]
        kinds = [*ranks, *(kind for kind in (EVERY, ADDENDS) if kind in shown)]
        axes.legend(
            [_entry(0, 0, kind) for kind in kinds], [_NAMES.get(kind, f"rank {kind}") for kind in kinds],
            loc="lower center", ncols=len(kinds), fontsize=9, handlelength=1.1, handleheight=1.1, columnspacing=1.2,
        )  # fmt: skip
        plt.close(figure)
    figure.set_label("; ".join(f"{label}: {_in_words(matrix)}" for label, matrix in held.items()))
    return figure


_NAMES = {EVERY: "every rank", ADDENDS: "an addend on each rank", NOBODY: "nobody"}
_HATCHES = ("", "///", "|||", "\\\\\\", "xxx", "---", "+++", "//||")  # lines: a dot is eight curves in SVG


def _checked(label: str, matrix: ArrayLike) -> NDArray[np.int64]:
    found = np.asarray(matrix)
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.integer) or found.min(initial=0) < NOBODY:
        raise ValueError(f"matrices must have two dimensions of ranks, EVERY, ADDENDS or NOBODY; {label!r} does not")
    return found.astype(np.int64)


def _entry(left: float, bottom: float, rank: int) -> Any:
    from matplotlib.patches import Rectangle

    look: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 0.5}
    if rank == EVERY:
        return Rectangle((left, bottom), 1, 1, facecolor="none", **look)
    if rank == ADDENDS:
        known = style.look("all-reduce")
        return Rectangle((left, bottom), 1, 1, facecolor="none", hatch="+++", **look | {"edgecolor": known.color})
    color = style.look(f"rank {rank}", spare=rank).color
    return Rectangle((left, bottom), 1, 1, facecolor=color, hatch=_HATCHES[rank % len(_HATCHES)], **look)


def _in_words(matrix: NDArray[np.int64]) -> str:
    numbers, counts = np.unique(matrix, return_counts=True)
    return ", ".join(
        f"{count} of {matrix.size} entries on {_NAMES.get(int(number), f'rank {number}')}"
        for number, count in zip(numbers, counts, strict=True)
    )
