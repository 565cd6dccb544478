"""What real ranks of a mesh keep of their layers between forward and backward is what theory says, to the byte."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from dtlib import lab
from dtlib.ranks.experts import Router
from dtlib.theory import models, threed
from dtlib.theory.activations import torch_cpu_widths, written_out_widths
from dtlib.theory.footprint import Setup, embeddings_in_flight

from .judge import GPT, ROWS, built, case
from .test_experts_bytes import in_turn

SIZES = {"num_layers": 2, "hidden": 32, "num_heads": 4, "vocab": 23, "seq": 24, "tied": False}
TWO, PAPER = replace(GPT, **SIZES, mlp_ratio=4, dtype=torch.float32), models.gpt("two", **SIZES)
SPARSE = {"num_experts": 4, "top_k": 2, "num_shared": 1, "first_dense": 1, "expert_ratio": 0.75}
MOE = replace(TWO, num_layers=3, **SPARSE)
GATED = replace(MOE, swiglu=True, num_shared=0, first_dense=0, num_layers=2, biases=False)
EXPERTS = [  # every axis and option with which experts meet
    case("dp 4", config=MOE, m=1), case("dp 4", config=MOE, ep=2, m=1), case("dp 4", config=GATED, ep=4, m=1, zero=1),
    case("dp 2, tp 2", config=MOE, ep=2, m=1), case("tp 4", config=GATED, m=2),
    case("dp 2, tp 2", config=MOE, ep=2, m=1, sequence_parallel=True),
    case("dp 2, tp 2", config=GATED, ep=2, m=1, sequence_parallel=True, gather_again=True),
    case("dp 2, tp 2", config=MOE, ep=2, m=1, recompute="selective", sequence_parallel=True),
    case("dp 2, tp 2", config=MOE, ep=2, m=1, recompute="full"),
    case("dp 2, pp 2", config=MOE, ep=2, m=4), case("dp 2, cp 2", config=MOE, ep=2, m=1, zero=2),
    case("pp 2, dp 2", "interleaved", config=replace(MOE, num_layers=4, first_dense=0), ep=2, m=2),
    case("pp 2, dp 2", "interleaved", config=replace(MOE, num_layers=4), ep=2, m=2),  # chunks that are not alike
    case("pp 4", "interleaved", config=replace(MOE, num_layers=8, first_dense=5), m=8),
]  # fmt: skip
CASES = [
    case("pp 2, tp 2", config=TWO, m=4), case("tp 2, pp 2", config=TWO, m=4, sequence_parallel=True),
    case("pp 2, cp 2", config=TWO, m=2, zero=1), case("cp 2, tp 2", config=TWO, m=1, sequence_parallel=True, zero=3),
    case("dp 2, pp 2", "interleaved", config=replace(TWO, num_layers=4), m=4),
    case("dp 2, tp 2", config=TWO, m=1, zero=2),
    case("tp 2, pp 2", config=TWO, m=4, sequence_parallel=True, gather_again=True),
    case("tp 2, pp 2", config=TWO, m=4, sequence_parallel=True, recompute="full"),
    case("pp 2, tp 2", config=TWO, m=4, recompute="full"), case("pp 2, cp 2", config=TWO, m=2, recompute="full"),
    case("tp 2, pp 2", config=TWO, m=4, recompute="selective"),
    case("cp 2, tp 2", config=TWO, m=1, sequence_parallel=True, gather_again=True, recompute="selective"),
    case("dp 2, pp 2", "GPipe", config=TWO, m=4, recompute="selective"),
    case("dp 2, tp 2", config=replace(TWO, written_out=True), m=1),
]  # fmt: skip


def fullest(case):
    """The most bytes that autograd keeps on this rank when one of its layers has gone forward, and the rank's place."""
    training = built(case)
    tokens = torch.zeros(ROWS // training.mesh.size("dp"), case.config.seq, dtype=torch.long)
    with lab.memory() as memory, mock.patch.object(Router, "choose", in_turn):
        training.backward(tokens, tokens)
    blocks = [each for each in memory.timeline if each.phase == "forward done" and each.module[-1].isdigit()]
    return training.mesh.coordinates(), max(each.held.activations for each in blocks)


def expected(case, place):
    """Theory's bytes, and on the first stage what the embedding keeps of a micro-batch: for each token its number (8
    bytes) and whether this rank has it (1), and the numbers of the positions."""
    axes, options = dict(case.axes), dict(case.options)
    schedule, b, cp = case.made(), ROWS // case.m, axes.get("cp", 1)
    sizes = axes | {"chunks": schedule.chunks}
    if "dp" in sizes:
        b //= sizes["dp"]
    where = {"stage": place["pp"], "gather_again": options.pop("gather_again", False)}
    where |= {"schedule": case.schedule} if schedule.chunks == 1 else {}
    written_out = case.config.written_out
    setup = Setup(
        **sizes, **options, micro_batch=b, micro_batches=case.m, attention="matrix" if written_out else "flash"
    )
    widths = written_out_widths(4) if written_out else torch_cpu_widths(4)
    plain = replace(PAPER, num_layers=case.config.num_layers)
    model = case.config.architecture if case.config.num_experts else plain
    layers = threed.activation_bytes(model, setup, **where, widths=widths)
    in_flight = case.m if case.schedule == "GPipe" else embeddings_in_flight(setup.pp, case.m, schedule.chunks)
    return layers + (place["pp"] == 0) * in_flight * (9 * b + 8) * case.config.seq / cp


def test_ranks_keep_the_activations_of_their_place_on_the_mesh():
    cases = [*CASES, *EXPERTS]
    by_rank = lab.run(lambda: [fullest(case) for case in cases], 4, timeout_s=200)
    for of, *found in zip(cases, *by_rank, strict=True):
        for place, kept in found:
            if place["pp"] and of.schedule == "GPipe":
                continue  # heads and losses of earlier micro-batches, which the law leaves out
            assert kept == expected(of, place), (of, place)
