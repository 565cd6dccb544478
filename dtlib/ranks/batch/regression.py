"""A problem whose noise is known: linear regression on a fixed set of samples, many runs of it side by side."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtlib.theory.valid import amount, whole


class Regression:
    """Least squares, ½(x·w − y)² in the mean, on `num` fixed samples of `width` inputs, with `noise` in the targets.

    Inputs have variances from 1 down to 1/`condition`. All is in float64, and drawn from `seed`. What is known exactly,
    by sums over the set: the gradient, the covariance of a sample's gradient, the least loss and where it is.
    """

    def __init__(
        self, num: int = 2048, width: int = 8, *, noise: float = 1.0, condition: float = 4.0, seed: int = 0
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        spread = torch.logspace(0, -math.log10(amount("condition", condition, positive=True)) / 2, width).double()
        self.inputs = spread * torch.randn(whole("num", num, 2), width, generator=draw, dtype=torch.float64)
        truth = torch.ones(width, dtype=torch.float64)
        self.targets = self.inputs @ truth + noise * torch.randn(num, generator=draw, dtype=torch.float64)
        self.hessian = self.inputs.T @ self.inputs / num
        self.best = torch.linalg.solve(self.hessian, self.inputs.T @ self.targets / num)

    def excess(self, weights: Tensor) -> Tensor:
        """Loss above the least one, of weights (…, width)."""
        off = weights - self.best
        return ((off @ self.hessian) * off).sum(-1) / 2

    def noise(self, weights: Tensor) -> tuple[float, float]:
        """|G|² and tr Σ at one vector of weights, by enumeration."""
        each = (self.inputs @ weights - self.targets)[:, None] * self.inputs
        gradient = each.mean(0)
        return float(gradient @ gradient), float((each - gradient).square().sum(1).mean())

    def best_steps(
        self, goal: float, batch: int, *, runs: int = 100, most: int = 5000, seed: int = 0
    ) -> tuple[float, float]:
        """The fewest steps of SGD from 0 to a mean excess loss over `runs` runs of `goal`, and the best rate.

        The rates of the grid 2^(k/4) from 2⁻⁸ to 2 run side by side on the same draws: the first one there is the
        best. Between its last two steps the loss is taken as a straight line in its logarithm. ``ValueError`` if none
        gets there in `most` steps.
        """
        goal, batch = float(amount("goal", goal, positive=True)), whole("batch", batch, 1)
        draw = torch.Generator().manual_seed(seed)
        rates = 2.0 ** (torch.arange(-32, 5, dtype=torch.float64) / 4)
        weights = torch.zeros(len(rates), whole("runs", runs, 1), len(self.best), dtype=torch.float64)
        before = self.excess(weights).mean(1)
        if before[0] <= goal:
            raise ValueError(f"goal must be below the excess loss at the start, {float(before[0])}, not {goal}")
        for step in range(1, most + 1):
            places = torch.randint(len(self.targets), (runs, batch), generator=draw)
            inputs = self.inputs[places]
            errors = weights.transpose(0, 1) @ inputs.transpose(1, 2) - self.targets[places][:, None]
            weights -= rates[:, None, None] / batch * (errors @ inputs).transpose(0, 1)
            now = self.excess(weights).mean(1)
            if (now <= goal).any():
                parts = torch.where(now <= goal, (before / goal).log() / (before / now).log(), torch.inf)
                first = int(parts.argmin())
                return step - 1 + float(parts[first]), float(rates[first])
            before = now
        raise ValueError(f"goal must be within reach of some rate in {most} steps, and {goal} is not")
