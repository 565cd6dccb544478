"""What the stages of ZeRO accept. Everything is refused here, before a byte is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam

_WHOLE_TENSORS: tuple[type[Optimizer], ...] = (
    LBFGS,
    Adafactor,
    SparseAdam,
    *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()),
)
"""Optimizers that look at a parameter as a whole (its rows, its norm, all parameters at once)."""

sharded: WeakSet[nn.Module] = WeakSet()
"""The modules whose weights are split among ranks."""


def groups_of(module: nn.Module, param_groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """`param_groups` with trainable parameters alone; by default one group of all.

    ``TypeError`` unless they are dictionaries with ``"params"``; ``ValueError`` unless each trainable parameter of
    `module` is in one of them, once, and for a module whose weights a stage 3 has put away.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if any(each in sharded for each in module.modules()):
        raise ValueError("module must have its weights, and a ZeroStage3 has split them: wrap a module once")
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if param_groups is None:
        return [{"params": [p for p in module.parameters() if p.requires_grad]}]
    groups, seen = [], set()
    for each in param_groups:
        if not isinstance(each, Mapping) or "params" not in each:
            raise TypeError(f'param_groups must be dictionaries with "params", not {each!r}')
        params = each["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for parameter in params:
            if id(parameter) in seen:
                raise ValueError(
                    f"param_groups must name each parameter once, and names {names[id(parameter)]!r} twice"
                )
            if isinstance(parameter, torch.Tensor) and parameter.requires_grad:
                if id(parameter) not in names:
                    raise ValueError(
                        "param_groups must hold parameters of module, and holds another, of shape "
                        f"{tuple(parameter.shape)}"
                    )
                seen.add(id(parameter))
        groups.append({**each, "params": [p for p in params if id(p) in seen]})
    missing = [name for identity, name in names.items() if identity not in seen]
    if missing:
        raise ValueError(
            f"param_groups must hold every trainable parameter, and misses {', '.join(map(repr, missing))}; freeze "
            "what is not to be trained"
        )
    return groups


def optimizer_maker(make_optimizer: Callable[[Any], Optimizer], groups: Sequence[Mapping[str, Any]]) -> None:
    """Try `make_optimizer` on groups of one element each.

    ``TypeError`` unless it makes an optimizer of torch, and one that treats each element by itself.
    """
    if not callable(make_optimizer):
        raise TypeError(
            f"make_optimizer must make an optimizer from parameter groups, such as functools.partial(torch.optim.AdamW,"
            f" lr=1e-3), not {make_optimizer!r}"
        )
    trial = make_optimizer([{**each, "params": [nn.Parameter(torch.zeros(1))]} for each in groups])
    if not isinstance(trial, Optimizer):
        raise TypeError(f"make_optimizer must return a torch.optim.Optimizer, not {type(trial).__name__}")
    if isinstance(trial, _WHOLE_TENSORS):
        raise TypeError(
            f"make_optimizer must return an optimizer that treats each element by itself; {type(trial).__name__} "
            "looks at whole parameters, and a rank holds pieces of them"
        )


def dtypes(module: nn.Module, master_dtype: torch.dtype | None) -> None:
    """``ValueError`` unless all trainable parameters are real floating point, and `master_dtype` too or None."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise ValueError(f"module must have parameters of floating point; {name!r} is {parameter.dtype}")
    if master_dtype is not None and not (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point):
        raise ValueError(f"master_dtype must be a floating-point dtype or None, not {master_dtype!r}")


def step(optimizer: Optimizer, arguments: Iterable[Any], local: Iterable[str]) -> None:
    """``ValueError`` for a closure in the `arguments` of a step, ``RuntimeError`` where gradients are still `local`."""
    given = [value for value in arguments if value is not None and value is not optimizer]
    if given:
        raise ValueError(
            f"closure must be None, not {given[0]!r}: the gradients are handed over before the step begins"
        )
    names = ", ".join(map(repr, sorted(local)))
    if names:
        raise RuntimeError(
            f"the gradients of {names} are still local: the last backward pass was inside no_sync. Call backward() "
            "once outside of it before optimizer.step()"
        )
