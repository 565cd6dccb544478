"""What a dispatch and a combine send, within 1 % on the wire; precision; a rank without tokens; errors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import ep
from dtlib.ranks.experts import MoE, Router
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory import ep as theory
from dtlib.theory import models

from .judge import CONFIG

N, TOKENS, HIDDEN, E, K = 3, 768, 384, 12, 3
WIDE = GPTConfig(hidden=HIDDEN, num_heads=4, num_experts=E, top_k=K, expert_ratio=0.25)


def a_layer(config=WIDE):
    torch.manual_seed(0)
    moe = MoE(config)
    moe.experts, moe.way = ep.OwnExperts(moe.experts, None), ep.Exchange(config.num_experts, None)
    return moe


def sends():
    """In a rank: bytes of a forward and a backward pass, visits to other ranks, pairs on other ranks, pairs here."""
    moe, me = a_layer(), dist.get_rank()
    x_th = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(me)).requires_grad_()
    moe(x_th).sum().backward()
    with lab.wire() as forward, ep.routing(moe) as routed:
        y_th = moe(x_th)
    with lab.wire() as backward:
        y_th.sum().backward()
    rank_tk = routed[0].experts_tk // (E // N)
    visits = sum(int((rank_tk == rank).any(1).sum()) for rank in range(N) if rank != me)
    arrived = ep.dispatch(x_th, routed[0], E)
    assert sum(arrived.pairs.counts_e) == len(arrived.pairs.row_p) == len(arrived.pairs.weights_p)
    return forward.total_bytes, backward.total_bytes, visits, int((rank_tk != me).sum()), len(arrived.pairs.row_p)


def rows_of_seven():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()


def in_bfloat16():
    """In a rank: results of its part of the rows, bytes of a forward pass, and what they should be."""
    moe = a_layer(replace(WIDE, dtype=torch.bfloat16))
    own_th = rows_of_seven().tensor_split(N)[dist.get_rank()].clone().requires_grad_()
    moe(own_th)  # connects the ranks
    with lab.wire() as wire, ep.routing(moe) as routed:
        y_th = moe(own_th)
    y_th.float().square().sum().backward()
    rank_tk = routed[0].experts_tk // (E // N)
    visits = sum(int((rank_tk == rank).any(1).sum()) for rank in range(N) if rank != dist.get_rank())
    sent = 2 * 2 * visits * HIDDEN + 12 * int((rank_tk != dist.get_rank()).sum())
    return y_th.detach(), own_th.grad, moe.experts.up_ehf.grad, wire.total_bytes, sent


def nine_rows():
    return torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))


def without_tokens():
    """In a rank: results where rank 1 alone has tokens."""
    moe, me, x_th = a_layer(), dist.get_rank(), nine_rows()
    own_th = (x_th if me == 1 else x_th[:0]).clone().requires_grad_()
    y_th = moe(own_th)
    y_th.sum().backward()
    return y_th.detach(), own_th.grad, moe.experts.up_ehf.grad, moe.router.weight.grad


def errors():
    """In a rank: what bad calls say, and the bytes that they sent."""
    small, said = ep.parallelize(GPT(CONFIG)), []
    calls = (
        lambda: ep.parallelize(torch.nn.Linear(2, 2)),
        lambda: ep.parallelize(GPT(replace(CONFIG, num_experts=0))),
        lambda: ep.parallelize(GPT(replace(CONFIG, num_experts=2))),
        lambda: ep.parallelize(small),
        lambda: ep.move_bias(small, -1),
        lambda: ep.move_bias(torch.nn.Linear(2, 2), 1),
    )
    for call in calls:
        with lab.wire() as wire, pytest.raises(ValueError) as error:
            call()
        said.append((str(error.value), wire.total_bytes))
    return said


RUNS = (sends, in_bfloat16, without_tokens, errors)


@cache
def on_ranks():
    """What each of `RUNS` returns on each rank, from one start."""
    return dict(zip(RUNS, zip(*lab.run(lambda: [run() for run in RUNS], N), strict=True), strict=True))


def test_a_token_travels_once_to_each_rank_that_it_visits():
    found = on_ranks()[sends]
    visits, pairs, arrived = (sum(each[place] for each in found) for place in (2, 3, 4))
    elements = visits * HIDDEN
    for forward, backward, *_ in found:
        # beside the rows: for each visit of an expert 8 bytes of its row, 4 of its weight, and 4 of its gradient back
        assert forward == pytest.approx(2 * 4 * elements + 12 * pairs, rel=0.005)
        assert backward == pytest.approx(2 * 4 * elements + 4 * pairs, rel=0.005)
        assert forward + backward == pytest.approx(4 * 4 * elements, rel=0.01)
    assert arrived == N * TOKENS * K  # dropless
    assert pairs > 1.2 * visits  # one copy for each expert would be far off
    # scores of random tokens are not quite uniform, and 2,304 tokens not the mean
    assert elements / N == pytest.approx(theory.dispatch_elements(TOKENS, HIDDEN, E, K, N), rel=0.03)


def test_scores_are_float32_where_tokens_are_bfloat16():
    router = Router(64, 8, 2, dtype=torch.bfloat16)
    x_th = torch.randn(50, 64).bfloat16()
    experts_tk, weights_tk, scores_te = router(x_th)
    assert weights_tk.dtype == scores_te.dtype == router.bias_e.dtype == torch.float32
    expected = (x_th.float() @ router.weight.float().T).softmax(-1)
    assert_close(scores_te, expected)
    route = theory.route(expected.detach().double().numpy(), 2)
    assert_close(experts_tk, torch.from_numpy(route.experts_tk))
    moe = MoE(replace(WIDE, dtype=torch.bfloat16))
    y_th = moe(torch.randn(20, HIDDEN).bfloat16())
    y_th.sum().backward()
    assert y_th.dtype == torch.bfloat16
    assert all(each.grad.dtype == torch.bfloat16 and each.grad.any() for each in moe.parameters())


def test_bfloat16_travels_in_two_bytes_and_gives_what_one_process_gives():
    torch.manual_seed(0)
    moe, x_th = MoE(replace(WIDE, dtype=torch.bfloat16)), rows_of_seven().requires_grad_()
    y_th = moe(x_th)
    y_th.float().square().sum().backward()
    found = on_ranks()[in_bfloat16]
    whole = (y_th.detach(), x_th.grad, moe.experts.up_ehf.grad)
    for place, one in enumerate(whole):
        ranks = torch.cat([each[place] for each in found])
        assert ranks.dtype == torch.bfloat16
        assert (ranks.double() - one.double()).norm() < 2**-8 * one.double().norm()
    assert found[0][3] == pytest.approx(sum(each[4] for each in found), rel=0.01)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_groups_are_those_of_theory(scoring):
    router = Router(16, 12, 3, scoring=scoring, groups=4, top_groups=2, scale=2.5, dtype=torch.float64)
    router.bias_e.copy_(torch.linspace(-0.02, 0.02, 12).flip(0))
    found = router(torch.randn(40, 16, dtype=torch.float64))
    options = {"bias_e": router.bias_e.numpy(), "groups": 4, "top_groups": 2, "scale": 2.5}
    route = theory.route(found.scores_te.detach().numpy(), 3, **options)
    assert_close(found.experts_tk, torch.from_numpy(route.experts_tk))
    assert_close(found.weights_tk.detach(), torch.from_numpy(route.weights_tk))


def test_a_rank_without_tokens_takes_part():
    torch.manual_seed(0)
    moe, x_th = MoE(WIDE), nine_rows().requires_grad_()
    y_th = moe(x_th)
    y_th.sum().backward()
    found = on_ranks()[without_tokens]
    assert_close(found[1][:2], (y_th.detach(), x_th.grad))
    assert_close(torch.cat([each[2] for each in found]), moe.experts.up_ehf.grad)
    assert_close(sum(each[3] for each in found), moe.router.weight.grad)


def test_bad_input_is_named():
    words = [
        "model must be a GPT", "model must have experts", "num_experts must be at least the number of ranks",
        "model must have its experts whole", "rate must be at least 0", "model must have experts",
    ]  # fmt: skip
    for rank in on_ranks()[errors]:
        for (said, sent), expected in zip(rank, words, strict=True):
            assert said.startswith(expected)
            assert sent == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 7}, "top_k must be at most num_experts=6, not 7"),
        ({"scoring": "relu"}, "scoring must be one of softmax, sigmoid"),
        ({"expert_groups": 4}, "groups must divide num_experts=6"),
        ({"expert_groups": 3, "top_groups": 4}, "top_groups must be at most groups=3"),
        ({"expert_groups": 6, "top_groups": 1}, "top_k must be at most the 1 experts"),
        ({"expert_ratio": 0.3}, "expert_ratio must make a whole number"),
        ({"first_dense": 2}, "first_dense must be below num_layers=2"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0"),
        ({"num_shared": -1}, "num_shared must be a whole number of at least 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"first_dense": 1, "swiglu": True, "num_shared": 2}, {"num_experts": 5, "expert_ratio": 0.5},
     {"first_dense": 1, "biases": False, "rms_norm": True, "tied": False, "num_shared": 1}],
)  # fmt: skip
def test_theory_counts_the_parameters_of_the_modules(changes):
    config = replace(CONFIG, **changes)
    with torch.device("meta"):
        model = GPT(config)
    held = {name: each.numel() for name, each in model.named_parameters()}
    counted = models.model_parameters(config.architecture)
    assert counted.total == config.num_params == sum(held.values())
    of = lambda part: sum(count for name, count in held.items() if f"mlp.{part}." in name)  # noqa: E731
    assert counted.experts == of("experts")
    assert counted.shared_experts == of("shared")
    assert counted.router == sum(count for name, count in held.items() if "router" in name)
    assert counted.mlp == of("up") + of("down")
    met = models.active_parameters(config.architecture).experts
    assert met * config.num_experts == counted.experts * config.top_k
