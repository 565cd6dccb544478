"""A split GPT against one process: losses, gradients, norms, moments, weights; and wrong ones, which are refused."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import activations, dp, tp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, MLP, next_token_loss
from dtlib.ranks.shared import replicas
from dtlib.ranks.tp import blocks, gpt, linear, vocabulary

from .judge import CASES, CLOSE, GPT_CONFIG, Parted, data, fits, judge, one_process, patched, right, train


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_equals_one_process(t):
    names = [name for name, case in CASES.items() if fits(case, t)]
    assert len(names) >= 3
    for compare in judge(t, t, [(name, right) for name in names]):
        compare()


def test_two_groups_do_not_meet():
    for compare in judge(4, 2, [("gpt", right), ("one key", right)]):
        compare()


# --- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 2), (2, 1), (1, 4)])
def test_a_checkpoint_is_loaded_at_another_number_of_ranks(before, after):
    name = "one key"
    case = CASES[name]

    def on_a_rank(steps, saved):
        return train(Parted(case, dist.get_rank(), None), case, 0, steps, saved)

    first = lab.run(on_a_rank, before, args=(range(1), None))[-1]
    assert first["weights"].keys() == GPT(case.config).state_dict().keys()
    oracle = one_process(case, 0, 0)
    for rank in lab.run(on_a_rank, after, args=(range(1, 3), first)):
        for what in ("weights", "exp_avg", "exp_avg_sq"):
            assert_close(rank[what], oracle[what], **CLOSE)


def test_a_model_is_split_before_it_has_memory():
    case = CASES["llama"]
    whole = GPT(case.config, seed=4)
    tokens, targets = (each[0] for each in data(case, 0, 0))

    def on_a_rank():
        with torch.device("meta"):
            model = GPT(case.config)
        tp.parallelize(model).to_empty(device="cpu")
        tp.load_state_dict(model, whole.state_dict())
        loss = tp.next_token_loss(model(tokens), targets, vocab=case.config.vocab)
        return loss.item(), sum(parameter.nbytes for parameter in model.parameters())

    full_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    for loss, own_bytes in lab.run(on_a_rank, 3):
        assert_close(loss, next_token_loss(whole(tokens), targets).item(), **CLOSE)
        assert own_bytes < full_bytes / 2


# --- under data parallelism ----------------------------------------------------------------------------------------


def test_beside_data_parallelism_it_is_one_process_on_both_batches():
    case = CASES["gpt"]

    def on_a_rank():
        mesh = Mesh({"dp": 2, "tp": 2})
        replica = mesh.coordinates()["dp"]
        model = tp.parallelize(GPT(case.config, seed=dist.get_rank()), mesh.group("tp"))
        wrapped = dp.BucketedDataParallel(model, group=mesh.group("dp"))
        tokens, targets = (each[0] for each in data(case, 0, replica))
        loss = tp.next_token_loss(
            wrapped(tokens), targets, vocab=case.config.vocab, group=mesh.group("tp"), reduction="sum"
        )
        loss.backward()
        return tp.unsplit(model, {name: parameter.grad for name, parameter in model.named_parameters()})

    model = GPT(case.config)
    for replica in range(2):
        tokens, targets = (each[0] for each in data(case, 0, replica))
        (summed_loss(model(tokens), targets) / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients in lab.run(on_a_rank, 4):
        assert_close(gradients, expected, **CLOSE)


def summed_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# --- the version on the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1, 2, 3])
def test_the_version_on_the_page(t):
    mlp, x_bsh = MLP(GPT_CONFIG), torch.randn(2, 3, 48, dtype=torch.float64, requires_grad=True)
    nn.init.normal_(mlp.down.bias)
    y_bsh = mlp(x_bsh)
    y_bsh.sin().sum().backward()
    expected = [y_bsh, x_bsh.grad, mlp.up.weight.grad, mlp.up.bias.grad, mlp.down.weight.grad, mlp.down.bias.grad]

    def on_a_rank():
        again_bsh, split = x_bsh.detach().requires_grad_(), tp.split_mlp(mlp)
        result_bsh = split(again_bsh)
        result_bsh.sin().sum().backward()
        return [result_bsh.detach(), again_bsh.grad, *(parameter.grad for parameter in split.parameters())]

    for rank, found in enumerate(lab.run(on_a_rank, t)):
        mine = [each.tensor_split(t, dim)[rank] for each, dim in zip(expected[2:5], (0, 0, 1), strict=True)]
        assert_close(found, [y_bsh.detach(), x_bsh.grad, *mine, mlp.down.bias.grad], **CLOSE)


# --- wrong implementations, each of which the judge must refuse -----------------------------------------------------


def nothing_sent_backward():
    """The column-parallel layer is a plain one, so the gradient of its input lacks the other ranks' parts."""
    return patched(linear.ColumnParallelLinear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))


def bias_added_t_times():
    def forward(self, x):
        return tp.sum_over_ranks(F.linear(x, self.weight, self.bias), self.group)

    return patched(linear.RowParallelLinear, "forward", forward)


def nothing_sent_forward():
    return patched(linear.RowParallelLinear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))


def summed_in_both_directions():
    """The adjoint of a sum over ranks, if each rank had a loss of its own: the gradient comes out t times."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(context, part, group):
            context.group, total = group, part.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(context, gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=context.group)
            return gradient, None

    return patched(vocabulary, "sum_over_ranks", Both.apply)


@contextmanager
def shared_keys_not_summed():
    make = linear.ColumnParallelLinear.__init__

    def alone(self, *args, shared_rows=0, **kwargs):
        make(self, *args, **kwargs)

    with patched(linear.ColumnParallelLinear, "__init__", alone):
        yield


@contextmanager
def no_group():
    """The sums of the layers are over all ranks, which have other data."""
    start = linear._start_sum
    with patched(linear, "_start_sum", lambda tensor, group: start(tensor, None)):
        yield


def no_broadcast():
    return patched(replicas, "broadcast", lambda tensors, group: None)


def what_all_have_counted_by_all():
    def clip(model, max_norm, *, group):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        total = sum(gradient.square().sum() for gradient in gradients)
        dist.all_reduce(total, group=group)
        for gradient in gradients:
            gradient.mul_((max_norm / (total.sqrt() + 1e-6)).clamp(max=1))
        return total.sqrt()

    return patched(tp, "clip_grad_norm", clip)


def largest_logit_of_the_rank():
    """A maximum of its own on each rank: the exponentials have no common scale."""
    reduce = vocabulary._all_reduce

    def only_sums(tensor, group, op=dist.ReduceOp.SUM):
        if op is dist.ReduceOp.SUM:
            reduce(tensor, group)

    return patched(vocabulary, "_all_reduce", only_sums)


MUTANTS = {
    "backward all-reduce missing": ("gpt", nothing_sent_backward, "gradients"),
    "forward all-reduce missing": ("gpt", nothing_sent_forward, "losses"),
    "bias added t times": ("gpt", bias_added_t_times, "losses|gradients"),
    "embedding's gradient summed": ("gpt", summed_in_both_directions, "gradients"),
    "shared keys not summed": ("one key", shared_keys_not_summed, "gradients"),
    "group missing": ("gpt", no_group, "losses"),
    "no broadcast": ("gpt", no_broadcast, "losses"),
    "norm of what all have counted t times": ("gpt", what_all_have_counted_by_all, "norms"),
    "largest logit of the rank alone": ("gpt", largest_logit_of_the_rank, "losses"),
}


@functools.cache
def comparisons():
    return dict(zip(MUTANTS, judge(4, 2, [(case, mutant) for case, mutant, _ in MUTANTS.values()]), strict=True))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_judge_refuses(name):
    with pytest.raises(AssertionError, match=f"^({MUTANTS[name][2]}):"):
        comparisons()[name]()


# --- dropout ---------------------------------------------------------------------------------------------------


def masks(wrong):
    """In a rank: the masks of dropout of two forward passes, on what all ranks have and on what each has of its own."""
    torch.manual_seed(dist.get_rank())  # dice of its own, which only `parallelize` makes common
    config = replace(GPT_CONFIG, dropout=0.3, written_out=True)
    real, everywhere, own = torch.native_dropout, [], []

    def dropout(x, p, train):
        y, mask = real(x, p, train)
        (own if mask.dim() == 4 else everywhere).append(mask)
        return y, mask

    with wrong():
        model = tp.parallelize(GPT(config))
        losses = []
        with patched(torch, "native_dropout", dropout):
            for step in range(2):
                tokens, targets = (each[0] for each in data(CASES["gpt"], step, 0))
                losses.append(tp.next_token_loss(model(tokens), targets, vocab=config.vocab).item())
    return everywhere, own, losses, torch.rand(3)


def check_dice(wrong, t=3):
    everywhere, own, losses, dice = zip(*lab.run(masks, t, args=(wrong,)), strict=True)
    for rank in range(1, t):
        assert_close(everywhere[rank], everywhere[0], rtol=0, atol=0, msg=lambda m: f"what all have: {m}")
        assert_close(dice[rank], dice[0], rtol=0, atol=0)
        # float32 sums come to all ranks alike
        assert losses[rank] == losses[0]
        for mine, theirs in zip(own[rank], own[0], strict=True):
            assert (mine != theirs).any(), "what is split: masks must differ from rank to rank"
    assert len(own[0]) == len({mask.numpy().tobytes() for mask in own[0]}), "a mask must not come twice"
    dropped = torch.cat([mask.flatten() for rank in own for mask in rank]).logical_not().double().mean()
    assert abs(dropped - 0.3) < 0.05  # 4608 entries: seven deviations


def test_dropout_throws_common_dice_where_tensors_are_common_and_own_ones_elsewhere():
    check_dice(right)


def test_what_is_computed_again_throws_the_same_dice():
    config = replace(GPT_CONFIG, dropout=0.3)

    def on_a_rank():
        gradients = []
        for what in ("none", "selective", "full"):
            torch.manual_seed(dist.get_rank())
            model = activations.recompute(tp.parallelize(GPT(config)), what)
            tokens, targets = (each[0] for each in data(CASES["gpt"], 0, 0))
            tp.next_token_loss(model(tokens), targets, vocab=config.vocab).backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        return [torch.equal(gradients[0], each) for each in gradients]

    assert lab.run(on_a_rank, 2) == [[True] * 3] * 2


@contextmanager
def one_stream():
    with patched(blocks.OwnDice, "forward", lambda self, x, *others: self.module(x, *others)):
        yield


def own_streams_everywhere():
    return patched(gpt, "_throw_the_same_dice", lambda device, group: None)


@pytest.mark.parametrize(("wrong", "words"), [(one_stream, "what is split"), (own_streams_everywhere, "what all have")])
def test_wrong_dice_are_refused(wrong, words):
    with pytest.raises(AssertionError, match=words):
        check_dice(wrong)
