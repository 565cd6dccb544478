"""What one rank of a pipeline of split matrices holds: its layers, its parameters, its micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from dtlib.theory.models import Architecture, ModelParameters, checked_model, layer_parameters, layers_of_rank
from dtlib.theory.valid import whole


def stage_layers(num_layers: int, stages: int) -> list[int]:
    """Layers of each of p stages, as even as possible.

    Where p does not divide l, stages at the ends have one layer less, the last first, then the first, and so inwards:
    they also hold the head and the embedding. 126 layers on 16 stages are 7, fourteen times 8, and 7, as Llama 3 405B
    was cut (arXiv 2407.21783, section 3.3.2). ``ValueError`` for counts below 1 or more stages than layers.
    """
    l, p = whole("num_layers", num_layers, 1), whole("stages", stages, 1)
    if p > l:
        raise ValueError(f"stages must be at most num_layers={l}, not {p}")
    return _even(l, p)


def piece_layers(num_layers: int, stages: int, chunks: int = 1) -> list[list[int]]:
    """Layers of each piece of each of p stages: stage i has the `chunks` pieces i, i + p, i + 2p, … of p·v.

    As even as those of `stage_layers`. The first and the last piece may be without a layer, with the embedding or the
    head alone: 126 layers on 16 stages of 8 pieces are one a piece but for these two. ``ValueError`` for counts below
    1, more stages than layers, several pieces on one stage, or more than l + 2 of them.
    """
    v, p = whole("chunks", chunks, 1), whole("stages", stages, 1)
    if v == 1:
        return [[layers] for layers in stage_layers(num_layers, p)]
    l = sum(stage_layers(num_layers, p))
    most = (l + 2) // p if p > 1 else 1
    if v > most:
        raise ValueError(f"chunks must be at most {most} with num_layers={l} on pp={p}, not {v}")
    pieces = _even(l, p * v)
    return [pieces[stage::p] for stage in range(p)]


FULL = 0.995
"""Cut by cost, a stage is full with so much of its share.

nanotron's source asks for more than the whole share. The times of its published runs of 8.86 billion parameters on 16
and 32 stages ask for a stage that is full with 32 of 32.07 layers: any number below 0.9978 says so.
"""


def cost_layers(model: Architecture | str, stages: int) -> list[int]:
    """Layers of each of p stages that are cut by the entries of their matrices, the head's V h among them.

    Stage i takes layers until the stages so far have (i + 1)/p of all entries, or nearly (`FULL`): the early ones have
    more layers, and the last ones may have none. So nanotron cuts, but for `FULL` (what a product multiplies is what it
    costs).
    ``ValueError`` for a model with experts, of whose entries a token meets a part, and for counts below 1 or more
    stages than layers.
    """
    model = checked_model(model)
    if model.experts is not None:
        raise ValueError(f"balance of {model.name} must be 'layers', since it has experts, not 'cost'")
    l, p = model.num_layers, len(stage_layers(model.num_layers, stages))
    one = layer_parameters(model)
    layer = one.total - one.norms
    total, layers, done = l * layer + model.vocab * model.hidden, [0] * p, 0
    for _ in range(l):
        layers[min(done, p - 1)] += 1
        done += p * sum(layers) * layer >= FULL * (done + 1) * total
    return layers


def _even(l: int, pieces: int) -> list[int]:
    """l layers in pieces as even as possible, the shorter ones at the ends."""
    layers = [-(-l // pieces)] * pieces
    for turn in range(sum(layers) - l):
        layers[turn // 2 if turn % 2 else pieces - 1 - turn // 2] -= 1
    return layers


def stage_parameters(
    model: Architecture | str,
    tp: int,
    pp: int,
    stage: int,
    chunks: int = 1,
    ep: int = 1,
    *,
    pieces: Sequence[Sequence[int]] | None = None,
) -> ModelParameters:
    """Parameters on one rank of stage `stage` (0 to pp−1), of `chunks` pieces, when `tp` ranks split each matrix and
    `ep` share the experts; `pieces` are the layers of each piece of each stage (default: `piece_layers`).

    The matrices of a layer are split as `layer_of_rank` says, and the rows of embedding and head (⌈V/t⌉ each); norms
    and positions are on every rank. The first stage holds embedding and positions, the last one the norm behind the
    layers, the modules that predict further tokens, and the head: its own copy of the embedding where the two are tied
    and p > 1. ``ValueError`` for degrees that `model` does not divide by.
    """
    model = checked_model(model)
    pieces = piece_layers(model.num_layers, pp, chunks) if pieces is None else pieces
    stage = _checked_stage(stage, len(pieces))
    sparse = [0] if model.experts is None else expert_layers(model, pp, stage, chunks)
    return layers_of_rank(
        model, tp, ep, sum(sparse), sum(pieces[stage]) - sum(sparse), first=stage == 0, last=stage == len(pieces) - 1
    )


def expert_layers(model: Architecture, pp: int, stage: int, chunks: int = 1, most: int | None = None) -> list[int]:
    """Of the layers of each piece of stage `stage` (`piece_layers`), or of the first `most`, those with experts."""
    pieces = piece_layers(model.num_layers, pp, chunks)
    if model.experts is None:
        return [0] * len(pieces[stage])
    in_order = [pieces[place % pp][place // pp] for place in range(pp * len(pieces[0]))]
    begins = [0, *accumulate(in_order)]
    mine = range(stage, len(in_order), pp)
    sizes = [layers if most is None else min(layers, most) for layers in in_order]
    return [model.experts.layers(begins[place], begins[place] + sizes[place]) for place in mine]


def chunks_in_flight(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> int:
    """Forward passes of a chunk whose activations a rank of stage i keeps at its fullest, under 1F1B.

    min(m, p − i) micro-batches; with v chunks a rank min(m v, (v − 1) p + 2 (p − i − 1) + 1), each of l/(p v) layers.
    On the first stage that is l (1 + (p − 1)/(p v)) layers. ``ValueError`` for counts below 1 or a stage not below p.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    p, m, v = whole("stages", stages, 1), whole("micro_batches", micro_batches, 1), whole("chunks", chunks, 1)
    i = _checked_stage(stage, p)
    return min(m, p - i) if v == 1 else min(m * v, (v - 1) * p + 2 * (p - i - 1) + 1)


def embeddings_in_flight(stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Micro-batches of which the first stage keeps what its embedding put out, at its fullest.

    min(m, p) with 1F1B, min(m, 2p) where chunks are interleaved: p more enter before the first come back. Errors as
    `chunks_in_flight`; derived here, from the same schedule.
    """
    p, m, v = whole("stages", stages, 1), whole("micro_batches", micro_batches, 1), whole("chunks", chunks, 1)
    return min(m, p if v == 1 else 2 * p)


def _checked_stage(stage: int, stages: int) -> int:
    if whole("stage", stage, 0) >= stages:
        raise ValueError(f"stage must be from 0 to {stages - 1}, not {stage}")
    return int(stage)
