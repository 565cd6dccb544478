"""What feedback is for: without it, training ends elsewhere. Twenty problems at once, each of a seed of its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks import compression, dp
from dtlib.ranks.compression import Sign
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss

from .oracle import Given

SMALL = GPTConfig(num_layers=1, hidden=32, seq=32)
N, SEEDS, WIDTH, STEPS, RATE = 2, 20, 30, 120, 0.05


def curvatures_and_centres(seed):
    """Of each rank's ½ Σ c (x − m)²: c and m. The ranks' data differ, so that at the optimum their gradients do not
    vanish, but cancel."""
    draw = np.random.default_rng(seed)
    return draw.uniform(0.5, 1.5, (N, WIDTH)), draw.normal(0, 3, (N, WIDTH))


def above_the_optimum(exchange):
    """In a rank: how far above its optimum each seed's loss ends."""
    every = [curvatures_and_centres(seed) for seed in range(SEEDS)]
    model = Given({f"seed{seed}": (WIDTH,) for seed in range(SEEDS)})
    mine = [(torch.as_tensor(c[dist.get_rank()]), torch.as_tensor(m[dist.get_rank()])) for c, m in every]
    wrapped = dp.BucketedDataParallel(model, exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        each = zip(model.named_parameters(), mine, strict=True)
        wrapped({name: (c * (x - m)).detach() for (name, x), (c, m) in each}).backward()
        optimizer.step()
    best = [(c * m).sum(0) / c.sum(0) for c, m in every]
    found = zip(model.parameters(), every, best, strict=True)
    return [float((c.mean(0) * (x.detach().numpy() - top) ** 2).sum() / 2) for x, (c, _), top in found]


def ends(with_it, without):
    """Of each seed with and without feedback."""
    return map(np.array, lab.run(lambda: (above_the_optimum(with_it), above_the_optimum(without)), N)[0])


@pytest.mark.parametrize("scheme", [partial(compression.TopK, 0.1), compression.Sign], ids=["top-k", "sign"])
def test_without_feedback_a_biased_message_ends_elsewhere(scheme):
    """The difference in each of twenty seeds, and in the mean more than five times its standard error."""
    fed, unfed = ends(scheme(), scheme(feedback=False))
    difference = unfed - fed
    assert (difference > 0).all()
    assert difference.mean() > 5 * difference.std(ddof=1) / np.sqrt(SEEDS)
    assert fed.mean() < 0.05 * unfed.mean()


def test_an_unbiased_message_needs_no_feedback():
    fed, unfed = ends(compression.RandomK(0.5), compression.RandomK(0.5, feedback=False))
    assert fed.mean() < 0.1
    assert unfed.mean() < 0.1


@pytest.mark.soak
def test_the_small_gpt_sent_as_signs_ends_lower_with_feedback():
    """Twenty seeds of forty steps: what the chapter shows of four. Of the largest 1 % so few steps tell nothing."""

    def held_out(exchange, seed):
        model = dp.BucketedDataParallel(GPT(SMALL, seed=seed), exchange=exchange)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        data = batches(load_text(), batch=12, seq=32, rank=dist.get_rank(), world_size=N, seed=seed)
        for _, (tokens, targets) in zip(range(40), data, strict=False):
            optimizer.zero_grad()
            next_token_loss(model(tokens), targets).backward()
            optimizer.step()
        tokens, targets = next(batches(load_text(), batch=64, seq=32, seed=99))
        with torch.no_grad():
            return next_token_loss(model(tokens), targets).item()

    def gains():
        return [held_out(Sign(feedback=False), seed) - held_out(Sign(), seed) for seed in range(SEEDS)]

    gain = np.array(lab.run(gains, N, timeout_s=600)[0])
    assert gain.mean() > 4 * gain.std(ddof=1) / np.sqrt(SEEDS)
