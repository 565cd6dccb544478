"""Ranks that are called with other shapes, dtypes or modes are told so by name, before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import activations, cp, sp, threed, tp
from dtlib.ranks.mesh import Mesh
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.ranks.shared import alike
from dtlib.theory.pp import one_f_one_b

CONFIG = GPTConfig(num_layers=2, hidden=16, num_heads=4, seq=16, vocab=23)
TOKENS = torch.zeros(2, 8, dtype=torch.long)


def training(**axes):
    return threed.Training(
        GPT(CONFIG), Mesh(axes), partial(torch.optim.SGD, lr=0.1), schedule=one_f_one_b(axes.get("pp", 1), 2)
    )


def shorter(tensor, dim=1):
    """Two entries less on every rank but the first."""
    return tensor.narrow(dim, 0, tensor.shape[dim] - 2 * (dist.get_rank() > 0))


def without_gradients(model):
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(TOKENS)


def heads(g=2, s=4, dtype=torch.float32):
    return torch.zeros(1, g, s, 4, dtype=dtype)


def made():
    """What is to be called, by the words of its error: all of it made before."""
    split, tokens, both = tp.parallelize(GPT(CONFIG)), sp.parallelize(GPT(CONFIG)), cp.parallelize(GPT(CONFIG))
    again, mesh, layout = cp.parallelize(GPT(CONFIG)), training(cp=2), cp.Layout(8)
    stages, other = training(pp=2), dist.get_rank() + 1
    wide, x = tp.ColumnParallelLinear(torch.nn.Linear(4, 4)), torch.ones(2, 4, 4)
    deep = tp.RowParallelLinear(torch.nn.Linear(4, 4))
    logits = torch.zeros(2, 8, len(tp.vocabulary_of(23)))
    return [
        ("tokens_bs", lambda: split(shorter(TOKENS))),
        ("tokens_bs", lambda: split(TOKENS.int() if other == 1 else TOKENS)),
        ("tokens_bs", lambda: without_gradients(split)),
        ("tokens_bs", lambda: tokens(shorter(TOKENS))),
        ("tokens_bs", lambda: both(shorter(TOKENS))),
        ("tokens_bs", lambda: again(TOKENS, documents_bs=TOKENS if other == 1 else None)),
        ("tokens_bs and targets_bs", lambda: mesh.step(shorter(TOKENS), shorter(TOKENS))),
        ("tokens_bs and targets_bs", lambda: stages.step(shorter(TOKENS), shorter(TOKENS))),
        ("targets_bs", lambda: tp.next_token_loss(shorter(logits), shorter(TOKENS), vocab=23)),
        ("targets_bs", lambda: cp.next_token_loss(logits[:, : 5 - other], shorter(TOKENS), order="zigzag")),
        ("x_bsi", lambda: wide(shorter(x))),
        ("x_bsi of rows", lambda: deep(shorter(x)[..., :2])),
        ("x_bsh", lambda: sp.gather_tokens(shorter(x))),
        ("part_bsh", lambda: sp.scatter_sum(shorter(x))),
        ("x_bsh", lambda: tp.copy_to_ranks(x.to(torch.float64 if other == 1 else torch.float32))),
        ("part_bsh", lambda: tp.sum_over_ranks(x[:other])),
        ("k_bgsd", lambda: cp.ring_attention(heads(), *[heads(other)] * 2, layout)),
        ("k_bgsd", lambda: cp.ulysses_attention(*[heads(2, dtype=(torch.half, torch.float)[other - 1])] * 3, layout)),
    ]


def refused():
    said = []
    for name, call in made():
        with Recorder() as recorder, lab.wire() as wire, pytest.raises(ValueError) as error:
            call()
        said.append((name, str(error.value), len(recorder.log), wire.total_bytes))
    return said


def test_what_differs_is_named_on_every_rank_before_anything_is_sent():
    for rank in lab.run(refused, 2, timeout_s=120):
        for name, said, calls, sent in rank:
            assert said.startswith(f"{name} must be alike on all ranks of group; rank 0 has "), said
            assert calls == sent == 0, said


def test_a_rank_that_alone_has_something_new_says_so():
    def later():
        model = tp.parallelize(GPT(CONFIG))
        model(TOKENS)
        with mock.patch.object(alike, "PATIENCE_S", 1.0):
            model(shorter(TOKENS))

    with pytest.raises(lab.RankError, match=r"tokens_bs must be alike .* rank 1 has \(2, 6\) of int64, which is new"):
        lab.run(later, 2)


def test_without_the_question_the_ranks_end_with_other_words():
    def unasked():
        model = tp.parallelize(GPT(CONFIG))
        with mock.patch.object(alike, "refuse_unlike", return_value=None):
            model(TOKENS[:, : 8 - 7 * dist.get_rank()]).sum().backward()

    with pytest.raises((lab.RankError, lab.RankTimeout)) as error:
        lab.run(unasked, 2, timeout_s=10)
    assert "must be alike" not in str(error.value)


def test_a_store_without_the_others_is_not_asked():
    """As behind the walls of grading."""

    def walled():
        alike._get_default_store().set_timeout(timedelta(seconds=1))
        with mock.patch.object(dist.PrefixStore, "set", side_effect=AssertionError):
            return tp.sum_over_ranks(torch.ones(2)).tolist()

    assert lab.run(walled, 2) == [[2.0, 2.0]] * 2


def steps(change):
    model = change(GPT(replace(CONFIG, rotary=True)))
    vocab = None if change is cp.parallelize else 23
    sizes = []
    for s in (8, 12, 8, 12, 8):
        tokens = torch.zeros(2, s, dtype=torch.long)
        with (
            lab.wire() as wire,
            mock.patch.object(alike, "_get_default_store", wraps=alike._get_default_store) as store,
        ):
            logits = model(tokens)
            loss = tp.next_token_loss(logits, tokens, vocab=vocab) if vocab else cp.next_token_loss(logits, tokens)
            loss.backward()
        dist.barrier()
        sizes.append((store.call_count, wire.total_bytes))
    return sizes


def recomputed(model):
    return activations.recompute(tp.parallelize(model), "full")


def test_what_all_have_had_is_not_asked_again():
    def job():
        return [steps(change) for change in (tp.parallelize, sp.parallelize, cp.parallelize, recomputed)]

    found = lab.run(job, 2, timeout_s=120)[0]
    assert found[0][0][0] > 0  # what the others ask is partly known by then
    for each in found:
        questions, sizes = zip(*each, strict=True)
        assert questions[2:] == (0, 0, 0)
        # the first step of a shape sends what later ones do: asking is not on the ranks' wire here
        assert sizes[0] == pytest.approx(sizes[2], rel=0.02)
        assert sizes[1] == pytest.approx(sizes[3], rel=0.02)


def test_a_group_without_this_rank_is_refused():
    def strangers():
        groups = [dist.new_group([rank]) for rank in range(2)]
        other, x, said = groups[1 - dist.get_rank()], torch.ones(1, 2, 4), []
        linear, config = torch.nn.Linear(4, 4), GPTConfig(hidden=16, vocab=23)
        model = GPT(config)
        calls = (
            lambda: tp.ColumnParallelLinear(linear, other),
            lambda: tp.RowParallelLinear(linear, other),
            lambda: tp.VocabularyParallelEmbedding(torch.nn.Embedding(4, 4), other),
            lambda: tp.split_attention(model.blocks[0].attention, other),
            lambda: tp.split_mlp(model.blocks[0].mlp, other),
            lambda: tp.sharers_of(1, other),
            lambda: tp.copy_to_ranks(x, other),
            lambda: tp.sum_over_ranks(x, other),
            lambda: tp.next_token_loss(x, TOKENS[:1, :2], vocab=4, group=other),
            lambda: tp.parallelize(model, other),
            lambda: sp.parallelize(model, other),
            lambda: sp.gather_tokens(x, other),
            lambda: sp.scatter_sum(x, other),
            lambda: cp.parallelize(model, other),
            lambda: cp.next_token_loss(x, TOKENS[:1, :2], group=other, order="zigzag"),
        )
        for call in calls:
            with Recorder() as recorder, pytest.raises(ValueError) as error:
                call()
            said.append((str(error.value), len(recorder.log)))
        return said

    for rank in lab.run(strangers, 2):
        for said, sent in rank:
            assert "group" in said, said
            assert "contain" in said, said
            assert sent == 0
