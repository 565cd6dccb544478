"""Mistakes of the casebook that people make with this library, each refused by name before a number can be wrong."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtlib import lab
from dtlib.ranks import asynchrony, dp, ep, mtp, pp, sp, tp, zero
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory.pp import SCHEDULES
from tests.book.test_pattern import ROOT, Chapter, source

N = 2
CONFIG = GPTConfig(vocab=16, hidden=12, num_layers=2, num_heads=4, seq=8, dtype=torch.float64)
EXPERTS = GPTConfig(vocab=16, hidden=12, num_layers=2, num_heads=4, seq=8, dtype=torch.float64, num_experts=4)
TOKENS = torch.randint(16, (2, 8, 8), generator=torch.Generator().manual_seed(3))
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def local(model):
    return asynchrony.LocalSGD(model, SGD(model.parameters()), local_steps=1)


def served(model):
    if dist.get_rank():
        asynchrony.work(model, lambda step: next(model.parameters()).sum(), steps=1)
    else:
        asynchrony.serve(model, SGD, updates=1)


def zero_2(model):
    return zero.Zero(model, SGD, stage=2)


MEETS = {"dp": dp.BucketedDataParallel, "flat": dp.FlatDataParallel, "zero": zero_2, "local": local,
         "gossip": asynchrony.Gossip, "served": served}  # fmt: skip


def sliced(meets, cut=tp):
    """Ranks with other slices of one weight (overwritten, and averaged with what is not the same)."""
    meets(cut.parallelize(GPT(CONFIG)))


def inside(model):
    """Steps of its own, and a mean with the ranks of its node in between."""
    alone = [dist.new_group([rank]) for rank in range(N)][dist.get_rank()]
    sgd = SGD(model.parameters())
    return asynchrony.LocalSGD(
        model, sgd, local_steps=4, average_buffers=True, inside=(2, dist.group.WORLD), group=alone
    )


def experts(meets):
    meets(ep.parallelize(GPT(EXPERTS)))


def changed(meets, replaced):
    """Trained after it was wrapped, or another one than was wrapped: nobody averages it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(replaced)
    met = meets(model)
    model[0].requires_grad_(True)
    if replaced:
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    met.mix() if isinstance(met, asynchrony.Gossip) else met.step()


def tied_apart():
    """Two copies of an embedding that were drawn apart."""
    model = GPT(CONFIG, seed=dist.get_rank())
    stage = {dist.get_rank(): pp.cut(model, N)[dist.get_rank()]}
    tied = model.token_embedding.weight
    pipe = pp.Pipeline(stage, SCHEDULES["1F1B"](N, 2), width=12, dtype=torch.float64, tied=tied)
    pipe.step(*TOKENS)


def tied_away():
    """A tied embedding whose weights a stage 3 has taken to their owners."""
    model, rank = GPT(CONFIG), dist.get_rank()
    alone = [dist.new_group([each]) for each in range(N)][rank]
    stage = {rank: zero.Zero(pp.cut(model, N)[rank], SGD, stage=3, group=alone)}
    tied = model.token_embedding.weight
    pp.Pipeline(stage, SCHEDULES["1F1B"](N, 2), width=12, dtype=torch.float64, tied=tied)


def stages_averaged(wrap):
    """Stages of one shape, wrapped over the ranks of the pipeline."""
    stage = {dist.get_rank(): wrap(nn.Linear(12, 12))}
    pp.Pipeline(stage, SCHEDULES["1F1B"](N, 1), width=12)


def at_both_ends(tied):
    """A middle rank that has no copy of the tied parameter, and says so or not."""
    stage = {dist.get_rank(): nn.Linear(12, 12)}
    return pp.Pipeline(stage, SCHEDULES["1F1B"](3, 3), width=12, tied=tied)


def whole_logits():
    tp.next_token_loss(torch.zeros(8, 8, 16), TOKENS[1], vocab=16)


def norm_of(model, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def norm_of_slices(cut):
    model = cut.parallelize(GPT(CONFIG))
    norm_of(model, cut.next_token_loss(model(TOKENS[0]), TOKENS[1], vocab=16))


def norm_of_experts():
    model = ep.parallelize(GPT(EXPERTS))
    norm_of(model, next_token_loss(model(TOKENS[0]), TOKENS[1]))


def norm_of_heads():
    heads = mtp.parallelize(mtp.SequentialModules(GPT(CONFIG), 2))
    norm_of(heads, heads(*TOKENS))


def norm_of_chunks():
    model = zero_2(GPT(CONFIG))
    norm_of(model, next_token_loss(model(TOKENS[0]), TOKENS[1]))


SLICES, OWN, LATE = "must be of ranks that have the same slice", "belongs to some of its ranks", "changed after"
STAGE = "stages must be wrapped over ranks that have the same one"
NORM = "this is a rank's part of a gradient, and its norm is not the gradient's"
REFUSED = {
    **{f"overwritten: {name}": (functools.partial(sliced, each), SLICES) for name, each in MEETS.items()},
    "overwritten: inside": (functools.partial(sliced, inside), SLICES),
    "overwritten: sp": (functools.partial(sliced, dp.NaiveDataParallel, sp), SLICES),
    **{f"ep-times: {name}": (functools.partial(experts, MEETS[name]), OWN) for name in ("local", "gossip", "served")},
    "ep-times: inside": (functools.partial(experts, inside), OWN),
    **{f"unfrozen: {name}, {replaced}": (functools.partial(changed, MEETS[name], replaced), LATE)
       for name in ("local", "gossip") for replaced in (False, True)},
    "replicas: tied in ZeRO": (tied_away, "tied must have its weights"),
    "replicas: tied": (tied_apart, "tied must be alike on all ranks"),
    **{f"replicas: stages in {wrap.__name__}": (functools.partial(stages_averaged, wrap), STAGE)
       for wrap in (dp.FlatDataParallel, DistributedDataParallel)},
    "log-t": (whole_logits, "logits_bsv must be of shape (b, s, 8)"),
    "copies: tp": (functools.partial(norm_of_slices, tp), NORM),
    "copies: sp": (functools.partial(norm_of_slices, sp), NORM),
    "copies: mtp": (norm_of_heads, NORM),
    "experts-out": (norm_of_experts, NORM),
    "shard": (norm_of_chunks, NORM),
}  # fmt: skip


def attempts():
    said = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


@functools.cache
def found():
    return lab.run(attempts, N)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_on_every_rank(name):
    for said in found():
        assert REFUSED[name][1] in said.get(name, "not refused")


def next_to_refused():
    """Right programs that look like these: experts that all ranks hold, whatever their group is called, and a copy of a
    tied parameter on the ranks that have one."""
    everyone, alone = dist.new_group(range(3)), [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    for holders in (dist.group.WORLD, everyone):
        model = ep.parallelize(GPT(EXPERTS), alone, holders=holders)
        asynchrony.LocalSGD(model, SGD(model.parameters()), local_steps=1, average_buffers=True)
    tied = nn.Parameter(torch.ones(12, 12))
    at_both_ends(None if dist.get_rank() == 1 else tied)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="tied must be None on a rank with neither the first stage nor the last"):
            at_both_ends(tied)


def test_what_is_right_is_not_refused():
    lab.run(next_to_refused, 3)


HERE = "tests/ranks/test_casebook.py::test_it_is_refused_by_name_on_every_rank"
HELD = {
    "copies": "tests/ranks/tp/test_tp.py::test_equals_one_process",
    "tied": "tests/ranks/pp/test_executor.py::test_every_schedule_trains_like_one_process",
    "stages": "tests/ranks/test_clipping.py::test_a_norm_of_parts_is_refused_and_the_right_one_is_one_process_s",
    "experts-out": HERE, "shard": HERE,
    "means": "tests/ranks/test_dp_loop.py::test_global_mean_loss_is_the_mean_over_all_tokens",
    "cp-scale": "tests/ranks/threed/test_training.py::test_axes_together_train_like_one_process",
    "pp-divides": "tests/ranks/pp/test_executor.py::test_every_schedule_trains_like_one_process",
    "log-t": HERE,
    "no-gradient": "tests/ranks/tp/test_tp.py::test_equals_one_process",
    "gather": "tests/ranks/sp/test_sp.py::test_the_pair_on_the_page",
    "ep-times": "tests/ranks/ep/test_ep.py::test_the_judge_refuses",
    "aux": "tests/ranks/ep/test_ep.py::test_equals_one_process",
    "router": "tests/ranks/ep/test_ep.py::test_the_judge_refuses",
    "idle": "tests/ranks/ep/test_ep.py::test_the_judge_refuses",
    "twice": "tests/ranks/threed/test_experts.py::test_experts_on_a_mesh_train_like_one_process",
    "overwritten": HERE,
    "bias": "tests/ranks/tp/test_tp.py::test_equals_one_process",
    "fused": "tests/ranks/tp/test_tp.py::test_a_checkpoint_is_loaded_at_another_number_of_ranks",
    "norms-apart": "tests/ranks/sp/test_sp.py::test_wrong_ones_are_refused",
    "mixed-halves": "tests/ranks/threed/test_training.py::test_axes_together_train_like_one_process",
    "and": "tests/ranks/tp/test_tp.py::test_dropout_throws_common_dice_where_tensors_are_common_and_own_ones_elsewhere",
    "numpy": "tests/lab/test_run.py::test_each_rank_draws_its_own_random_numbers",
    "epoch": "tests/ranks/reliability/test_resume.py::"
             "test_a_sampler_says_all_samples_once_an_epoch_in_an_order_of_its_own",
    "seeds-apart": "tests/ranks/test_model.py::test_batches_of_the_ranks_stack_to_the_batch_of_one_process",
    "shift": "tests/ranks/cp/test_gpt.py::test_equals_one_process",
    "last": "tests/ranks/test_dp.py::test_equals_one_process_with_accumulation_and_one_sync",
    "unfrozen": HERE,
    "moments": "tests/ranks/memory/test_mixed.py::test_training_goes_on_to_the_bit_after_save_and_load",
    "sampler": "tests/ranks/reliability/test_resume.py::test_without_any_of_the_pieces_it_is_another_run",
    "replicas": HERE,
    "bf16-sum": "tests/ranks/memory/test_mixed.py::test_fp32_gradients_add_micro_batches_up_in_fp32",
}  # fmt: skip
"""Which test holds what the casebook's table says of this library, in each case that can occur in it."""


def test_what_the_table_says_of_this_library_is_held_by_a_test():
    page = Chapter.read(ROOT / "chapters" / "casebook.ipynb")
    table = source(next(cell for cell in page.cells if cell["id"] == "casebook-here-text"))
    told = dict(re.findall(r"^\| \{ref\}`case-([a-z0-9-]+)` \| ([^|]*) \|", table, re.MULTILINE))
    assert set(HELD) == {case for case, words in told.items() if not words.startswith(("does not arise", "yours"))}
    for path, name in (each.split("::") for each in HELD.values()):
        assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8"), (path, name)
