"""Losses of heads one after another are those of one graph: values, every gradient, and what is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from dtlib import lab, theory
from dtlib.ranks import mtp
from dtlib.ranks.model import GPT, IGNORED, GPTConfig, next_token_loss

CONFIG = GPTConfig(num_layers=2, hidden=32, num_heads=4, seq=12, vocab=23, dtype=torch.float64)
LLAMA = replace(CONFIG, num_kv_heads=2, rms_norm=True, swiglu=True, rotary=True, biases=False, tied=False)
MIXED = replace(LLAMA, num_experts=5, top_k=2, num_shared=1, first_dense=1)
CONFIGS = {"gpt": CONFIG, "llama": LLAMA, "experts": MIXED, "experts of a gpt": replace(CONFIG, num_experts=3, top_k=1)}
KINDS = {"independent": mtp.IndependentHeads, "sequential": mtp.SequentialModules}


def data(vocab: int = 23, b: int = 3, s: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(vocab, (b, s + 1), generator=torch.Generator().manual_seed(5))
    targets = drawn[:, 1:].clone()
    targets[0, 3:5] = IGNORED
    return drawn[:, :-1].clone(), targets


def gradients(heads: mtp.Heads, *, in_turn: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    heads.zero_grad()
    if in_turn:
        loss = heads.backward(*data())
    else:
        loss = heads(*data())
        loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in heads.named_parameters()}


# float64: the same products, added up in another order, so an error of a few 2⁻⁵³ of the largest gradient, far below
# any factor such as n. 1e-12 leaves room for that.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
def test_heads_in_turn_have_the_gradients_of_one_graph(kind, config, n):
    heads = KINDS[kind](GPT(config), n, weights=[1.0, 0.3, 0.2, 0.7][:n])
    loss, wanted = gradients(heads, in_turn=False)
    found_loss, found = gradients(heads, in_turn=True)
    assert_close(found_loss, loss, **CLOSE)
    assert_close(found, wanted, **CLOSE)
    # a lone choice has weight 1 whatever its score: its router learns nothing
    assert all(each.abs().max() > 0 for name, each in wanted.items() if "router" not in name or config.top_k > 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_added_to_what_is_there(kind):
    heads = KINDS[kind](GPT(CONFIG), 3)
    _, once = gradients(heads, in_turn=True)
    heads.backward(*data())
    assert_close(
        {name: each.grad for name, each in heads.named_parameters()}, {k: 2 * v for k, v in once.items()}, **CLOSE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_head_is_the_plain_model(kind):
    tokens, targets = data()
    heads = KINDS[kind](GPT(CONFIG), 1)
    assert_close(heads(tokens, targets), next_token_loss(GPT(CONFIG)(tokens), targets))


@pytest.mark.parametrize("kind", KINDS)
def test_each_head_predicts_its_own_token_and_sees_none_that_is_ahead(kind):
    """By the definition, position by position: head k at i has t[i + 1 + k] as target, and does not change with it."""
    n, (tokens, targets) = 3, data()
    heads = KINDS[kind](GPT(CONFIG), n)
    text = torch.cat([tokens, targets[:, -1:]], 1)
    sums = []
    for k, state in enumerate(heads.states(tokens, targets)):
        scores = heads.logits(k, state).log_softmax(-1)
        for i in range(12 - k):
            for row in range(3):
                counts = targets[row, i + k] != IGNORED
                sums.append(-scores[row, i, text[row, i + 1 + k]] * counts)
    assert_close(heads(tokens, targets), torch.stack(sums).sum() / (targets != IGNORED).sum())
    changed = text.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 23
    pairs = zip(heads.states(tokens, targets), heads.states(changed[:, :-1], changed[:, 1:]), strict=True)
    for k, (one, two) in enumerate(pairs):
        reads = 8 - (k if kind == "sequential" else 0)  # position i reads tokens up to i, or i + k
        assert_close(one[:, :reads], two[:, :reads])
        assert (one[:, reads] - two[:, reads]).abs().max() > 1e-6


def test_shifted_targets_end_in_nothing():
    targets = torch.arange(8).view(2, 4)
    assert mtp.ahead(targets, 0).tolist() == targets.tolist()
    assert mtp.ahead(targets, 1).tolist() == [[1, 2, 3, IGNORED], [5, 6, 7, IGNORED]]
    assert mtp.ahead(targets, 9).tolist() == [[IGNORED] * 4] * 2


def one_head_too_few(targets, k):
    return KEPT(targets, max(0, k - 1))


KEPT = mtp.ahead


def trunk_again(heads, tokens, targets, share=1.0):
    """The loop of the page that goes through the trunk after each head, or once with a `share` of the sum."""
    trunk = heads.trunk(tokens)
    leaf = trunk.detach().requires_grad_()
    for k, state in enumerate(heads.states_behind(leaf, targets)):
        (heads.sum_of_losses(k, state, targets) / (targets != IGNORED).sum()).backward()
        if share == 1:
            trunk.backward(leaf.grad, retain_graph=True)
    if share < 1:
        trunk.backward(leaf.grad * share)


def test_mutants_are_told(monkeypatch):
    heads = mtp.IndependentHeads(GPT(CONFIG), 3)
    _, wanted = gradients(heads, in_turn=False)
    name = "model.blocks.0.attention.out.weight"  # of the trunk
    for share in (1, 1 / 3):  # the trunk's gradient counted again, or averaged: that of the heads is right
        heads.zero_grad()
        trunk_again(heads, *data(), share=share)
        assert_close(heads.blocks[0].attention.out.weight.grad, wanted["blocks.0.attention.out.weight"], **CLOSE)
        with pytest.raises(AssertionError):
            assert_close(heads.get_parameter(name).grad, wanted[name], **CLOSE)
    monkeypatch.setattr("dtlib.ranks.mtp.heads.ahead", one_head_too_few)
    _, shifted = gradients(heads, in_turn=True)
    with pytest.raises(AssertionError):
        assert_close(shifted, wanted, **CLOSE)


# --- what is held, and what is computed ------------------------------------------------------------------------

WIDE = GPTConfig(num_layers=2, hidden=16, num_heads=2, seq=32, vocab=4096)


def peak(kind: str, n: int, *, in_turn: bool) -> int:
    heads = KINDS[kind](GPT(WIDE), n)
    tokens = torch.randint(WIDE.vocab, (4, 33))
    for each in heads.parameters():
        each.grad = torch.zeros_like(each)
    with lab.memory(heads) as memory:
        if in_turn:
            heads.backward(tokens[:, :-1], tokens[:, 1:])
        else:
            heads(tokens[:, :-1], tokens[:, 1:]).backward()
    return memory.peak


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_head_holds_a_set_of_logits_more_in_one_graph_and_none_in_turn(kind):
    """Between 2 and 4 heads, so that what n = 1 lacks is in both. The layers are 1/50 of the logits."""
    sets = theory.mtp.logits_bytes(4, 32, WIDE.vocab, 4) - theory.mtp.logits_bytes(4, 32, WIDE.vocab, 2)
    joint = peak(kind, 4, in_turn=False) - peak(kind, 2, in_turn=False)
    parameters = 2 * theory.mtp.extra_parameters(WIDE.architecture, 2, kind) * 4 * 2  # and their gradients
    assert joint - parameters == pytest.approx(sets, rel=0.15)
    apart = peak(kind, 4, in_turn=True) - peak(kind, 2, in_turn=True)
    assert apart - parameters < 0.15 * sets


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_operations_are_those_of_theory(kind, config):
    config = replace(config, written_out=True)
    tokens, targets = data(b=1)
    counted, held = {}, {}
    for n in (1, 4):
        heads = KINDS[kind](GPT(config), n)
        held[n] = sum(each.numel() for each in heads.parameters())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            heads(tokens, targets)
        counted[n] = counter.get_total_flops() / 12
    assert held[4] - held[1] == theory.mtp.extra_parameters(config.architecture, 4, kind)
    assert counted[4] - counted[1] == theory.mtp.extra_flops_per_token(config.architecture, 4, kind, seq=12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mtp.IndependentHeads(GPT(CONFIG), 0), "predicted must be at least 1, not 0"),
        (lambda: mtp.IndependentHeads(GPT(CONFIG), 2, weights=[1.0]), "weights must be 2 numbers"),
        (lambda: mtp.SequentialModules(GPT(CONFIG), 2, weights=[1.0, -1.0]), "weights must be"),
        (lambda: mtp.IndependentHeads(GPT(CONFIG), 2)(*data(s=13)), "at most seq=12 columns"),
        (lambda: mtp.IndependentHeads(GPT(CONFIG), 2).backward(*data(s=13)), "at most seq=12 columns"),
        (
            lambda: mtp.SequentialModules(GPT(CONFIG), 2)(data()[0], data()[1] * 0 + IGNORED),
            "targets must have one",
        ),
        (lambda: mtp.ahead(torch.zeros(1, 2), -1), "k must be at least 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
