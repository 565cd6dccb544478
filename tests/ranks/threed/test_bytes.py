"""What each rank of a mesh sends in a step is what theory says, to the byte."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.theory import models, threed
from dtlib.theory.footprint import Setup

from .judge import GPT, ROWS, built, case

SIZES = {"num_layers": 4, "hidden": 16, "num_heads": 4, "vocab": 24, "seq": 16, "tied": False}
DEEP, PAPER = replace(GPT, **SIZES, mlp_ratio=4), models.gpt("deep", **SIZES)
TIED = {"config": replace(DEEP, tied=True)}
CASES = [
    case("dp 4", config=DEEP, zero=0), case("pp 4", **TIED, m=4), case("cp 2, dp 2", config=DEEP, zero=2),
    case("dp 2, pp 2", "ZB-H1", config=DEEP, zero=2),
    case("pp 2, dp 2", config=DEEP, zero=3), case("tp 2, pp 2", **TIED, m=4), case("tp 4", config=DEEP),
    case("tp 2, pp 2", config=DEEP, sequence_parallel=True), case("dp 2, tp 2", config=DEEP, zero=1),
    case("cp 2, tp 2", config=DEEP, zero=1, sequence_parallel=True),
]  # fmt: skip


def sent(case):
    """This rank's place and bytes of a step: its messages, and 2(n − 1)/n of what it all-reduces."""
    training, reduced, all_reduce = built(case), 0.0, dist.all_reduce

    def counted(tensor, *args, group=None, **options):
        nonlocal reduced
        if tensor.numel() > 1:  # a loss and a number of tokens are not in the law
            n = dist.get_world_size(group)
            reduced += 2 * (n - 1) / n * tensor.numel() * tensor.element_size()
        return all_reduce(tensor, *args, group=group, **options)

    tokens = torch.zeros(ROWS // training.mesh.size("dp"), case.config.seq, dtype=torch.long)
    with lab.SendCounter() as counter, mock.patch.object(dist, "all_reduce", counted):
        training.step(tokens, tokens)
    return training.mesh.coordinates(), counter.sent_bytes + reduced


def expected(case, place):
    """Theory's bytes of a step of float64."""
    axes, options = dict(case.axes), dict(case.options)
    sizes = {name: size for name, size in axes.items() if name != "cp"} | options
    setup = Setup(**sizes, micro_batch=ROWS // case.m // axes.get("dp", 1), micro_batches=case.m)
    model = replace(PAPER, tied=case.config.tied)
    return threed.sent_bytes(model, setup, cp=axes.get("cp", 1), stage=place["pp"], element_bytes=8).total


def test_ranks_send_what_their_place_on_the_mesh_says():
    by_rank = lab.run(lambda: [sent(case) for case in CASES], 4, timeout_s=200)
    for of, *found in zip(CASES, *by_rank, strict=True):
        for place, seen in found:
            assert seen == expected(of, place), (of, place)
