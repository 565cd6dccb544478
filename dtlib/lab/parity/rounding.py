"""How far a right result may be off: the reference run again, each operation off by about a unit in the last place.

A parallel step adds the same numbers in another order, so each of its results is off by a few roundings, and what
follows carries that on. How much of it arrives in a gradient is a property of the model and of the data, and no
constant knows it. So it is measured: the outputs of all floating-point operations of the reference (and what goes
into products and sums) are multiplied by 1 + ε u, with u uniform in [-1, 1] and ε the spacing of their dtype, and the
spread of a few such runs is the yardstick. A rounding is at most half of ε, so the yardstick is the larger of the two
in the mean.

Sources: Parker 1997, "Monte Carlo Arithmetic"; TTrace (arXiv 2506.09280), which perturbs the inputs of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .pieces import Array

TIMES = 24.0
"""An element may be off by so many spreads. The spread is taken from a few runs, so a right result of one number is
beyond 24 of them about once in a million (Student's t with four degrees of freedom)."""
_FLOOR = 16
"""And by so many units in the last place of the largest element, where nothing spreads."""

_MOVES = ("copy", "clone", "cat", "stack", "fill", "zero", "ones", "full", "arange", "index_select", "detach", "rand",
          "empty", "lift", "where", "gather", "scatter", "dropout", "bernoulli", "masked", "tril", "triu", "relu",
          "slice", "select", "expand", "pad", "constant", "embedding.default", "index.Tensor")  # fmt: skip
_SUMS = ("mm", "sum", "mean", "convolution", "attention", "embedding_dense_backward", "index_put", "linear", "dot")


class Perturbed(TorchDispatchMode):
    """Inside it each floating-point operation is off by at most `unit`, drawn by `seed`; and where a gradient is
    recorded or computed, by the spacing of its dtype where that is more."""

    def __init__(self, seed: int, unit: float = 0.0) -> None:
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if any(name.lstrip("_").startswith(each) for each in _MOVES) or _is_view(func):
            return func(*args, **(kwargs or {}))
        if any(each in name for each in _SUMS) and not func._schema.is_mutable:
            args = tree_map_only(Tensor, self.nudged, args)
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            tree_map_only(Tensor, self.nudge, result)
            return result
        return tree_map_only(Tensor, self.nudged, result)

    def nudged(self, tensor: Tensor) -> Tensor:
        """A copy that is a little off."""
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        computes = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        # Weights that are drawn or loaded, in whatever dtype, are the same in both runs, and are no result of theirs.
        eps = max(torch.finfo(tensor.dtype).eps, self.unit) if computes else self.unit
        drawn = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64).mul_(2).sub_(1)
        return (tensor.double() * (1 + eps * drawn.to(tensor.device))).to(tensor.dtype)

    def nudge(self, tensor: Tensor) -> Tensor:
        """The tensor itself, a little off."""
        return tensor.copy_(self.nudged(tensor)) if tensor.is_floating_point() else tensor


class OtherDice(TorchDispatchMode):
    """Inside it dropout draws another stream of random numbers, whatever the seed; weights are drawn as before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "dropout" in str(func) or "bernoulli" in str(func):
            torch.rand(1)
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def eps_of(dtype: str) -> float:
    """The spacing of a dtype at 1; 0 of integers, which are exact."""
    found = getattr(torch, dtype)
    return float(torch.finfo(found).eps) if found.is_floating_point else 0.0


@dataclass(frozen=True)
class Allowed:
    """How far each element of a tensor may be off, and the spread that says so."""

    spread: Array
    floor: float

    @classmethod
    def of(cls, right: Array, others: list[Array], eps: float) -> Allowed:
        """Of a result, and of the same with each operation perturbed; `eps` is the spacing of the coarsest dtype."""
        flat = right.ravel()
        off = np.stack([(each.ravel() - flat) ** 2 for each in others]) if others else np.zeros((1, flat.size))
        spread = np.sqrt(off.mean(0))
        largest = float(np.abs(flat).max(initial=0.0))
        return cls(np.maximum(spread, np.sqrt(np.mean(spread**2)) if flat.size else 0.0), _FLOOR * eps * largest)

    def beyond(self, seen: Array, right: Array, index: Array | None = None) -> float:
        """How many times too far the worst element is off: above 1 is too far."""
        if not seen.size:
            return 0.0
        spread = self.spread if index is None else self.spread[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            off = np.abs(seen - right) / (TIMES * spread + self.floor)
        return float(np.where(seen == right, 0.0, np.where(np.isfinite(off), off, np.inf)).max())

    def share(self, right: Array) -> float:
        """The spread as a share of the result: root mean squares."""
        size = float(np.sqrt(np.mean(np.square(right)))) if right.size else 0.0
        mean = float(np.sqrt(np.mean(np.square(self.spread)))) if right.size else 0.0
        return (mean + self.floor / _FLOOR) / size if size else 0.0
