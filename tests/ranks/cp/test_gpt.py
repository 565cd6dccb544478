"""A GPT whose tokens lie on several ranks against one process, and wrong ones, which the judge refuses."""

from __future__ import annotations

from contextlib import nullcontext as right
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from dtlib import lab
from dtlib.ranks import activations, cp
from dtlib.ranks.cp import gpt, ring, tiles
from dtlib.ranks.model import GPT, next_token_loss
from dtlib.theory.cp import pieces
from tests.ranks.tp import judge
from tests.ranks.tp.judge import CLOSE, Case, Whole, patched


@dataclass(frozen=True)
class Cut(Case):
    """A case with the order of its tokens and the way of attention; with 13 and 11 tokens no ranks have equal parts."""

    order: str = "zigzag"
    way: str = "ring"


def cut(name, **changes):
    case = judge.CASES[name]
    odd = {"config": replace(case.config, seq=14), "seq": 13 + case.offset, "chunks": 1}
    return Cut(**vars(case) | odd | changes)


CASES = {
    "gpt": cut("gpt", order="contiguous"),
    "llama": cut("llama", offset=3, seq=14),
    "one key": cut("one key"),
    "frozen": cut("frozen"),
    "two keys": cut("two keys", way="ulysses"),
    "gpt by heads": cut("gpt", order="contiguous", way="ulysses"),
}


class Split(Whole):
    """A rank of a group that has a part of every sequence."""

    def __init__(self, case, seed, group):
        super().__init__(case, seed)
        self.group, self.order = group, case.order
        cp.parallelize(self.model, group, order=case.order, way=case.way)

    def loss(self, logits, targets):
        return cp.next_token_loss(logits, targets, group=self.group, order=self.order)


@pytest.mark.parametrize("n", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.soak)])
def test_equals_one_process(n):
    names = [name for name, case in CASES.items() if case.way == "ring" or case.config.num_heads % n == 0]
    assert len(names) >= 4
    for compare in judge.judge(n, n, [(name, right) for name in names], CASES, Split):
        compare()


def test_two_groups_do_not_meet():
    for compare in judge.judge(4, 2, [("llama", right), ("two keys", right)], CASES, Split):
        compare()


# --- wrong implementations, each of which the judge must refuse -----------------------------------------------------


def no_sum_of_the_weights_gradients():
    return patched(gpt, "_summed", lambda gradient, group: gradient)


def positions_from_0_on_every_rank():
    enter = gpt.Context.enter

    def wrong(self, *batch):
        own, where = enter(self, *batch)
        return own, where | {"offset": torch.zeros_like(where["offset"])}

    return patched(gpt.Context, "enter", wrong)


def averaged_instead_of_merged():
    def wrong(out, total, q, kv, hidden):
        mine, seen = torch.zeros_like(out), torch.full_like(total, -torch.inf)
        tiles.merge_tile(mine, seen, q, kv, hidden)
        first = total == -torch.inf
        out.copy_(torch.where(first, mine, (out + mine) / 2))
        total.copy_(torch.logaddexp(total, seen))

    return patched(ring, "merge_tile", wrong)


def gradients_of_keys_stay_where_they_were_found():
    backward = ring._Ring.backward

    def wrong(context, dout):
        dq, *_, a, b, c = backward(context, dout)
        rank = context.peers.rank
        alone = SimpleNamespace(
            saved_tensors=context.saved_tensors, peers=None, ranges=[context.ranges[rank]], mask=context.mask
        )
        _, dk, dv, *_ = backward(alone, dout)
        return dq, dk, dv, a, b, c

    return patched(ring._Ring, "backward", staticmethod(wrong))


def a_mean_of_the_ranks_means():
    def wrong(logits, targets, *, group=None, order="zigzag"):
        own = cp.Layout(targets.shape[1], group, order).take(targets)
        return cp.gpt.sum_over_ranks(cp.gpt.whole_model.next_token_loss(logits, own), group) / dist.get_world_size(
            group
        )

    return patched(cp, "next_token_loss", wrong)


MUTANTS = {
    no_sum_of_the_weights_gradients: "gradients",
    positions_from_0_on_every_rank: "losses",
    averaged_instead_of_merged: "losses",
    gradients_of_keys_stay_where_they_were_found: "gradients",
    a_mean_of_the_ranks_means: "losses",
}


def test_wrong_ones_are_refused():
    compared = judge.judge(3, 3, [("llama", m) for m in MUTANTS], CASES, Split)
    for compare, what in zip(compared, MUTANTS.values(), strict=True):
        with pytest.raises(AssertionError, match=f"^{what}"):
            compare()


# --- packed documents, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_a_packed_document_is_read_as_if_it_were_alone(way):
    """Rotary positions matter by their distance alone, so each document may be read by itself, from 0."""
    config = replace(judge.LLAMA, seq=14, num_kv_heads=6)
    tokens_bs = torch.randint(config.vocab, (2, 14), generator=torch.Generator().manual_seed(1))
    ends = (5, 9)  # of the first document in each sequence
    documents_bs = torch.stack([(torch.arange(14) >= end).long() for end in ends])

    def job():
        model = cp.parallelize(GPT(config), way=way)
        return model(tokens_bs, documents_bs=documents_bs).detach()

    logits_bsv = lab.run(job, 3)
    with torch.no_grad():
        model = GPT(config)
        alone = [
            torch.cat([model(x[None, :end]), model(x[None, end:])], 1) for x, end in zip(tokens_bs, ends, strict=True)
        ]
    order = [p for own in pieces(14, 3) for each in own for p in each]
    assert_close(torch.cat(logits_bsv, 1), torch.cat(alone)[:, order], **CLOSE)


# --- what comes between a forward pass and its backward pass --------------------------------------------------------


def two_forward_passes(what, way, split):
    """The gradients of two batches with other documents, both forward before either goes backward."""
    config = replace(judge.LLAMA, seq=14, num_kv_heads=6)
    model = GPT(config)
    if split:
        cp.parallelize(model, way=way)
    activations.recompute(model, what)
    tokens = torch.randint(config.vocab, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    ids = [(torch.arange(13) >= 5).long().expand(2, -1), torch.zeros(2, 13, dtype=torch.long)]
    losses = []
    for x, documents in zip(tokens, ids, strict=True):
        if split:
            losses.append(cp.next_token_loss(model(x, documents_bs=documents), x))
        elif documents.any():  # rotary: each document by itself, from 0
            parts = torch.cat([model(x[:, :5]), model(x[:, 5:])], 1)
            losses.append(next_token_loss(parts, x))
        else:
            losses.append(next_token_loss(model(x), x))
    sum(losses).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def a_layout_of_the_last_call():
    """What `ContextCore` is told is forgotten for what came last."""
    attention, last = gpt.ContextCore.forward, {}

    def wrong(self, q, k, v, layout=None, mask=None):
        if torch._C._current_graph_task_id() == -1:
            last.update(layout=layout, mask=mask)
        return attention(self, q, k, v, **last)

    return patched(gpt.ContextCore, "forward", wrong)


def test_what_is_computed_again_is_computed_of_its_own_documents():
    ways = [(what, way) for what in ("none", "selective", "full") for way in ("ring", "ulysses")]

    def on_ranks():
        found = [two_forward_passes(*each, split=True) for each in ways]
        with a_layout_of_the_last_call():
            return found, two_forward_passes("full", "ring", split=True)

    oracle = two_forward_passes("none", "ring", split=False)
    for found, mutant in lab.run(on_ranks, 3):
        for gradients in found:
            assert_close(gradients, oracle, **CLOSE)
        with pytest.raises(AssertionError):
            assert_close(mutant, oracle, **CLOSE)


def unfrozen_later(split, mutant=right):
    case, model = CASES["gpt"], GPT(CASES["gpt"].config)
    model.blocks[0].requires_grad_(requires_grad=False)
    if split:
        cp.parallelize(model)
    loss = cp.next_token_loss if split else next_token_loss
    for trained in (False, True, False, True):
        model.blocks[0].requires_grad_(requires_grad=trained)
        tokens, targets = (each[0] for each in judge.data(case, 0, 0))
        with mutant():
            loss(model(tokens), targets).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def test_what_is_unfrozen_later_is_summed():
    def nothing_new():
        return patched(gpt.Context, "sum_gradients", lambda self, model, *call: None)

    oracle = unfrozen_later(split=False)
    for gradients in lab.run(unfrozen_later, 3, args=(True,)):
        assert_close(gradients, oracle, **CLOSE)

    def mutant():
        with nothing_new():
            return unfrozen_later(split=True)

    for gradients in lab.run(mutant, 3):
        with pytest.raises(AssertionError):
            assert_close(gradients, oracle, **CLOSE)


def test_bad_input_is_named():
    def errors():
        model, said = cp.parallelize(GPT(replace(judge.GPT_CONFIG, num_heads=6))), []
        rotary = cp.parallelize(GPT(judge.LLAMA))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        logits, groups = model(tokens), [dist.new_group([rank]) for rank in range(4)]
        calls = (
            lambda: cp.parallelize(model),
            lambda: cp.parallelize(torch.nn.Linear(2, 2)),
            lambda: cp.parallelize(GPT(judge.GPT_CONFIG), order="snake"),
            lambda: cp.parallelize(GPT(judge.GPT_CONFIG), way="pigeon"),
            lambda: cp.parallelize(GPT(replace(judge.GPT_CONFIG, dropout=0.1))),
            lambda: cp.parallelize(GPT(judge.GPT_CONFIG), way="ulysses"),
            lambda: model(tokens, documents_bs=tokens[:, 1:]),
            lambda: model(tokens[:, :7]),
            lambda: cp.next_token_loss(torch.zeros(1, 3, 19), tokens, order="zigzag"),
            lambda: cp.next_token_loss(torch.zeros(1, 2, 19), tokens),
            lambda: cp.next_token_loss(logits, tokens, order="contiguous"),
            lambda: cp.next_token_loss(logits.float(), tokens),
            lambda: model(tokens.repeat(1, 2)),
            lambda: rotary(tokens.repeat(1, 2)),
            lambda: model(tokens, offset=torch.arange(8)),
            lambda: rotary(tokens, offset=6),
            lambda: model.blocks[0](torch.zeros(1, 2, 48, dtype=torch.float64)),
            lambda: cp.parallelize(GPT(judge.GPT_CONFIG), groups[(dist.get_rank() + 1) % 4]),
            lambda: cp.Layout(8, groups[(dist.get_rank() + 1) % 4]),
        )
        for call in calls:
            with lab.wire() as wire, pytest.raises(ValueError) as error:
                call()
            said.append((str(error.value), wire.total_bytes))
        return said

    words = [
        "model must be whole, and is split already", "model must be a GPT", "order must be one of contiguous, zigzag",
        "way must be one of ring, ulysses", "model must be without dropout, and has 0.1", "cp must divide num_heads=6",
        "documents_bs must be of shape (1, 8)", "seq must be at least 8", "logits_bsv must be of shape (1, 2)",
        "order must be given for logits_bsv", "order must be zigzag, in which the model's tokens lie, not 'contiguous'",
        "order must be given for logits_bsv", "tokens_bs must have at most seq=", "tokens_bs must have at most seq=",
        "offset must leave columns at positions 0 to", "tokens_bs must have at most seq=", "layout must be given",
        "group must contain this rank", "group must contain this rank",
    ]  # fmt: skip
    for rank in lab.run(errors, 4):
        for (said, sent), expected in zip(rank, words, strict=True):
            assert said.startswith(expected)
            assert sent == 0
