"""What `Zero` accepts. Everything is refused here, before a byte is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.parts import OnOneStage
from dtlib.ranks.shared.replicas import group_of, split_modules
from dtlib.ranks.shared.split import splits_of
from dtlib.theory.dp import plan_buckets
from dtlib.theory.units import MiB

from .stages import STAGES, Stage


def stage_of(stage: Any, **options: Any) -> Stage:
    """What `stage` 1, 2 or 3 frees; ``ValueError`` for another, and for `options` that are out of range or that it has
    no use for."""
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
    sizes = options["bucket_bytes"], options["first_bucket_bytes"]
    plan_buckets([], sizes[0], first_bucket_bytes=sizes[1])
    prefetch, block = options["prefetch"], options["quantised_block"]
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be a whole number of at least 0, not {prefetch!r}")
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"quantised_block must be a whole number of at least 1, or None, not {block!r}")
    of_units = (options["units"], prefetch, options["reshard_after_forward"], block) != (None, 1, True, None)
    if stage < 3 and of_units:
        raise ValueError(
            "units, prefetch, reshard_after_forward and quantised_block must be left alone at stages 1 and 2, which "
            "have all weights: they are for stage 3"
        )
    if stage == 3 and sizes != (25 * MiB, MiB):
        raise ValueError("bucket_bytes and first_bucket_bytes must be left alone at stage 3, which has units")
    return STAGES[stage]


def groups_of(module: nn.Module, param_groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """`param_groups` with trainable parameters alone; by default one group of all.

    ``TypeError`` unless they are dictionaries with ``"params"``; ``ValueError`` unless each trainable parameter of
    `module` is in one of them, once, and for a module whose weights are split.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if any(each in split_modules for each in module.modules()):
        raise ValueError("module must have its weights, and a stage 3 has split them: wrap a module once")
    missing = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    names, groups = dict(missing), []
    for each in [{"params": module.parameters()}] if param_groups is None else param_groups:
        if not isinstance(each, Mapping) or "params" not in each:
            raise TypeError(f'param_groups must be dictionaries with "params", not {each!r}')
        params = [each["params"]] if isinstance(each["params"], Tensor) else list(each["params"])
        trained = [p for p in params if isinstance(p, Tensor) and p.requires_grad]
        for parameter in trained:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise ValueError(f"param_groups must hold parameters of module, and holds another, of shape {shape}")
            if missing.pop(id(parameter), None) is None:
                name = names[id(parameter)]
                raise ValueError(f"param_groups must name each parameter once, and names {name!r} twice")
        groups.append({**each, "params": trained})
    if missing:
        raise ValueError(
            f"param_groups must hold every trainable parameter, and misses {', '.join(map(repr, missing.values()))}; "
            "freeze what is not to be trained"
        )
    return groups


def outside(module: nn.Module, group: Group) -> str:
    """A parameter of `module` of which ranks outside of `group` have slices, or that stands for those of other stages;
    "" where there is none. A norm over the group alone would leave out what the others have."""
    everyone = set(dist.get_process_group_ranks(group))
    found = [
        name for name, cuts in splits_of(module).items()
        if not everyone.issuperset(chain(*(dist.get_process_group_ranks(own) for _, own in cuts)))
    ]  # fmt: skip
    found += [name for name, parameter in module.named_parameters() if isinstance(parameter, OnOneStage)]
    return found[0] if found else ""


def optimizer_maker(make_optimizer: Callable[[Any], Optimizer], groups: Sequence[Mapping[str, Any]]) -> None:
    """Try `make_optimizer` on a few numbers: in one piece, cut in two, and as a matrix.

    ``TypeError`` unless it makes an optimizer of torch, one that treats each element by itself, with settings that do
    not depend on a parameter's shape.
    """
    if not callable(make_optimizer):
        raise TypeError(
            f"make_optimizer must make an optimizer from parameter groups, such as functools.partial(torch.optim.AdamW,"
            f" lr=1e-3), not {make_optimizer!r}"
        )
    values = torch.tensor([0.5, -2.0, 3.0, 0.25, -1.0, 8.0])
    whole, flat_settings, failure = _after_two_steps(make_optimizer, groups, [values])
    halves, *_ = _after_two_steps(make_optimizer, groups, [values[:2], values[2:]])
    name = getattr(getattr(make_optimizer, "func", make_optimizer), "__name__", repr(make_optimizer))
    matrix, settings, _ = _after_two_steps(make_optimizer, groups, [values.view(2, 3)])
    if settings != flat_settings:
        raise TypeError(
            f"make_optimizer must set flat parameters and matrices alike; {name} chooses by dim() or shape, and a rank "
            "holds flat pieces: choose before, by param_groups of the module's own parameters"
        )
    if dist.is_initialized() and dist.get_backend() == "fake":
        return  # fake tensors have no values
    # Elements beyond a vector's width go through other instructions, which may round otherwise.
    close = functools.partial(torch.allclose, rtol=1e-5, atol=1e-7, equal_nan=True)
    if failure is not None or not close(whole, halves) or not close(whole, matrix):
        raise TypeError(
            f"make_optimizer must return an optimizer that treats each element by itself; {name} looks at whole "
            "parameters, and a rank holds pieces of them"
        ) from failure


def _after_two_steps(
    make_optimizer: Any, groups: Sequence[Mapping[str, Any]], pieces: Sequence[Tensor]
) -> tuple[Tensor, list[Any], Exception | None]:
    """The elements of `pieces`, in each of `groups`, after two steps; the settings of each piece; what went wrong."""
    params = [[nn.Parameter(piece.clone()) for piece in pieces] for _ in groups]
    optimizer = make_optimizer([{**each, "params": mine} for each, mine in zip(groups, params, strict=True)])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"make_optimizer must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    every = [parameter for mine in params for parameter in mine]
    of_groups = [({id(p) for p in each["params"]}, _without_params(each)) for each in optimizer.param_groups]
    settings = [[each for members, each in of_groups if id(p) in members] for p in every]
    for factor in (1.0, -0.3):
        for parameter in every:
            parameter.grad = parameter.detach().sin() * factor
        try:
            optimizer.step()
        except (TypeError, RuntimeError, ValueError) as failure:  # it wants a closure, sparse gradients, ...
            return _flat(every), settings, failure
    return _flat(every), settings, None


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _flat(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in params])


def dtypes(module: nn.Module, **wanted: torch.dtype | None) -> None:
    """``ValueError`` unless all trainable parameters are real floating point, and the `wanted` dtypes too or None."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise ValueError(f"module must have parameters of floating point; {name!r} is {parameter.dtype}")
    for argument, dtype in wanted.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{argument} must be a floating-point dtype or None, not {dtype!r}")


def replicas(replicas: Group, group: Group, module: nn.Module) -> None:
    """``ValueError`` unless `replicas` is None, or holds this rank and no other one of `group`, which hold alike all
    parameters of `module`."""
    if replicas is None:
        return
    rank = dist.get_rank()
    if dist.get_rank(replicas) < 0:
        raise ValueError(f"replicas must contain this rank ({rank}), and does not")
    others = set(dist.get_process_group_ranks(replicas)) & set(dist.get_process_group_ranks(group)) - {rank}
    if others:
        raise ValueError(f"replicas must share this rank alone with group, and shares {sorted(others)} too")
    for name, parameter in module.named_parameters():
        if group_of(parameter, group) is not group:
            raise ValueError(f"replicas must be None where some ranks hold a parameter alone, as they do {name!r}")


def step(optimizer: Optimizer, arguments: Iterable[Any], local: Iterable[str]) -> None:
    """``ValueError`` for a closure in the `arguments` of a step, ``RuntimeError`` for a GradScaler, and where
    gradients are still `local`."""
    if given := [value for value in arguments if value is not None and value is not optimizer]:
        raise ValueError(f"closure must be None, not {given[0]!r}: the gradients are handed over before the step")
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "a GradScaler looks for overflow in this rank's pieces alone, so that some ranks would step and some not: "
            "train in bfloat16, which needs none"
        )
    if names := ", ".join(map(repr, sorted(local))):
        raise RuntimeError(
            f"the gradients of {names} are still local: the last backward pass was inside no_sync. Call backward() "
            "once outside of it before optimizer.step()"
        )


def no_more_groups(param_group: Any) -> None:
    """``ValueError``: a wrapper's optimizer has the groups that it was made with."""
    raise ValueError(
        "param_group must come with the wrapper, as one of param_groups: its parameters would be no shards. Put them "
        "into the module before it is wrapped, or give them an optimizer of their own"
    )
