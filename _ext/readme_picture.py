"""Draw the README's picture from a fresh measurement: ``python _ext/readme_picture.py FILE.svg``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt

from dtlib import figures, lab
from dtlib.theory.collectives import ring_all_reduce_bytes
from dtlib.theory.units import MiB


def all_reduce() -> int:
    """The bytes that all ranks together send for the all-reduce of one mebibyte."""
    gradient = torch.ones(MiB // torch.float32.itemsize)
    with lab.wire() as wire:
        dist.all_reduce(gradient)
    return wire.total_bytes


def main(file: str) -> None:
    """Measure for 2 to 8 ranks, draw, save."""
    ranks = list(range(2, 9))
    measured = [lab.run(all_reduce, n)[0] for n in ranks]
    figures.style.use()
    figure, axes = plt.subplots(figsize=(7, 3.2))
    figures.style.line(
        axes, ranks, [n * ring_all_reduce_bytes(MiB, n) / MiB for n in ranks], "ring", label="ring, theory"
    )
    figures.style.markers(axes, ranks, [b / MiB for b in measured], "ring", label="gloo's all-reduce, measured")
    axes.set_xlabel("ranks")
    axes.set_ylabel("bytes on the wire (MiB)")
    axes.legend()
    row = lab.check(
        "collectives.ring_all_reduce_bytes",
        theory=8 * ring_all_reduce_bytes(MiB, 8),
        measured=measured[-1],
        by="wire",
        rtol=0.01,
    )
    figure.text(0.0, -0.14, str(row).replace(": ", ":\n  ", 1), family="monospace", fontsize=9)
    figure.savefig(file, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1])
