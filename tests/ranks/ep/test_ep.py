"""A GPT whose experts lie on several ranks against one process, and wrong ones, which are refused."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from dtlib.ranks import dp, ep, experts
from dtlib.ranks import model as gpt
from dtlib.ranks.ep import exchange
from dtlib.ranks.shared import replicas

from .judge import CASES, judge, patched, right


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equals_one_process(n):
    for compare in judge(n, [(name, right) for name in CASES]):
        compare()


def test_three_ranks_equal_one_process():
    for name in CASES:
        on_three()[name]()


# --- wrong implementations, each of which the judge must refuse -----------------------------------------------------


def experts_not_divided():
    """An expert's gradient is the sum over all ranks' losses: it comes out multiplied by the ranks."""
    return gradients_times_the_ranks(lambda name: "experts" in name)


def sum_for_mean():
    return gradients_times_the_ranks(lambda name: "experts" not in name)


def gradients_times_the_ranks(chosen):
    average = dp.FlatDataParallel._average

    def wrong(self, unused):
        average(self, unused)
        for name, parameter in self.module.named_parameters():
            if chosen(name) and parameter.requires_grad:
                parameter.grad *= dist.get_world_size()

    return patched(dp.FlatDataParallel, "_average", wrong)


def experts_summed_over_all():
    """As if all ranks held the same experts."""

    @contextmanager
    def forgotten():
        with patched(ep.gpt, "belongs_to", lambda *_: None), patched(replicas, "refuse_slices", lambda *_: None):
            yield

    return forgotten()


def router_cut_off():
    """Weights travel by a collective that autograd does not see."""
    start = exchange.start

    def wrong(rows, *trip):
        return start(rows.detach() if rows.dim() == 1 else rows, *trip)

    return patched(exchange, "start", wrong)


def tokens_cut_off():
    """No gradient comes back to the tokens that were sent."""
    dispatch = exchange.dispatch

    def wrong(*args, **kwargs):
        arrived = dispatch(*args, **kwargs)
        return arrived._replace(x_nh=arrived.x_nh.detach())

    return patched(exchange, "dispatch", wrong)


def no_gradient_without_tokens():
    forward = experts._Grouped.apply

    def wrong(x_nh, weights_p, up_ehf, down_efh, *others):
        if not len(weights_p):
            up_ehf, down_efh = up_ehf.detach(), down_efh.detach()
        return forward(x_nh, weights_p, up_ehf, down_efh, *others)

    return patched(experts._Grouped, "apply", wrong)


def dropped_tokens_are_zeros():
    """What no expert answers loses its residual path."""

    def forward(self, x_bsh, offset=0, **where):
        x_bsh = x_bsh + self.attention(self.attention_norm(x_bsh), offset, **where)
        y_bsh = self.mlp(self.mlp_norm(x_bsh))
        return torch.where((y_bsh == 0).all(-1, keepdim=True), y_bsh, x_bsh + y_bsh)

    return patched(gpt.Block, "forward", forward)


def earlier_tokens_are_dropped():
    pairs_of = exchange.pairs_of

    def wrong(routed, num_experts, capacity_factor):
        turned = experts.Routed(*(each.flip(0) for each in routed))
        row_p, *others = pairs_of(turned, num_experts, capacity_factor)
        return experts.Pairs(len(routed.experts_tk) - 1 - row_p, *others)

    return patched(exchange, "pairs_of", wrong)


def visits_counted_again():
    """What is computed again is counted again."""
    return patched(torch._C, "_current_graph_task_id", lambda: -1)


def bias_by_own_visits():
    def wrong(model, rate):
        with patched(dist, "all_reduce", lambda tensor, group=None: None):
            return real(model, rate)

    real = ep.move_bias
    return patched(ep, "move_bias", wrong)


def balance_of_own_tokens():
    def wrong(routed):
        with patched(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(dist.get_world_size())):
            return real(routed)

    real = ep.balance_loss
    return patched(ep, "balance_loss", wrong)


def ties_to_the_higher_index():
    def wrong(scores_te, k):
        return scores_te.shape[1] - 1 - scores_te.flip(1).sort(dim=-1, descending=True, stable=True).indices[:, :k]

    return patched(experts, "_best", wrong)


def no_broadcast():
    return patched(replicas, "broadcast", lambda tensors, group: None)


MUTANTS = {
    experts_not_divided: ("top 2", "gradients"),
    sum_for_mean: ("top 2", "gradients"),
    experts_summed_over_all: ("top 2", "losses"),
    router_cut_off: ("top 2", "gradients"),
    tokens_cut_off: ("top 2", "gradients"),
    no_gradient_without_tokens: ("one expert for all", "missing"),
    dropped_tokens_are_zeros: ("capacity", "losses"),
    earlier_tokens_are_dropped: ("capacity", "losses"),
    visits_counted_again: ("uneven", "visits"),
    bias_by_own_visits: ("top 2", "visits"),
    balance_of_own_tokens: ("top 2", "gradients"),
    ties_to_the_higher_index: ("ties", "losses"),
    no_broadcast: ("top 2", "losses"),
}


@functools.cache
def on_three():
    """What is right, by case, and the mutants, from one start."""
    runs = {name: (name, right) for name in CASES} | {mutant: (case, mutant) for mutant, (case, _) in MUTANTS.items()}
    return dict(zip(runs, judge(3, list(runs.values())), strict=True))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_judge_refuses(mutant):
    with pytest.raises(AssertionError, match=f"^{MUTANTS[mutant][1]}:"):
        on_three()[mutant]()
