"""A GPT with split tokens against one process, and wrong ones, which are refused; the same judge as `ranks.tp`."""

from __future__ import annotations

from contextlib import nullcontext as right
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import activations, sp, tp
from dtlib.ranks.model import GPT
from dtlib.ranks.sp import gpt
from tests.ranks.tp import judge
from tests.ranks.tp.judge import CLOSE, Case, Parted, data, fits, patched, train


@dataclass(frozen=True)
class Cut(Case):
    """A case of 12 positions, which 1, 2, 3 and 4 ranks divide, and whether they are gathered again."""

    again: bool = False


def cut(name, again=False):
    case = judge.CASES[name]
    few = {"config": replace(case.config, seq=15), "seq": 12 + case.offset, "chunks": 1}
    return Cut(**vars(case) | few, again=again)


CASES = {name: cut(name, name in ("llama", "one key")) for name in judge.CASES} | {"gpt again": cut("gpt", True)}


class Split(Parted):
    """A rank of a group, with tokens split too."""

    def __init__(self, case, seed, group):
        judge.Whole.__init__(self, case, seed)
        self.group, self.vocab = group, case.config.vocab
        sp.parallelize(self.model, group, gather_again=case.again)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_equals_one_process(t):
    names = [name for name, case in CASES.items() if fits(case, t)]
    assert len(names) >= 3
    for compare in judge.judge(t, t, [(name, right) for name in names], CASES, Split):
        compare()


def test_two_groups_do_not_meet():
    for compare in judge.judge(4, 2, [("gpt", right), ("one key", right)], CASES, Split):
        compare()


# --- wrong implementations, each of which the judge must refuse -----------------------------------------------------


def no_sum_of_the_norms_gradients():
    return patched(gpt.SplitTokens, "share", lambda self, parameter: parameter)


def an_all_reduce_cut_afterwards():
    """All-reduce in place of reduce-scatter: right forward, but its backward pass gathers nothing."""

    def scatter_sum(self, part):
        total = tp.sum_over_ranks(part, self.group)
        return total.tensor_split(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]

    return patched(gpt.SplitTokens, "scatter_sum", scatter_sum)


def positions_from_0_on_each_rank():
    def forward(self, positions):
        return F.embedding(
            positions[: len(positions) // dist.get_world_size(self.tokens.group)], self.tokens.share(self.weight)
        )

    return patched(gpt.SplitPositions, "forward", forward)


def no_sum_of_the_inputs_gradient():
    def scatter(self, part):
        return part.tensor_split(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)].contiguous()

    return patched(gpt.SplitTokens, "scatter", scatter)


MUTANTS = {
    no_sum_of_the_norms_gradients: "gradients",
    an_all_reduce_cut_afterwards: "gradients",
    positions_from_0_on_each_rank: "losses",
    no_sum_of_the_inputs_gradient: "gradients",
}


def test_wrong_ones_are_refused():
    compared = judge.judge(2, 2, [("gpt", m) for m in MUTANTS], CASES, Split)
    for compare, what in zip(compared, MUTANTS.values(), strict=True):
        with pytest.raises(AssertionError, match=f"^{what}"):
            compare()


# --- the pair, checkpoints, dice, errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 3])
def test_the_pair_on_the_page(t):
    x_bsh = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    weights_t = torch.arange(1.0, t + 1, dtype=torch.float64)
    sum((x_bsh * w).sin() for w in weights_t).cos().sum().backward()

    def pair():
        mine = dist.get_rank()
        own_bsh = x_bsh.detach().tensor_split(t, 1)[mine].clone().requires_grad_()
        y_bsh = sp.scatter_sum((sp.gather_tokens(own_bsh) * weights_t[mine]).sin())
        y_bsh.cos().sum().backward()
        return own_bsh.grad

    # sums of three terms of float64 in another order
    assert_close(torch.cat(lab.run(pair, t), 1), x_bsh.grad, rtol=1e-12, atol=1e-12)


def test_checkpoints_are_those_of_tensor_parallelism():
    case = CASES["gpt"]

    def continued():
        first = Parted(case, dist.get_rank(), None)
        saved = train(first, case, 0, range(1))
        return train(Split(case, 7, None), case, 0, range(1, 3), saved)["weights"]

    oracle = judge.one_process(case, 0, 0)["weights"]
    for weights in lab.run(continued, 3):
        assert_close(weights, oracle, **CLOSE)


def test_a_model_is_split_before_it_has_memory():
    case = CASES["llama"]
    for config in (replace(CASES["gpt"].config, tied=False), case.config):  # torch unties what it moves off meta

        def meta(config=config):
            with torch.device("meta"):
                model = sp.parallelize(GPT(config))
            model.to_empty(device="cpu")
            sp.load_state_dict(model, GPT(config, seed=4).state_dict())
            own = sp.parallelize(GPT(config, seed=4))
            grads = []
            for each in (model, own):
                tokens, targets = (one[0] for one in data(CASES["gpt"], 0, 0))
                sp.next_token_loss(each(tokens), targets, vocab=config.vocab).backward()
                grads.append({name: p.grad for name, p in each.named_parameters()})
            assert_close(*grads, rtol=0, atol=0)

        lab.run(meta, 3)


def test_dice_are_the_ranks_own_and_thrown_again_alike():
    config = replace(CASES["gpt"].config, dropout=0.3)

    def dice():
        gradients = []
        for what in ("none", "selective", "full"):
            torch.manual_seed(dist.get_rank())
            model = activations.recompute(sp.parallelize(GPT(config), gather_again=True), what)
            tokens, targets = (each[0] for each in data(CASES["gpt"], 0, 0))
            sp.next_token_loss(model(tokens), targets, vocab=config.vocab).backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        drop = tp.OwnDice(torch.nn.Dropout(0.5), None)
        torch.manual_seed(1)
        return [torch.equal(gradients[0], each) for each in gradients], drop(torch.ones(64)), torch.rand(1)

    (same, mask, after), (same_1, mask_1, after_1) = lab.run(dice, 2)
    assert same == same_1 == [True] * 3
    assert (mask != mask_1).any()
    assert after == after_1


def test_bad_input_is_named_before_anything_is_sent():
    def errors():
        model, said = sp.parallelize(GPT(CASES["gpt"].config)), []
        calls = (
            lambda: model(torch.zeros(1, 8, dtype=torch.int64)),
            lambda: sp.scatter_sum(torch.zeros(1, 4, 2)),
            lambda: sp.parallelize(model),
            lambda: sp.parallelize(torch.nn.Linear(2, 2)),
        )
        for call in calls:
            with Recorder() as recorder, pytest.raises(ValueError) as error:
                call()
            said.append((str(error.value), len(recorder.log)))
        return said

    words = ["tokens_bs must have a multiple of the number of ranks in group, 3, of positions, not 8",
             "part_bsh must have a multiple", "model must have its weights whole", "model must be a GPT"]  # fmt: skip
    for rank in lab.run(errors, 3):
        for (said, sent), expected in zip(rank, words, strict=True):
            assert said.startswith(expected)
            assert sent == 0
