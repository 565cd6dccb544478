"""Activations of one layer in closed form, as Korthikanti et al. count them.

2 bytes an element, 1 byte an element of a dropout mask, a GPT with dropout and an MLP of width 4h; buffers that are
small beside these (a norm's means, one number a token) are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import checked_recompute
from dtlib.theory.valid import amount, at_most, whole


@formula(
    "activations.layer_bytes",
    equation=r"s\,b\,h\,\Bigl(34 + 5\,\frac{a\,s}{h}\Bigr)",
    source="korthikanti2023",
    label="thm-activations-layer",
)
def layer_bytes(
    seq: int,
    micro_batch: int,
    hidden: int,
    num_heads: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Activations of a layer.

    Bytes that one rank keeps for the backward pass.
    s b h (34 + 5 a s/h) on one rank: 11 s b h and 5 a s² b for attention, 19 s b h for the MLP, 4 s b h for the norms.
    On t ranks s b h (10 + 24/t + 5 a s/(h t)): what lies outside the split matrices is on every rank. With sequence
    parallelism all of it is split: s b h/t (34 + 5 a s/h). A selective recompute leaves out the terms in s², a full one
    keeps the layer's input alone: 2 s b h, split by sequence parallelism as well. ``ValueError`` for sizes below 1 or
    another `recompute`. Source: Korthikanti et al. 2022, arXiv 2205.05198, equations 1, 2 and 4, Table 2.
    """
    s, b, h = whole("seq", seq, 1), whole("micro_batch", micro_batch, 1), whole("hidden", hidden, 1)
    a, t = whole("num_heads", num_heads, 1), whole("tp", tp, 1)
    outside = t if sequence_parallel else 1
    if checked_recompute(recompute) == "full":
        return 2 * s * b * h / outside
    core = 5 * a * s / h if recompute == "none" else 0
    return s * b * h * (10 / outside + 24 / t + core / t)


@formula(
    "activations.first_stage_layers",
    equation=r"1 + \frac{p-1}{p\,v}",
    source="korthikanti2023",
    label="eq-activations-pipeline",
)
def first_stage_layers(stages: int, chunks: int = 1) -> float:
    """Layers whose activations the first stage keeps, as a multiple of l.

    1F1B keeps p micro-batches of l/p layers: 1. Interleaving v chunks a rank keeps 1 + (p − 1)/(p v). ``ValueError``
    for counts below 1. Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3.
    """
    p, v = whole("stages", stages, 1), whole("chunks", chunks, 1)
    return 1 + (p - 1) / (p * v) if v > 1 else 1.0


@formula(
    "activations.checkpointed_bytes",
    equation=r"\Bigl(\frac lk - 1\Bigr)\, i + k\,A",
    source="chen2016",
    label="thm-activations-peak",
)
def checkpointed_bytes(num_layers: int, every: int, layer_bytes: float, input_bytes: float) -> float:
    """Peak of the activations with a checkpoint every k layers.

    (l/k − 1) i + k A where k divides l: the inputs of all segments (`input_bytes` i each) stay, and the last segment is
    computed again, with the activations A (`layer_bytes`) of each of its k layers; the first of these is its own
    checkpoint. Where k does not divide l, the last segment has r < k layers, and the peak is the larger of
    (⌈l/k⌉ − 1) i + r A, reached there, and (⌈l/k⌉ − 2) i + k A, reached in the segment before. k = 1 is a full
    recompute layer by layer. `every` is at most `num_layers`. ``ValueError`` for sizes out of range.
    """
    l, k = whole("num_layers", num_layers, 1), whole("every", every, 1)
    layer_bytes = amount("layer_bytes", layer_bytes)
    input_bytes = amount("input_bytes", input_bytes)
    if k > l:
        raise ValueError(f"every must be at most num_layers={l}, not {k}")
    segments = math.ceil(l / k)
    last = (segments - 1) * input_bytes + (l - k * (segments - 1)) * layer_bytes
    return last if l % k == 0 else max(last, (segments - 2) * input_bytes + k * layer_bytes)


@formula(
    "activations.optimal_every",
    equation=r"k^* \approx \sqrt{l\, i / A}",
    source="chen2016",
    label="thm-activations-peak",
    use="Where it is below 1, a checkpoint before each layer has the smallest peak.",
)
def optimal_every(num_layers: int, layer_bytes: float, input_bytes: float) -> int:
    """The distance of checkpoints with the smallest peak.

    k* = √(l i/A), or √l where a layer keeps no more than its input; the whole number with the smallest
    `checkpointed_bytes`, of equals the one nearest to the root. ``ValueError`` unless both sizes are positive, and for
    more than ten million layers.
    """
    l = whole("num_layers", num_layers, 1)
    layer_bytes = amount("layer_bytes", layer_bytes, positive=True)
    input_bytes = amount("input_bytes", input_bytes, positive=True)
    every = np.arange(1, at_most("num_layers", l, 10**7) + 1)
    segments = -(-l // every)
    last = (segments - 1) * input_bytes + (l - every * (segments - 1)) * layer_bytes
    before = np.where(l % every == 0, 0, (segments - 2) * input_bytes + every * layer_bytes)
    peaks = np.maximum(last, before)  # `checkpointed_bytes` of each
    best = every[peaks == peaks.min()]
    return int(best[np.argmin(np.abs(best - math.sqrt(l * input_bytes / layer_bytes)))])


@dataclass(frozen=True)
class Moment:
    """What is kept after one pass through a layer: `phase` is ``"forward"``, ``"recompute"`` or ``"backward"``."""

    phase: str
    layer: int
    kept_bytes: float


def checkpoint_walk(num_layers: int, every: int | None, layer_bytes: float, input_bytes: float) -> tuple[Moment, ...]:
    """Walk through a step with a checkpoint every k layers, and count what is kept after each layer.

    Forward, the first layer of each segment adds its input. Backward, from the last segment on, each segment is
    computed again, which adds A a layer (the first has its input already), and each layer's backward pass takes it away
    again. Without `every` nothing is computed again: A a layer forward, and away backward. Errors as
    `checkpointed_bytes`, which is the largest number of this walk, and for more than 100,000 layers.
    """
    l = at_most("num_layers", whole("num_layers", num_layers, 1), 10**5)
    layer_bytes, input_bytes = amount("layer_bytes", layer_bytes), amount("input_bytes", input_bytes)
    if every is None:
        up = [Moment("forward", layer, (layer + 1) * layer_bytes) for layer in range(l)]
        return (*up, *(Moment("backward", layer, layer * layer_bytes) for layer in reversed(range(l))))
    every = whole("every", every, 1)
    checkpointed_bytes(l, every, layer_bytes, input_bytes)  # its errors
    walk = [Moment("forward", layer, (layer // every + 1) * input_bytes) for layer in range(l)]
    for start in reversed(range(0, l, every)):
        before, end = start // every * input_bytes, min(start + every, l)
        again = ((layer, before + (layer + 1 - start) * layer_bytes) for layer in range(start, end))
        walk += [Moment("recompute", layer, kept) for layer, kept in again]
        gone = ((layer, before + (layer - start) * layer_bytes) for layer in reversed(range(start, end)))
        walk += [Moment("backward", layer, kept) for layer, kept in gone]
    return tuple(walk)


@formula(
    "activations.recompute_factor",
    equation=r"\text{selective: } 1 + \frac{s}{18h + 3s}, \quad \text{full: } \frac43",
    source="derived here",
    label="prop-activations-flops",
)
def recompute_factor(seq: int, hidden: int, recompute: str = "full") -> float:
    """Operations of a layer, over those without recompute.

    A forward pass is 24 s b h² for the matrices and 4 b s² h for attention between tokens; a backward pass is twice
    that. ``"full"`` adds a forward pass: 4/3. ``"selective"`` adds 4 b s² h: 1 + s/(18h + 3s). All s tokens count for
    each, as without a causal mask. ``ValueError`` for sizes below 1 or another `recompute`.
    """
    s, h = whole("seq", seq, 1), whole("hidden", hidden, 1)
    forward = 24 * h + 4 * s  # over s b h
    again = {"none": 0, "selective": 4 * s, "full": forward}[checked_recompute(recompute)]
    return 1 + again / (3 * forward)
