"""What the stages refuse, by name, and before anything is sent where it can be seen before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import dp, zero

from .small import STAGES, every_stage, fresh, make_sgd, mine, network, rows, train


@every_stage
def test_bad_arguments_are_named_before_anything_is_sent(stage):
    make = STAGES[stage]
    a_model = network()
    cases = [
        (lambda: make(3, make_sgd), TypeError, "module must be a torch.nn.Module, not int"),
        (lambda: make(network(), 3), TypeError, "make_optimizer must make an optimizer"),
        (lambda: make(network(), lambda groups: 3), TypeError, "make_optimizer must return .* not int"),
        (lambda: make(network(), make_sgd, param_groups=[3]), TypeError, "param_groups must be dictionaries"),
        (lambda: make(network(), make_sgd, master_dtype=torch.int8), ValueError, "master_dtype must be"),
        (lambda: make(network(), make_sgd, master_dtype="float32"), ValueError, "master_dtype must be"),
        (lambda: make(network().requires_grad_(False), make_sgd), ValueError, "must have a parameter that requires"),
    ]
    first = [{"params": a_model[0].weight}]
    cases += [
        (lambda: make(a_model, make_sgd, param_groups=first), ValueError, "must hold every .* misses '0.bias'"),
        (lambda: make(a_model, make_sgd, param_groups=first * 2), ValueError, "names '0.weight' twice"),
        (lambda: make(network(), make_sgd, param_groups=first), ValueError, "must hold parameters of module"),
    ]
    if stage < 3:
        cases.append((lambda: make(network(), make_sgd, bucket_bytes=0), ValueError, "bucket_bytes must be at least 1"))
    else:
        cases += [
            (lambda: make(network(), make_sgd, prefetch=-1), ValueError, "prefetch must be at least 0, not -1"),
            (lambda: make(network(), make_sgd, units=[nn.Tanh()]), ValueError, "units must be parts of module"),
            (lambda: make(network(), make_sgd, units=["0"]), TypeError, "units must be modules, not '0'"),
        ]

    def all_of_them():
        for job, error, words in cases:
            with lab.SendCounter() as seen, pytest.raises(error, match=words):
                job()
            assert seen.sent_bytes == 0
            assert not seen.collectives

    lab.run(all_of_them, 2)


@every_stage
def test_modules_that_differ_between_ranks(stage):
    with pytest.raises(lab.RankError, match=r"module must be alike on all ranks[\s\S]*'0.weight'"):
        lab.run(lambda: STAGES[stage](network(8 + dist.get_rank()), make_sgd), 2)


@every_stage
def test_misuse_is_told(stage):
    def job():
        wrapped = STAGES[stage](fresh(), make_sgd)
        with wrapped.no_sync():
            wrapped(mine(rows(0))).mean().backward()
        with pytest.raises(RuntimeError, match=r"'0.weight'.* are still local"):
            wrapped.optimizer.step()
        with pytest.raises(ValueError, match="closure must be None"):
            wrapped.optimizer.step(lambda: None)
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a Zero wrapper cannot be copied or pickled"):
                call(wrapped)
        wrapped.module[2].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"'2.bias' changed after the module was wrapped"):
            wrapped(mine(rows(0)))

    lab.run(job, 2)


def test_an_output_that_hides_its_tensors():
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    class Hides(nn.Linear):
        def forward(self, x):
            return Box(super().forward(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Hides(8, 8, dtype=torch.float64)])

        def forward(self, x):
            return self.layers[0](x).tensor

    def job():
        with pytest.raises(TypeError, match=r"the output of layers.0 hides its tensors in a Box"):
            zero.Zero(Outer(), make_sgd, stage=3)(rows(0))

    lab.run(job, 1)


@every_stage
def test_a_module_whose_weights_are_split(stage):
    def job():
        model = fresh()
        wrapped = zero.Zero(model, make_sgd, stage=3)
        for module in (model, nn.Sequential(model), model[0]):
            with pytest.raises(ValueError, match="module must have its weights, and a stage 3 of ZeRO has split them"):
                STAGES[stage](module, make_sgd)
        return train(wrapped)["0.weight"].shape

    assert lab.run(job, 2) == [torch.Size([8, 8])] * 2


def test_sparse_gradients_are_refused_by_name():
    def job():
        wrapped = zero.Zero(nn.Embedding(5, 3, sparse=True), make_sgd, stage=2)
        wrapped(torch.tensor([1])).sum().backward()

    with pytest.raises(lab.RankError, match="the gradient of 'weight' is sparse"):
        lab.run(job, 1)


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group: call this in a rank of lab.run"):
        zero.Zero(network(), make_sgd, stage=1)


def test_a_stage_is_a_data_parallel_wrapper():
    def job():
        wrapped = zero.Zero(fresh(), make_sgd, stage=3)
        assert isinstance(wrapped, dp.DataParallel)
        with wrapped.gathered() as module:
            assert module[0].weight.shape == (8, 8)
            assert torch.equal(module(rows(0)), fresh()(rows(0)))
        assert sum(p.numel() for p in wrapped.parameters()) < 8 * 8 * 2
        with wrapped.gathered(write=True) as module, torch.no_grad():
            module[0].weight.fill_(2.0)
        assert (wrapped.state_dict()["0.weight"] == 2).all()
        return wrapped.buckets

    assert lab.run(job, 2) == [[["4.weight", "4.bias"], ["2.weight", "2.bias"], ["0.weight", "0.bias"]]] * 2
