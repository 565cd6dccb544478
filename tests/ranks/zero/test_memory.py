"""What a rank holds while a pass is running: no more than one unit or bucket beside those on their way."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import zero

from .judge import held, storages, tensors
from .small import STAGES

make_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
WIDTH, LAYERS, N = 96, 6, 3
LAYER = 8 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's weights, or of their gradients
SLACK = 8 * 1024 + LAYERS * 8 * 8 * WIDTH  # a batch of 4 rows: what layers keep for the backward pass, and losses


def watch(stage, steps=2, **options):
    """The most bytes that are held beside the weights at rest and the optimizer's states, in each kind of pass."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).double()
    seen = {"forward": [], "backward": []}

    def look(phase):
        now = held(wrapped, before)
        seen[phase].append(now["weights"] - kept + now["gradients"] + now["others"])

    for layer in model:
        layer.register_forward_hook(lambda *_: look("forward"))
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: look("backward"))
    before = {id(s): s for s in storages(tensors())}
    wrapped = stage(model, make_adamw, **options)
    kept = held(wrapped, before)["weights"]
    for _ in range(steps):
        for each in seen.values():
            each.clear()
        wrapped.optimizer.zero_grad()
        wrapped(torch.randn(4, WIDTH, dtype=torch.float64)).square().mean().backward()
        wrapped.optimizer.step()
    return {phase: max(numbers) for phase, numbers in seen.items()}


def test_stage_2_frees_gradients_while_the_backward_pass_runs():
    for seen in lab.run(lambda: watch(STAGES[2], bucket_bytes=LAYER, first_bucket_bytes=None), N):
        # new gradients of a bucket, one under way with room for a chunk that arrives, and the shards
        most = LAYER + LAYER * (1 + 1 / N) + LAYERS * LAYER / N
        assert LAYER < seen["backward"] <= most + SLACK
        assert seen["backward"] < LAYERS * LAYER, "a full gradient"


def test_stage_1_keeps_them():
    for seen in lab.run(lambda: watch(STAGES[1], bucket_bytes=LAYER, first_bucket_bytes=None), N):
        assert seen["backward"] >= LAYERS * LAYER


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_has_one_unit_and_those_on_their_way(prefetch):
    for seen in lab.run(lambda: watch(STAGES[3], prefetch=prefetch), N):
        gathered = (1 + prefetch) * LAYER
        assert gathered <= seen["forward"] <= gathered + SLACK
        most = gathered + LAYER + LAYER * (1 + 1 / N) + LAYERS * LAYER / N
        assert gathered <= seen["backward"] <= most + SLACK


def test_one_unit_of_everything_costs_all_of_it():
    for seen in lab.run(lambda: watch(STAGES[3], units=[]), N):
        assert seen["forward"] >= LAYERS * LAYER


def test_weights_that_stay_from_forward_to_backward():
    for seen in lab.run(lambda: watch(STAGES[3], reshard_after_forward=False), N):
        assert seen["forward"] >= LAYERS * LAYER


@pytest.mark.parametrize("change", ["reduced after backward", "kept on the module", "nothing freed"])
def test_the_bounds_can_fail(change):
    class NeverFreed(zero.Shard):
        def free(self):
            if hasattr(self, "weights"):  # once it has been split
                return
            super().free()

    class Keeps(zero.Zero):
        shard_type = NeverFreed

    jobs = {
        "reduced after backward": lambda: watch(STAGES[2], bucket_bytes=LAYER, first_bucket_bytes=None, overlap=False),
        "kept on the module": lambda: watch(STAGES[1], bucket_bytes=LAYER, first_bucket_bytes=None),
        "nothing freed": lambda: watch(functools.partial(Keeps, stage=3)),
    }
    for seen in lab.run(jobs[change], N):
        assert seen["backward"] > LAYERS * LAYER
