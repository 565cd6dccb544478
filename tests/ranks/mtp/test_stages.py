"""Heads at the end of a pipeline, and with a vocabulary that is cut over ranks: the gradients of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab, theory
from dtlib.ranks import mtp, pp, tp
from dtlib.ranks.model import GPT, GPTConfig

CONFIG = GPTConfig(num_layers=4, hidden=16, num_heads=4, seq=8, vocab=21, dtype=torch.float64)
MIXED = replace(CONFIG, num_experts=4, top_k=2, first_dense=2, num_kv_heads=2, rms_norm=True, swiglu=True, rotary=True)
KINDS = {"independent": mtp.IndependentHeads, "sequential": mtp.SequentialModules}
N, BATCH, MICRO = 3, 4, 2
CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # as in test_heads


def data() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(21, (BATCH, 9), generator=torch.Generator().manual_seed(2))
    return drawn[:, :-1].clone(), drawn[:, 1:].clone()


def whole(kind: str, config: GPTConfig = CONFIG) -> tuple[float, dict[str, torch.Tensor]]:
    heads = KINDS[kind](GPT(config), N, weights=[1, 0.5, 0.25])
    loss = heads(*data())
    loss.backward()
    return loss.item(), {name: each.grad for name, each in heads.named_parameters()}


def piped(kind: str, schedule: str, tied: bool = True, adds_up: bool = True, of: GPTConfig = CONFIG):
    """The gradients that this rank has, by their names in one process: cut as theory says."""
    p, rank = dist.get_world_size(), dist.get_rank()
    config = replace(of, tied=tied)
    heads = KINDS[kind](GPT(config), N, weights=[1, 0.5, 0.25])
    costs = theory.mtp.trunk_costs(config.architecture, N, kind, again=True)
    stages = mtp.cut(heads, p, theory.mtp.best_stages(costs, p))
    shared = heads.model.token_embedding.weight if rank in (0, p - 1) and adds_up else None
    if kind == "independent" and not tied:
        shared = None
    plan = theory.pp.SCHEDULES[schedule](p, MICRO)
    own = {rank: stages[rank]}
    run = pp.Pipeline(own, plan, width=16, dtype=torch.float64, loss=stages[-1].loss, tied=shared)
    loss = run.step(*data())
    names = {id(each): name for name, each in heads.named_parameters()}
    held = {names[id(each)]: each.grad for each in stages[rank].parameters()}
    return loss.item(), held, float(run.evaluate(*data()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("p", "schedule"), [(1, "1F1B"), (2, "1F1B"), (2, "ZB-H1"), (3, "GPipe"), (4, "1F1B")])
def test_a_pipeline_has_the_gradients_of_one_process(kind, p, schedule):
    wanted_loss, wanted = whole(kind)
    seen = set()
    for loss, held, evaluated in lab.run(piped, p, args=(kind, schedule)):
        assert loss == pytest.approx(wanted_loss, rel=1e-12)
        assert evaluated == pytest.approx(wanted_loss, rel=1e-12)
        assert_close(held, {name: wanted[name] for name in held}, **CLOSE)
        seen |= set(held)
    assert seen == set(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_of_layers_with_experts_and_without_has_them_too(kind):
    _, wanted = whole(kind, MIXED)
    for _, held, _ in lab.run(piped, 2, args=(kind, "1F1B", True, True, MIXED)):
        assert_close(held, {name: wanted[name] for name in held}, **CLOSE)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["gpt", "experts"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [2, 4])
def test_each_stage_computes_what_theory_says(kind, config, again, p):
    """Products counted by torch, forward and backward, stage by stage."""
    config = replace(config, written_out=True)
    costs = theory.mtp.trunk_costs(config.architecture, N, kind, again=again)
    counts = theory.mtp.best_stages(costs, p)
    stages, found = mtp.cut(KINDS[kind](GPT(config), N), p, counts, in_turn=again), []
    x, targets = data()
    for stage in stages:
        with FlopCounterMode(display=False) as counter:
            y = stage(x)
            end = stage.loss(y, targets) if stage is stages[-1] else y.sum()
            if end.requires_grad:  # a first stage without a layer would have only the embedding
                end.backward()
        found.append(counter.get_total_flops())
        x = y.detach().requires_grad_()
    unit = sum(found) / sum(costs)
    assert [each / unit for each in found] == pytest.approx(theory.mtp.stage_costs(costs, counts), rel=1e-9)


def test_an_embedding_that_the_last_stage_reads_needs_both_gradients():
    _, wanted = whole("sequential", replace(CONFIG, tied=False))
    name = "model.token_embedding.weight"
    for _, held, _ in lab.run(piped, 2, args=("sequential", "1F1B", False)):
        assert_close(held[name], wanted[name], **CLOSE)
    for _, held, _ in lab.run(piped, 2, args=("sequential", "1F1B", False, False)):
        with pytest.raises(AssertionError):
            assert_close(held[name], wanted[name], **CLOSE)


def split(kind: str, of: GPTConfig = CONFIG):
    heads = mtp.parallelize(KINDS[kind](GPT(of, seed=dist.get_rank()), N, weights=[1, 0.5, 0.25]))
    found = {}
    for way in ("one graph", "in turn"):
        heads.zero_grad()
        loss = heads.backward(*data()) if way == "in turn" else heads(*data())
        if way == "one graph":
            loss.backward()
        found[way] = loss.item(), {name: each.grad.clone() for name, each in heads.named_parameters()}
    widths = [heads.logits(k, state).shape[-1] for k, state in enumerate(heads.states(*data()))]
    return found, widths, list(tp.vocabulary_of(21))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "config"), [(1, CONFIG), (2, CONFIG), (4, CONFIG), (2, MIXED)])
def test_a_vocabulary_cut_over_ranks_has_the_same_loss_and_gradients(kind, t, config):
    loss, wanted = whole(kind, config)
    for found, widths, mine in lab.run(split, t, args=(kind, config)):
        assert widths == [len(mine)] * N
        for way, (each, held) in found.items():
            assert each == pytest.approx(loss, rel=1e-10), way
            assert held.keys() == wanted.keys()
            same = {name for name in held if held[name].shape == wanted[name].shape}
            assert_close({name: held[name] for name in same}, {name: wanted[name] for name in same}, **CLOSE)
            rows = held["model.token_embedding.weight"]
            assert_close(rows, wanted["model.token_embedding.weight"][mine], **CLOSE)
    assert t == 1 or len(same) < len(wanted)


def test_the_last_stage_has_one_set_of_logits_in_turn():
    heads = mtp.IndependentHeads(GPT(replace(CONFIG, vocab=4096)), N)
    targets = torch.randint(4096, (BATCH, 8))
    kept = {}
    for in_turn in (False, True):
        last = mtp.cut(heads, 1, in_turn=in_turn)[0]
        trunk = last(targets)
        with lab.memory(last) as memory:
            loss = last.loss(trunk, targets)
            kept[in_turn] = memory.now.activations
            loss.backward()
    one = theory.mtp.logits_bytes(BATCH, 8, 4096, 1, element_bytes=8)
    assert kept[False] > N * one
    assert kept[True] < one


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda heads: mtp.cut(heads, 2, [1, 1]), "layers must be 2 numbers that add up to 4"),
        (lambda heads: mtp.cut(heads, 2, [5, -1]), "layers must be 2 numbers that add up to 4"),
        (
            lambda heads: mtp.cut(heads, 1)[0].loss(torch.zeros(1, 2, 16).double(), torch.tensor([[1, -100]])),
            "targets must all count",
        ),
        (mtp.parallelize, "group needs torch.distributed"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(mtp.SequentialModules(GPT(CONFIG), 2))
