"""Activations of one layer in closed form, as Korthikanti et al. count them.

2 bytes an element, 1 byte an element of a dropout mask, a GPT with dropout and an MLP of width 4h; buffers that are
small beside these (a norm's means, one number a token) are left out.
"""

from __future__ import annotations

import math

from dtlib.theory.collectives._valid import amount, whole
from dtlib.theory.memory.flops import checked_recompute


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
    """Activation bytes of a layer that one rank keeps for backward.

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


def first_stage_layers(stages: int, chunks: int = 1) -> float:
    """Layers whose activations the first stage keeps, as a multiple of l.

    1F1B keeps p micro-batches of l/p layers: 1. Interleaving v chunks a rank keeps 1 + (p − 1)/(p v). ``ValueError``
    for counts below 1. Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3.
    """
    p, v = whole("stages", stages, 1), whole("chunks", chunks, 1)
    return 1 + (p - 1) / (p * v) if v > 1 else 1.0


def checkpointed_bytes(num_layers: int, every: int, layer_bytes: float, input_bytes: float) -> float:
    """Peak of the activations with a checkpoint every k layers.

    ⌈l/k⌉ · i + k · A − i: the inputs of all segments (`input_bytes` i each) stay, and the longest segment is computed
    again, with the activations A (`layer_bytes`) of each of its k layers; the first of these is its own checkpoint.
    k = 1 is a full recompute layer by layer. `every` is at most `num_layers`. ``ValueError`` for sizes out of range.
    Source: Chen et al. 2016, arXiv 1604.06174.
    """
    l, k = whole("num_layers", num_layers, 1), whole("every", every, 1)
    amount("layer_bytes", layer_bytes)
    amount("input_bytes", input_bytes)
    if k > l:
        raise ValueError(f"every must be at most num_layers={l}, not {k}")
    return math.ceil(l / k) * input_bytes + k * layer_bytes - input_bytes


def optimal_every(num_layers: int, layer_bytes: float, input_bytes: float) -> int:
    """The distance of checkpoints with the smallest peak.

    k* = √(l i/A), or √l where a layer keeps no more than its input; the whole number with the smallest
    `checkpointed_bytes`, the smallest of equals. ``ValueError`` unless both sizes are positive.
    """
    l = whole("num_layers", num_layers, 1)
    amount("layer_bytes", layer_bytes, positive=True)
    amount("input_bytes", input_bytes, positive=True)
    return min(range(1, l + 1), key=lambda k: checkpointed_bytes(l, k, layer_bytes, input_bytes))
