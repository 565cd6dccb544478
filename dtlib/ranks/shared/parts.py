"""Gradients of which a rank has a part: to take its norm for that of all of them is refused.

torch's own clipping would scale by another factor on each rank, without a word: so it is an error that names who
counts all parts. What else is done with such a gradient gives plain tensors, and optimizers step with it as ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer

from .replicas import raw_grad, set_raw_grad

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch._foreach_norm)
_INSTEAD = (
    "clip, or measure with max_norm=math.inf, by clip_grad_norm_ of the wrapper (Zero, threed.Training, pp.Pipeline) "
    "or by tp.clip_grad_norm, which count all parts"
)


class Piece(Tensor):
    """This rank's part of a gradient, which has no norm that means anything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, unless it is a norm."""
        _refuse_scaler(func)
        if func in _NORMS:
            raise RuntimeError(f"this is a rank's part of a gradient, and its norm is not the gradient's: {_INSTEAD}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OfAStage(Tensor):
    """The gradient of a parameter that only this rank has: its own norm is right, the norm of such norms is not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it; a norm is marked as one."""
        _refuse_scaler(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func not in _NORMS:
            return result
        return [each.as_subclass(_Norm) for each in result] if isinstance(result, list | tuple) else _norm(result)


class _Norm(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            of_many = bool(args) and isinstance(args[0], Tensor) and args[0].dim() > 0
            if of_many and func in (*_NORMS, Tensor.max, torch.max):
                raise RuntimeError(f"these are norms of one stage's gradients, and other ranks have others: {_INSTEAD}")
            result = func(*args, **(kwargs or {}))
        return _norm(result) if func in (torch.stack, torch.cat, Tensor.to) else result


def _refuse_scaler(func: Any) -> None:
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        raise RuntimeError(
            "a GradScaler looks for overflow in this rank's part of the gradients alone, so that some ranks would step "
            "and some not: train in bfloat16, which needs none"
        )


def _norm(result: Tensor) -> Tensor:
    return result.as_subclass(_Norm)


def as_piece(gradient: Tensor, kind: type[Tensor] = Piece) -> Tensor:
    """`gradient` as a `Piece`, or of another `kind`; fake tensors stay what they are."""
    return gradient.as_subclass(kind) if type(gradient) is Tensor else gradient


class Slice(nn.Parameter):
    """A parameter of which other ranks have other slices: its gradient is a `Piece`, if need be that of a slice which
    lies `elsewhere`."""

    kind: type[Tensor] = Piece
    elsewhere: nn.Parameter | None = None

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """What autograd has put there."""
        own = raw_grad(self)
        if own is None:
            return None if self.elsewhere is None else self.elsewhere.grad
        return as_piece(own, self.kind)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_raw_grad(self, value.as_subclass(Tensor) if isinstance(value, self.kind) else value)


def slice_of(whole: Tensor, group: dist.ProcessGroup | None, requires_grad: bool = True) -> nn.Parameter:
    """This rank's slice of a parameter that `group` has; with one rank a plain one."""
    return (Slice if dist.get_world_size(group) > 1 else nn.Parameter)(whole, requires_grad)


class OnOneStage(Slice):
    """A parameter of one stage of a pipeline: its gradient is `OfAStage`."""

    kind = OfAStage


def on_one_stage(module: nn.Module) -> None:
    """Say of the parameters of `module`, a pipeline's stage, that other ranks have other ones."""
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter:
            parameter.__class__ = OnOneStage


optimizer._foreach_supported_types += [Slice, OnOneStage]  # type: ignore[attr-defined]  # as DTensor does: as fast as plain ones
