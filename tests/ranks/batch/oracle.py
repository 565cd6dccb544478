"""What ranks' gradients say of |G|² and tr Σ, by other routes than the meter's: products of pairs, scatter of ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dtlib.ranks import dp
from tests.ranks.compression import oracle

SHAPES = {"a": (6, 5), "b": (7,), "c": ()}
B = 3  # samples of a rank


def gradients(n, steps, shapes=SHAPES, seed=0):
    """Of each step and rank, by name: something that all share, and something of each rank's own."""
    draw = np.random.default_rng(seed)
    common = {name: draw.normal(size=shape) for name, shape in shapes.items()}
    return [[{k: v + draw.normal(size=v.shape) for k, v in common.items()} for _ in range(n)] for _ in range(steps)]


def told(by_rank, batch, names=None):
    """The two of one step in which all ranks had `batch` samples: see `theory.batch.square_error`."""
    n = len(by_rank)
    rows = np.stack([np.concatenate([g[k].ravel() for k in names or g]) for g in by_rank])
    products = rows @ rows.T
    square = (products.sum() - np.trace(products)) / (n * (n - 1))
    return square, batch * ((rows - rows.mean(0)) ** 2).sum() / (n - 1)


Given = partial(oracle.Given, SHAPES)
"""A module whose gradients are what it is called with, or 0 where a name is left out."""


def measure(given, noise, options, samples=B):
    """In a rank: what the meter says after each step."""
    wrapped = dp.BucketedDataParallel(Given(), exchange=noise, **options)
    found = []
    for by_rank in given:
        wrapped.zero_grad()
        wrapped(by_rank[dist.get_rank()]).backward()
        found.append(noise.measured(samples))
    return found, wrapped.buckets


class Samples:
    """Squared errors of a linear model on a fixed set of samples, whose G and tr Σ are sums over the set."""

    def __init__(self, num=64, width=5, seed=0):
        draw = np.random.default_rng(seed)
        self.inputs, self.weights = draw.normal(size=(num, width)), draw.normal(size=width)
        self.targets = self.inputs @ draw.normal(size=width) + draw.normal(size=num)
        each = 2 * (self.inputs @ self.weights - self.targets)[:, None] * self.inputs
        mean = each.mean(0)
        self.square, self.variance = mean @ mean, ((each - mean) ** 2).sum() / num

    def model(self):
        linear = nn.Linear(self.inputs.shape[1], 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.as_tensor(self.weights)[None])
        return linear

    def losses(self, model, places):
        """Of the samples at `places`."""
        inputs, targets = torch.as_tensor(self.inputs[places]), torch.as_tensor(self.targets[places])
        return (model(inputs)[:, 0] - targets).square()
