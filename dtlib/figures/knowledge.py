"""Who knows what: the contributions that each rank holds of each chunk, as a collective goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import style


def knowledge(
    history: ArrayLike, *, names: Sequence[str], labels: Sequence[str] | None = None, columns: int = 4
) -> Any:
    """Draw what ranks hold step by step; returns the matplotlib figure.

    `history` is an array [step, rank, chunk, contributor], as ``theory.collectives.contributions`` makes it.
    Each step is a panel with a row for each rank and a box for each chunk; a box has one bar for each
    contributor, full height where its value is inside once, overflowing in the look of a mistake where it is
    inside more often. `names` gives for each step the thing whose colour it has (``"reduce-scatter"``),
    `labels` what stands under it. Raises ``ValueError`` for an array of another shape or lists of another
    length.
    """
    held = np.asarray(history)
    if held.ndim != 4 or held.shape[1] != held.shape[3]:
        raise ValueError(f"history must be an array [step, rank, chunk, contributor], not of shape {held.shape}")
    labels = [f"step {step}" for step in range(len(held))] if labels is None else labels
    if len(names) != len(held) or len(labels) != len(held):
        raise ValueError(f"names and labels must have one entry for each of the {len(held)} steps")
    import matplotlib.pyplot as plt

    rows = math.ceil(len(held) / columns)
    with style.context():
        figure, grid = plt.subplots(
            rows, columns, figsize=(1.75 * columns, 1.95 * rows), squeeze=False, sharex=True, sharey=True
        )
        for axes in grid.flat:
            axes.axis("off")
        for axes, panel, name, label in zip(grid.flat, held, names, labels, strict=False):
            _panel(axes, panel, name)
            axes.text(0.5, -0.02, label, transform=axes.transAxes, ha="center", va="top", fontsize=9)
        plt.close(figure)
    figure.set_label(
        f"what {held.shape[1]} ranks hold of {held.shape[2]} chunks after each of {len(held) - 1} steps; "
        f"at the end {np.count_nonzero((held[-1] == 1).all(axis=-1))} of {held.shape[1] * held.shape[2]} are complete"
    )
    return figure


def _panel(axes: Any, panel: Any, name: str) -> None:
    num_ranks, num_chunks, num_contributors = panel.shape
    color, wrong = style.color(name), style.color("all-reduce")
    for rank in range(num_ranks):
        for chunk in range(num_chunks):
            left, bottom = chunk + 0.06, num_ranks - 1 - rank + 0.1
            complete = (panel[rank, chunk] == 1).all()
            axes.add_patch(_box(left, bottom, 0.88, 0.8, style.INK, 1.6 if complete else 0.5))
            width = 0.88 / num_contributors
            for contributor, times in enumerate(panel[rank, chunk]):
                if times:
                    look = (color, None) if times == 1 else (wrong, "xx")
                    axes.add_patch(_bar(left + contributor * width, bottom, width, 0.8, *look))
        axes.text(-0.12, num_ranks - 0.5 - rank, str(rank), ha="right", va="center", fontsize=8)
    axes.set(xlim=(-0.4, num_chunks), ylim=(0, num_ranks), aspect="equal")


def _box(left: float, bottom: float, width: float, height: float, color: str, linewidth: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), width, height, fill=False, edgecolor=color, linewidth=linewidth, zorder=3)


def _bar(left: float, bottom: float, width: float, height: float, color: str, hatch: str | None) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (left + 0.12 * width, bottom + 0.06), 0.76 * width, height - 0.12,
        facecolor=color, edgecolor=style.INK, linewidth=0, hatch=hatch,
    )  # fmt: skip
