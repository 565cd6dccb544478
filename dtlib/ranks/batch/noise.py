"""The noise of the gradient, measured while it is averaged: what ranks have anyway are batches of two sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks import dp
from dtlib.ranks.dp.bucketed import Started
from dtlib.ranks.mesh import Group
from dtlib.theory.valid import amount, flag, whole


@dataclass(frozen=True)
class Noise:
    """Running means of what single steps tell: `square` of |G|², `variance` of tr Σ, over `steps` steps.

    Each step's two are unbiased, so their means are; one step's `square` may well be below 0. `per_layer` has the same
    by the names of the parameters, where it was asked for: squares and variances add up to the whole, scales do not.
    """

    square: float
    variance: float
    steps: int
    per_layer: dict[str, Noise] = field(default_factory=dict)

    @property
    def noise_scale(self) -> float:
        """𝓑 = tr Σ / |G|², in samples: a ratio of means. ∞ where the mean of |G|² is not above 0: measure longer."""
        return self.variance / self.square if self.square > 0 else math.inf


class Meter:
    """Running means of |G|² and tr Σ, each by itself: the mean of their ratios would be of no use, as |G|² of one step
    may be close to 0.

    The newest step has the weight 1 − `decay`, those before `decay` times what they had, and all are 1 together: 0
    keeps the last step alone, 1 weighs all alike. ``ValueError`` for a `decay` outside of 0 to 1.
    """

    def __init__(self, *, decay: float = 0.95, per_layer: bool = False) -> None:
        if not 0 <= amount("decay", decay) <= 1:
            raise ValueError(f"decay must be from 0 to 1, not {decay!r}")
        self.decay, self.per_layer = decay, flag("per_layer", per_layer)
        self._steps = 0
        self._means: dict[str, tuple[float, float]] = {}  # of |G|² and tr Σ by parameter; the whole is ""

    def _add(self, found: Mapping[str, tuple[float, float]]) -> Noise:
        if not all(math.isfinite(each) for pair in found.values() for each in pair):
            raise FloatingPointError(
                "the gradient or its square is not finite on some rank. Nothing of the step is kept"
            )
        self._steps += 1
        total = self._steps if self.decay == 1 else (1 - self.decay**self._steps) / (1 - self.decay)
        for name, pair in found.items():
            before = self._means.get(name, (0.0, 0.0))
            square, variance = (old + (new - old) / total for old, new in zip(before, pair, strict=True))
            self._means[name] = (square, variance)
        return self.noise

    @property
    def noise(self) -> Noise:
        """The means so far. ``RuntimeError`` before the first step."""
        if not self._steps:
            raise RuntimeError("nothing is measured yet: call measured() after a backward pass")
        layers = {name: Noise(*pair, self._steps) for name, pair in self._means.items() if name}
        return Noise(*self._means[""], self._steps, layers)

    def state_dict(self) -> dict[str, Any]:
        """The running means, copied: the same on all ranks."""
        return {"steps": self._steps, "means": dict(self._means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the means of another meter, at this one's `decay`."""
        self._steps, self._means = state["steps"], {name: (a, b) for name, (a, b) in state["means"].items()}


class NoiseScale(Meter):
    """An `Exchange` that measures tr Σ and |G|² on the way: wrap the one that is to send.

        noise = NoiseScale()
        model = dp.BucketedDataParallel(model, exchange=noise)
        ...
        loss.backward()
        noise.measured(batch=b).noise_scale

    A rank's own gradient is the mean of its b samples, the mean of all N ranks that of bN. Expected squares of both are
    known, |G|² + tr Σ / b and |G|² + tr Σ / (bN), and give the two unknowns (McCandlish et al. 2018, arXiv 1812.06162,
    appendix A.1). Ranks must draw samples that are independent of each other: where all see the same ones tr Σ comes
    out as 0. A bucket's squares are taken before it travels and after it has arrived; what is sent besides is one
    all-reduce a step, in `measured`, of 24 bytes, and of 8 more for each parameter with `per_layer`.

    With `weighted` the loss is the mean over the samples of all ranks, `dp.global_mean_loss`, instead of the mean of
    the ranks' means. Where `exchange` does not leave the exact mean, as `Compressed` ones do not, its error counts as
    noise of the large batch: |G|² comes out larger, and tr Σ smaller. What `exchange` remembers is its own to save.
    Parameters that `belongs_to` gave to some of the ranks are a ``ValueError``: of them there are fewer batches.
    """

    def __init__(
        self,
        exchange: dp.Exchange = dp.all_reduce,
        *,
        decay: float = 0.95,
        per_layer: bool = False,
        weighted: bool = False,
    ) -> None:
        super().__init__(decay=decay, per_layer=per_layer)
        if not callable(exchange):
            raise ValueError(f"exchange must be a function of a bucket and a group, not {exchange!r}")
        self.exchange, self.weighted = exchange, flag("weighted", weighted)
        self._own: dict[str, Tensor] = {}  # squares of this step's gradients, by the parameters' names
        self._mean: dict[str, Tensor] = {}
        self._group: Group = None

    def __call__(self, bucket: dp.Bucket, group: Group) -> Started:
        """Start with a bucket; what is returned waits for it, and looks at what has come."""
        if self._own and group is not self._group:
            raise ValueError(f"parameters must belong to all ranks alike to be measured: {list(bucket.views)} do not")
        self._group = group
        if next(iter(bucket.views)) in self._own:  # of a step that nobody asked about
            self._own, self._mean = {}, {}
        self._own |= _squares(bucket)
        return _UnderWay(self, bucket, self.exchange(bucket, group))

    def measured(self, batch: int) -> Noise:
        """Take in the last step, in which this rank's gradient was the mean of `batch` samples: all ranks call it.

        With accumulation these are the samples of all its micro-batches. Ranks may have different numbers (0 too if
        `weighted`); they all return the same. ``RuntimeError`` unless a step has ended since the last call, and for a
        rank alone, which has batches of one size: see `MicroBatches`. A gradient that is not finite is a
        ``FloatingPointError`` on all ranks, and the step is left out.
        """
        whole("batch", batch, 0 if self.weighted else 1)
        own, mean = self._own, self._mean
        self._own, self._mean = {}, {}
        if not own or own.keys() != mean.keys():
            raise RuntimeError("no backward pass with an exchange has ended since the last call: all gradients must "
                               "have been averaged, over two ranks or more. On one rank use MicroBatches")  # fmt: skip
        n = dist.get_world_size(self._group)
        if n == 1:
            raise RuntimeError("a rank alone has batches of one size: use MicroBatches")
        names = list(own)
        squares, means = (torch.stack([each[name] for name in names]) for each in (own, mean))
        # Buckets carry the gradient over N.
        told = torch.tensor([0.0, batch**2, batch] if self.weighted else [0.0, 1.0, 1 / batch], dtype=torch.float64)
        told = torch.cat([told.to(squares.device), n**2 * squares])
        told[0] = told[3:].sum()
        told = told if self.per_layer else told[:3]
        dist.all_reduce(told, group=self._group)
        total, first, second, *by_name = told.tolist()
        # |g_r|² summed over the ranks is expected to be small[0]·|G|² + small[1]·tr Σ, that of the mean large[0]…
        scale = (n / second) ** 2 if self.weighted else 1.0
        small = (scale * first, scale * second)
        large = (1.0, 1 / second if self.weighted else second / n**2)
        found = {"": _solved(total, float(means.sum()), small, large)}
        for name, summed, square in zip(names, by_name, means.tolist(), strict=False):
            found[name] = _solved(summed, square, small, large)
        return self._add(found)


class MicroBatches(Meter):
    """The same on one rank that accumulates equal micro-batches: small gradients, and the large one is their mean.

        noise = MicroBatches(model)
        for tokens, targets in micro_batches:
            (loss_of(tokens, targets) / len(micro_batches)).backward()
        noise.measured(batch=b, micro_batches=len(micro_batches)).noise_scale

    A hook on each parameter takes the square of what a backward pass adds, before it is added; nothing is copied, and
    nothing sent. Begin each step with gradients that are None or 0.
    """

    def __init__(self, module: nn.Module, *, decay: float = 0.95, per_layer: bool = False) -> None:
        super().__init__(decay=decay, per_layer=per_layer)
        self._params = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._squares: dict[str, Tensor] = {}
        for name, parameter in self._params.items():
            parameter.register_hook(partial(self._see, name))

    def _see(self, name: str, gradient: Tensor) -> None:
        self._squares[name] = self._squares.get(name, 0) + _square(gradient)

    def measured(self, batch: int, micro_batches: int) -> Noise:
        """Take in the last step, of so many micro-batches of `batch` samples each, of whose loss each gave its part.

        ``ValueError`` for fewer than 2 micro-batches, ``RuntimeError`` if there was no backward pass since the last
        call; ``FloatingPointError`` for what is not finite.
        """
        whole("batch", batch, 1)
        a = whole("micro_batches", micro_batches, 2)
        squares, self._squares = self._squares, {}
        if not squares:
            raise RuntimeError("no backward pass has ended since the last call")
        found: dict[str, tuple[float, float]] = {}
        for name, summed in squares.items():
            gradient = self._params[name].grad
            assert gradient is not None
            found[name] = _solved(a**2 * float(summed), float(_square(gradient)), (a, a / batch), (1, 1 / (a * batch)))
        total = (sum(square for square, _ in found.values()), sum(variance for _, variance in found.values()))
        return self._add({"": total, **(found if self.per_layer else {})})


class _UnderWay:
    """A bucket on its way; its square is taken when it is there."""

    def __init__(self, noise: NoiseScale, bucket: dp.Bucket, started: Started | None) -> None:
        self.noise, self.bucket, self.started = noise, bucket, started

    def wait(self) -> None:
        if self.started is not None:
            self.started.wait()
        self.noise._mean |= _squares(self.bucket)


def _square(tensor: Tensor) -> Tensor:
    """In float64, of short sums in float32 at least: |G|² is a small difference of large squares if the noise is large.

    Ten million squares added up in float32 are wrong by 1 in 3,000.
    """
    parts = tensor.detach().flatten().to(torch.promote_types(tensor.dtype, torch.float32)).split(2**12)
    return torch.stack([torch.dot(part, part) for part in parts]).double().sum()


def _squares(bucket: dp.Bucket) -> dict[str, Tensor]:
    return {name: _square(view) for name, view in bucket.views.items()}


def _solved(
    small: float, large: float, of_small: tuple[float, float], of_large: tuple[float, float]
) -> tuple[float, float]:
    """|G|² and tr Σ of two equations, each of whose right sides is that many |G|² and that many tr Σ."""
    (a, b), (c, d) = of_small, of_large
    determinant = a * d - b * c  # not 0: the batches differ
    return (small * d - large * b) / determinant, (large * a - small * c) / determinant
