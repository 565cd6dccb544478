"""What N ranks' gradients must become, computed by one process in numpy; and a model that has just these gradients."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

SHAPES = {"a": (24, 10), "b": (7,), "c": (1,), "d": (16, 3, 2, 2), "e": ()}
STEPS = 4


def gradients(n, steps=STEPS, shapes=SHAPES, seed=0):
    """Of each step and rank, by name; some that all ranks share, and some of each rank's own."""
    draw = np.random.default_rng(seed)
    common = [{name: draw.normal(size=shape) for name, shape in shapes.items()} for _ in range(steps)]
    return [[{k: v + draw.normal(size=v.shape) for k, v in each.items()} for _ in range(n)] for each in common]


class Given(nn.Module):
    """A module whose gradients are what it is called with."""

    def __init__(self, shapes=SHAPES, dtype=torch.float64):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, grads):
        """A sum of products, over what `grads` names."""
        own = dict(self.named_parameters())
        return sum((own[name] * torch.as_tensor(grads[name], dtype=own[name].dtype)).sum() for name in grads)


def means(wrapped, given, rank=None):
    """In a rank: the gradients after each step of `given`, by name, as numpy."""
    found = []
    for by_rank in given:
        wrapped.zero_grad()
        wrapped(by_rank[dist.get_rank() if rank is None else rank]).backward()
        found.append({name: p.grad.double().numpy().copy() for name, p in wrapped.module.named_parameters()})
    return found


class Exact:
    """The mean."""

    def __init__(self, n):
        self.n, self.left = n, {}

    def step(self, by_rank):
        """The mean of what the ranks say, of each parameter."""
        found = {}
        for name in by_rank[0]:
            meant = [g[name].ravel() / self.n + self.left.get((name, r), 0) for r, g in enumerate(by_rank)]
            said = self.said(name, by_rank[0][name].shape, meant)
            for r in range(self.n) if self.remembers else ():
                self.left[name, r] = meant[r] - said[r]
            found[name] = np.sum(said, axis=0).reshape(by_rank[0][name].shape)
        return found

    remembers = False

    def said(self, name, shape, meant):
        """What each rank's message says."""
        return meant


class Largest(Exact):
    """Top-k."""

    remembers = True

    def __init__(self, n, share):
        super().__init__(n)
        self.share = share

    def said(self, name, shape, meant):
        k = max(1, round(self.share * meant[0].size))
        return [np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0) for x in meant]


class Lots(Largest):
    """Random-k, at the places of `draw`."""

    def __init__(self, n, share, draw, feedback):
        super().__init__(n, share)
        self.draw, self.remembers = draw, feedback

    def said(self, name, shape, meant):
        size = meant[0].size
        k = max(1, round(self.share * size))
        mask = np.isin(np.arange(size), self.draw(name, size)[:k])
        return [mask * x * (1 if self.remembers else size / k) for x in meant]


class Bits(Exact):
    """Signs."""

    remembers = True

    def said(self, name, shape, meant):
        return [np.float32(np.mean(np.abs(x))) * np.where(x < 0, -1.0, 1.0) for x in meant]


class Dice(Exact):
    """QSGD, with the draws of `draw`."""

    def __init__(self, n, levels, draw):
        super().__init__(n)
        self.levels, self.draw = levels, draw

    def said(self, name, shape, meant):
        found = []
        for rank, x in enumerate(meant):
            norm, uniforms = np.sqrt(x @ x), self.draw(name, x.size, rank)
            exact = self.levels * np.abs(x) / norm
            up = np.floor(exact) + (uniforms >= 1 - (exact - np.floor(exact)))
            found.append(norm / self.levels * np.sign(x) * up)
        return found


class LowRank(Exact):
    """PowerSGD, by projectors on the column space that a singular value decomposition finds."""

    remembers = True

    def __init__(self, n, rank, start, warm=True):
        super().__init__(n)
        self.rank, self.start, self.warm, self.q = rank, start, warm, {}

    def said(self, name, shape, meant):
        if len(shape) < 2:
            return meant
        rows, columns = shape[0], meant[0].size // shape[0]
        r = min(self.rank, rows, columns)
        if r * (rows + columns) >= rows * columns:
            return meant
        mean = np.sum(meant, axis=0).reshape(rows, columns)
        q = self.q[name] if name in self.q and self.warm else self.start(name, columns, r)
        u = np.linalg.svd(mean @ q)[0][:, :r]
        self.q[name] = mean.T @ u
        return [(u @ (u.T @ x.reshape(rows, columns))).ravel() for x in meant]


def eight_bits(by_rank, names, block):
    """Both passes of a bucket that holds `names` in this order, in float32."""
    n = len(by_rank)
    flat = [np.concatenate([g[name].ravel() for name in names]).astype(np.float32) / np.float32(n) for g in by_rank]
    size = flat[0].size
    chunk = -(-size // n)

    def rounded(x):
        out = np.zeros_like(x)
        for start in range(0, x.size, block):
            part = x[start : start + block]
            largest = np.abs(part).max()  # float32: ties fall as they do there
            if largest:
                out[start : start + block] = np.rint(part * (127 / largest)) * (largest / 127)
        return out

    padded = [np.pad(x, (0, n * chunk - size)) for x in flat]
    cuts = [slice(i * chunk, (i + 1) * chunk) for i in range(n)]
    total = np.concatenate([rounded(np.sum([rounded(x[cut]) for x in padded], axis=0)) for cut in cuts])[:size]
    ends = np.cumsum([by_rank[0][name].size for name in names])[:-1]
    return {name: part.reshape(by_rank[0][name].shape) for name, part in zip(names, np.split(total, ends), strict=True)}
