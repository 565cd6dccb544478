"""What each rank of a mesh sends in a step is what theory says, to the byte."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.theory import models, threed, tp
from dtlib.theory.footprint import Setup

from .judge import GPT, ROWS, built, case

SIZES = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 24, "seq": 16, "tied": False}
TWO, PAPER = replace(GPT, **SIZES, mlp_ratio=4), models.gpt("two", **SIZES)
TIED = {"config": replace(TWO, tied=True)}
CASES = [
    case("dp 4", config=TWO, zero=0), case("pp 4", config=replace(TWO, tied=True, num_layers=4), m=4),
    case("cp 2, dp 2", config=TWO, zero=2),
    case("dp 2, pp 2", "ZB-H1", config=TWO, zero=2),
    case("pp 2, dp 2", config=TWO, zero=3), case("tp 2, pp 2", **TIED, m=4), case("tp 4", config=TWO),
    case("tp 2, pp 2", "ZB-H1", **TIED, m=4),
    case("tp 2, pp 2", "ZB-H1", config=TWO, sequence_parallel=True), case("dp 2, tp 2", config=TWO, zero=1),
    case("cp 2, tp 2", config=TWO, zero=1, sequence_parallel=True),
]  # fmt: skip
OPTIONS = [  # every value of every option that the law takes
    case("tp 4", config=TWO, recompute="selective"), case("tp 4", config=TWO, recompute="full"),
    case("tp 4", config=TWO, sequence_parallel=True, gather_again=True),
    case("tp 2, pp 2", config=TWO, sequence_parallel=True, recompute="selective"),
    case("tp 4", config=TWO, sequence_parallel=True, recompute="full"),
    case("tp 2, pp 2", config=TWO, sequence_parallel=True, gather_again=True, recompute="full"),
    case("cp 4", config=TWO, recompute="selective"), case("cp 4", config=TWO, recompute="full"),
    case("dp 4", config=TWO, zero=3, recompute="full"), case("dp 4", config=TWO, zero=3, recompute="selective"),
    case("cp 2, tp 2", config=TWO, zero=3, sequence_parallel=True, recompute="full"),
    case("pp 2, cp 2", **TIED, m=4, zero=1, recompute="full"),
    case("cp 2, pp 2", "ZB-H1", config=TWO, zero=2, recompute="selective"),
]  # fmt: skip
SPLIT = case("tp 2, pp 2", "ZB-H1", config=TWO, recompute="full")


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
    sizes = axes | options
    where = {"stage": place["pp"], "gather_again": sizes.pop("gather_again", False)}
    setup = Setup(**sizes, micro_batch=ROWS // case.m // axes.get("dp", 1), micro_batches=case.m)
    return threed.sent_bytes(
        replace(PAPER, num_layers=case.config.num_layers, tied=case.config.tied), setup, **where, element_bytes=8
    )


def without(case, option):
    return replace(case, options=tuple(each for each in case.options if each[0] != option))


def test_ranks_send_what_their_place_on_the_mesh_says():
    cases = [*CASES, *OPTIONS, SPLIT]
    for of, *found in zip(cases, *lab.run(lambda: [sent(each) for each in cases], 4, timeout_s=200), strict=True):
        for place, seen in found:
            assert seen == expected(of, place).total + (of is SPLIT and ends_again(place)), (of, place)


def ends_again(place):
    """Where backward passes are split a full recompute takes a stage as a whole, with its embedding or its loss."""
    outside = tp.outside_elements(ROWS // SPLIT.m, TWO.seq, TWO.hidden)
    return SPLIT.m * 8 * (outside.loss if place["pp"] else outside.embedding)


def test_a_law_that_forgets_an_option_is_off():
    """Where it says so: a selective recompute sends nothing without cp, and none without tp or cp."""
    for of in OPTIONS:
        place, sends = {"pp": 0}, dict(of.axes)
        right, options = expected(of, place).parts, dict(of.options)
        off = {axis for axis, size in expected(without(of, "recompute"), place).parts.items() if size != right[axis]}
        again = {"full": {"tp", "cp"}, "selective": {"cp"}, None: set()}[options.get("recompute")]
        assert off == again & sends.keys(), of
        if "gather_again" in options:
            assert expected(without(of, "gather_again"), place).tp < right["tp"]
