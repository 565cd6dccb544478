"""What `Zero` accepts. Everything is refused here, before a byte is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.parts import OnOneStage
from dtlib.ranks.shared.replicas import group_of
from dtlib.ranks.shared.split import splits_of
from dtlib.theory.dp import plan_buckets
from dtlib.theory.units import MiB
from dtlib.theory.valid import whole


def stage_of(stage: Any, *, of_buckets: Sequence[Any], of_units: Sequence[Any]) -> int:
    """`stage`, 1, 2 or 3; ``ValueError`` for another, and for options that are out of range or of no use to it."""
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
    bucket_bytes, first_bucket_bytes = of_buckets
    plan_buckets([], bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    _, prefetch, _, block = of_units
    whole("prefetch", prefetch, 0)
    if block is not None:
        whole("quantised_block", block, 1)
    if stage < 3 and of_units != (None, 1, True, None):
        raise ValueError(
            "units, prefetch, reshard_after_forward and quantised_block must be left alone at stages 1 and 2, which "
            "have all weights: they are for stage 3"
        )
    if stage == 3 and of_buckets != (25 * MiB, MiB):
        raise ValueError("bucket_bytes and first_bucket_bytes must be left alone at stage 3, which has units")
    return int(stage)


def groups_of(module: nn.Module, param_groups: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """`param_groups` with trainable parameters alone; by default one group of all.

    ``TypeError`` unless they are dictionaries with ``"params"``; ``ValueError`` unless each trainable parameter of
    `module` is in one of them, once.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    seen, groups = set[int](), []
    for each in [{"params": module.parameters()}] if param_groups is None else param_groups:
        if not isinstance(each, Mapping) or "params" not in each:
            raise TypeError(f'param_groups must be dictionaries with "params", not {each!r}')
        params = [each["params"]] if isinstance(each["params"], Tensor) else list(each["params"])
        groups.append({**each, "params": [p for p in params if isinstance(p, Tensor) and p.requires_grad]})
        for p in groups[-1]["params"]:
            if id(p) not in names:
                raise ValueError(f"param_groups must hold parameters of module, and holds another, {tuple(p.shape)}")
            if id(p) in seen:
                raise ValueError(f"param_groups must name each parameter once, and names {names[id(p)]!r} twice")
            seen.add(id(p))
    if missing := [name for key, name in names.items() if key not in seen]:
        raise ValueError(
            f"param_groups must hold every trainable parameter, and misses {', '.join(map(repr, missing))}; "
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
    """Try `make_optimizer` on a few numbers: cut in two pieces, and as a matrix.

    ``TypeError`` unless it makes an optimizer of torch, one that treats each element by itself, with settings that do
    not depend on a parameter's shape.
    """
    if not callable(make_optimizer):
        raise TypeError(
            f"make_optimizer must make an optimizer from parameter groups, such as functools.partial(torch.optim.AdamW,"
            f" lr=1e-3), not {make_optimizer!r}"
        )
    name = getattr(getattr(make_optimizer, "func", make_optimizer), "__name__", repr(make_optimizer))
    row = torch.tensor([0.5, -2.0, 3.0, 0.25, -1.0, 8.0])
    in_pieces, settings, failure = _after_two_steps(make_optimizer, groups, [row[:2], row[2:]])
    as_matrix, others, _ = _after_two_steps(make_optimizer, groups, [row.view(2, 3)])
    if settings != others:
        raise TypeError(
            f"make_optimizer must set flat parameters and matrices alike; {name} chooses by dim() or shape, and a rank "
            "holds flat pieces: choose before, by param_groups of the module's own parameters"
        )
    if dist.is_initialized() and dist.get_backend() == "fake":
        return  # fake tensors have no values
    # Elements beyond a vector's width go through other instructions, which may round otherwise.
    if failure is not None or not torch.allclose(in_pieces, as_matrix, rtol=1e-5, atol=1e-7, equal_nan=True):
        raise TypeError(
            f"make_optimizer must return an optimizer that treats each element by itself; {name} looks at whole "
            "parameters, and a rank holds pieces of them"
        ) from failure


def _after_two_steps(
    make_optimizer: Any, groups: Sequence[Mapping[str, Any]], pieces: Sequence[Tensor]
) -> tuple[Tensor, list[Any], Exception | None]:
    """The elements of `pieces`, in each of `groups`, after two steps; each group's settings; what went wrong."""
    params = [[nn.Parameter(piece.clone()) for piece in pieces] for _ in groups]
    optimizer = make_optimizer([{**each, "params": mine} for each, mine in zip(groups, params, strict=True)])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"make_optimizer must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    every = [parameter for mine in params for parameter in mine]
    of_piece = {id(p): {k: v for k, v in each.items() if k not in ("params", "param_names")}
                for each in optimizer.param_groups for p in each["params"]}  # fmt: skip
    failure = None
    try:
        for factor in (1.0, -0.3):
            for parameter in every:
                parameter.grad = parameter.detach().sin() * factor
            optimizer.step()
    except (TypeError, RuntimeError, ValueError) as error:  # it wants a closure, sparse gradients, ...
        failure = error
    return torch.cat([p.detach().flatten() for p in every]), [of_piece.get(id(mine[0])) for mine in params], failure


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
