"""What each rank of a mesh sends for experts, and for all else beside them, is what theory says, to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks.experts import Router
from dtlib.theory import threed
from dtlib.theory.footprint import Setup

from .judge import GPT, LLAMA, ROWS, built, case
from .test_bytes import sent

EXPERTS = {"num_experts": 4, "top_k": 2, "num_shared": 1, "first_dense": 1, "expert_ratio": 1.5}
MOE = replace(GPT, num_layers=3, vocab=24, seq=24, tied=False, **EXPERTS)
GATED = replace(LLAMA, num_layers=2, vocab=24, seq=56, num_experts=8, top_k=3, scoring="sigmoid")
ALL = replace(MOE, top_k=4)  # each token to each expert, whatever the router says
CASES = [
    case("dp 2, cp 2", config=MOE, ep=1), case("dp 4", config=MOE, ep=2), case("dp 4", config=MOE, ep=4),
    case("dp 4", m=1, config=MOE, ep=4),
    case("dp 4", config=MOE, ep=2, zero=1), case("dp 4", config=MOE, ep=2, zero=2),
    case("dp 4", config=MOE, ep=2, zero=3), case("dp 4", config=MOE, ep=4, zero=3),
    case("dp 4", config=MOE, ep=2, recompute="full"), case("dp 4", config=MOE, ep=2, recompute="selective"),
    case("dp 4", config=MOE, ep=2, zero=3, recompute="full"),
    case("dp 2, cp 2", config=MOE, ep=2, zero=1), case("cp 2, dp 2", config=MOE, ep=2, recompute="full"),
    case("dp 2, pp 2", config=MOE, ep=2, m=4), case("pp 2, dp 2", config=MOE, ep=2, zero=2, recompute="full"),
    case("dp 2, pp 2", "ZB-H1", config=MOE, ep=2, zero=2),
    case("dp 2, pp 2", "interleaved", config=replace(MOE, num_layers=4), ep=2, zero=1),
    case("dp 2, tp 2", config=MOE, ep=2), case("tp 2, dp 2", config=MOE, ep=1, zero=1),
    case("dp 2, tp 2", config=MOE, ep=2, recompute="full"), case("dp 2, tp 2", config=MOE, ep=2, recompute="selective"),
    case("tp 2, pp 2", "ZB-H1", config=MOE, zero=1, m=4), case("tp 2, cp 2", config=MOE, zero=3),
    case("dp 2, tp 2", config=MOE, ep=2, sequence_parallel=True),
    case("dp 2, tp 2", config=MOE, ep=2, zero=1, sequence_parallel=True, gather_again=True),
    case("tp 4", config=MOE, sequence_parallel=True, recompute="selective"),
    case("tp 2, dp 2", config=GATED, ep=2, zero=2, sequence_parallel=True, recompute="full"),
    case("tp 2, pp 2", "ZB-H1", config=MOE, sequence_parallel=True, gather_again=True),
    case("dp 4", config=ALL, ep=4, zero=2), case("dp 4", config=GATED, ep=4), case("dp 4", config=GATED, ep=2, zero=1),
]  # fmt: skip


def in_turn(router, scores_te):
    """Uniform routing without a die: all sets of k experts, one token after another."""
    e = scores_te.shape[1]
    sets_nk = torch.tensor(list(combinations(range(e), router.top_k)))
    assert len(scores_te) % len(sets_nk) == 0
    return sets_nk.repeat(len(scores_te) // len(sets_nk), 1)


def sent_by_axis(case):
    """This rank's place, what it sends to other ranks by all-to-alls, and what else."""
    exchanged, all_to_all = 0, dist.all_to_all_single

    def counted(out, rows, received, sizes, *, group, **options):
        nonlocal exchanged
        numbers = rows.numel() // max(1, len(rows))
        away = sum(sizes) - sizes[dist.get_rank(group)]
        exchanged += away * numbers * rows.element_size()
        return all_to_all(out, rows, received, sizes, group=group, **options)

    choose = Router.choose if case.config.top_k == case.config.num_experts else in_turn
    with mock.patch.object(dist, "all_to_all_single", counted), mock.patch.object(Router, "choose", choose):
        place, others = sent(case)
    return place, exchanged, others


def expected(case, place, **changes):
    """Theory's bytes of a step of float64."""
    axes, options = dict(case.axes), dict(case.options)
    sizes = axes | {"chunks": case.made().chunks} | options | changes
    where = {"stage": place["pp"], "gather_again": sizes.pop("gather_again", False)}
    setup = Setup(**sizes, micro_batch=ROWS // case.m // axes.get("dp", 1), micro_batches=case.m)
    return threed.sent_bytes(case.config.architecture, setup, **where, element_bytes=8)


def test_ranks_send_tokens_to_experts_as_the_law_says():
    by_rank = lab.run(lambda: [sent_by_axis(each) for each in CASES], 4, timeout_s=200)
    for of, *found in zip(CASES, *by_rank, strict=True):
        for place, exchanged, others in found:
            law = expected(of, place)
            assert (law.ep, law.total - law.ep) == pytest.approx((exchanged, others), rel=0, abs=1e-6), (of, place)
            if law.ep:
                assert_a_wrong_law_is_off(of, place, exchanged, others)


WIDE = replace(MOE, num_layers=2, hidden=128, seq=96)
WIDER = [
    case("dp 2, tp 2", config=WIDE, ep=2), case("dp 2, tp 2", config=WIDE, ep=2, sequence_parallel=True),
    case("tp 4", config=WIDE, sequence_parallel=True, gather_again=True),
    case("tp 2, dp 2", config=WIDE, ep=2, zero=1, recompute="full", sequence_parallel=True),
]  # fmt: skip


def on_the_wire(case):
    """This rank's place, and what all ranks sent in a second step, when they know each other."""
    training = built(case)
    tokens = torch.zeros(ROWS // training.mesh.size("dp"), case.config.seq, dtype=torch.long)
    with mock.patch.object(Router, "choose", in_turn):
        training.step(tokens, tokens)
        with lab.wire() as wire:
            training.step(tokens, tokens)
    return training.mesh.coordinates(), wire.total_bytes


def test_the_wire_carries_what_the_law_says():
    by_rank = lab.run(lambda: [on_the_wire(each) for each in WIDER], 4, timeout_s=200)
    for of, *found in zip(WIDER, *by_rank, strict=True):
        law = sum(expected(of, place).total for place, _ in found)
        assert found[0][1] == pytest.approx(law, rel=0.01), of
        assert sum(expected(of, place, tp=1).total for place, _ in found) < 0.97 * law


def assert_a_wrong_law_is_off(of, place, exchanged, others):
    """A law that forgets what is sent again, or sums experts over all ranks that share the batch."""
    if dict(of.options).get("recompute") == "full":
        assert expected(of, place, recompute="none").ep < exchanged
    with mock.patch.object(Setup, "expert_copies", property(lambda setup: setup.size("dp", "cp"))):
        law = expected(of, place)
        assert law.total - law.ep > others + 1
