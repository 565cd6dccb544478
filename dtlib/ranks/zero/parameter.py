"""What a parameter becomes when its module is wrapped: the same object, of a class that knows where its parts lie.

So a training loop that treats it as in one process gets what one process gets, or an error with a name.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.ranks.shared.parts import OnOneStage, Slice
from dtlib.ranks.shared.replicas import gradient_hooks, raw_grad, set_raw_grad

_places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The shard of each parameter (not kept alive by it), its number there and its name."""


class Sharded(nn.Parameter):
    """A parameter whose ``.grad`` is what this rank has of its mean gradient: in stages 2 and 3 a flat piece.

    ``parameter.grad = None`` forgets it, wherever it lies; another value is refused.
    """

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient that autograd has just put there, or this rank's part of the mean."""
        own, (shard, index, _) = raw_grad(self), _place(self)
        return own if own is not None or shard is None else shard.gradient_of(index)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        shard, index, name = _place(self)
        if shard is not None and value is not None:
            raise RuntimeError(f"the gradient of {name!r} lies with its owners: set it to None, or add to the loss")
        if shard is not None:
            shard.forget([index])
        set_raw_grad(self, value)


class Away(Sharded):
    """A parameter of which this rank has a piece at the moment. To compute with it as if it were whole is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and refuse what fails on a piece or what autograd would differentiate."""
        result, failure = None, None
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **(kwargs or {}))
            except (RuntimeError, IndexError, ValueError) as error:  # a piece has another shape
                failure = error
            results = result if isinstance(result, tuple | list) else (result,)
            if failure or any(isinstance(each, Tensor) and each.grad_fn is not None for each in results):
                names = [_place(each)[2] for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)]
                raise RuntimeError(
                    f"the weights of {', '.join(map(repr, names)) or 'a parameter'} are split among the ranks, and "
                    "this rank has a piece: compute with them in the forward pass of their module, or inside gathered()"
                ) from failure
        return result


def claim(parameter: Tensor, shard: Any, index: int, name: str) -> None:
    """Say that a parameter lies in `shard`, as its number `index`, as long as the shard's is the hook on it."""
    _guard_other_optimizers()
    _places[parameter] = weakref.ref(shard), index, name
    mark(parameter, away=False)


def mark(parameter: Tensor, *, away: bool) -> None:
    """Say whether its full weights are there. Fake tensors and parameters of other classes stay what they are."""
    if type(parameter) in (nn.Parameter, Slice, OnOneStage, Sharded, Away):
        parameter.__class__ = Away if away else Sharded


def _place(parameter: Tensor) -> tuple[Any, int, str]:
    reference, index, name = _places.get(parameter, (lambda: None, 0, ""))
    shard = reference()
    is_free = shard is None or gradient_hooks.get(parameter) is not shard.hooks.get(index)
    return None if is_free else shard, index, name


@functools.cache
def _guard_other_optimizers() -> None:
    def refuse_sharded(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for shard, _, name in (_place(p) for group in optimizer.param_groups for p in group["params"]):
            if shard is not None:
                raise RuntimeError(f"{name!r} was wrapped by Zero, whose optimizer alone has its gradient: step that")

    register_optimizer_step_pre_hook(refuse_sharded)
