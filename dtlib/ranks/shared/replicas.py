"""What every wrapper of a module that ranks hold needs: who holds which parameter, a common start, and who listens to
its gradients."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.ranks.mesh import Group

from .alike import size_of

_groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

gradient_hooks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The hook of each parameter that some wrapper averages."""


split_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules whose weights are split among ranks: no other wrapper can average their gradients."""


def belongs_to(parameter: Tensor, group: Group) -> None:
    """Say that the ranks of `group` alone hold `parameter`: the others have other ones under its name, as experts are.

    Whoever wraps its module for data parallelism then lets them begin alike, sums its gradient over them, and shards it
    over them; what the sum is divided by stays the number of ranks that share out the samples. ``ValueError`` for a
    group without this rank.
    """
    size_of(group)
    _groups[parameter] = group


def group_of(tensor: Tensor, others: Group) -> Group:
    """The ranks that hold `tensor`: a group that it belongs to, or that of all `others`."""
    return _groups.get(tensor, others)  # type: ignore[no-any-return]


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """`method` with its `first` arguments, as a hook that does not keep the method's object alive.

    Python's garbage collector does not see what hangs on a tensor: a hook with its wrapper would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*first, *args, **kwargs)

    return call


def raw_grad(parameter: Tensor) -> Any:
    """What autograd has put into a parameter, whatever a wrapper lets ``parameter.grad`` say."""
    return Tensor.grad.__get__(parameter)


def set_raw_grad(parameter: Tensor, value: Tensor | None) -> None:
    """Put `value` where autograd adds to."""
    Tensor.grad.__set__(parameter, value)


def refuse_gradient(name: str, gradient: Any) -> None:
    """``RuntimeError`` for a gradient that is sparse, or has a graph of its own, which ends on this rank."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise RuntimeError(f"the gradient of {name!r} is sparse, and what is sent is dense")
    if gradient is not None and gradient.requires_grad:
        raise RuntimeError(
            f"the gradient of {name!r} is to be differentiated again (create_graph=True), and its mean over the ranks "
            "cannot be: take what the loss needs by torch.autograd.grad, and go backward once"
        )


def signature(module: nn.Module) -> list[tuple[Any, ...]]:
    """Each parameter of `module`: its name, shape, dtype, whether it is trained, and which object it is."""
    comes_and_goes = any(each in split_modules for each in module.modules())  # the shape, with the weights
    shapes = {n: () if comes_and_goes else tuple(p.shape) for n, p in module.named_parameters()}
    return [(n, shapes[n], p.dtype, p.requires_grad, id(p)) for n, p in module.named_parameters()]


def refuse_changes(before: list[tuple[Any, ...]], now: list[tuple[Any, ...]]) -> None:
    """``RuntimeError`` unless a module has the `signature` that it had when it was wrapped."""
    if now != before:
        names = ", ".join(repr(name) for name in sorted({name for name, *_ in set(now) ^ set(before)}))
        raise RuntimeError(
            f"{names} changed after the module was wrapped (frozen, unfrozen, replaced or cast): it would be averaged "
            "wrongly or not at all. Change the module first, then wrap it"
        )


def refuse_torchs(module: nn.Module, *, is_split: bool, is_one: bool) -> None:
    """``ValueError`` for a wrapper of torch that sums gradients too early: where halves of a backward pass come apart
    (`is_split`), or with DistributedDataParallel where more than one pass comes, in any order (not `is_one`)."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and (is_split or not is_one):
        raise ValueError("stages must not be in torch's DistributedDataParallel where a step has several backward "
                         "passes, or halves of one: wrap them by ranks.dp")  # fmt: skip
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes a second
    if is_split and fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in module.modules()):
        raise ValueError("stages must not be in torch's FSDP where the schedule splits backward passes, which it takes "
                         "for several: wrap them by ranks.zero")  # fmt: skip


def refuse_slices(module: nn.Module, group: Group, called: str = "group") -> None:
    """``ValueError`` where several ranks of `group` have different slices of one parameter, which no mean is of."""
    from .split import splits_of  # which knows parts, and these know who holds what

    own, named = dist.get_rank(), dict(module.named_parameters())
    for name, cuts in splits_of(module).items():
        everyone = set(dist.get_process_group_ranks(_groups.get(named[name], group) if name in named else group))
        for _, over in cuts:
            if others := everyone.intersection(dist.get_process_group_ranks(over)) - {own}:
                raise ValueError(f"{called} must be of ranks that have the same slice of {name!r}, and rank {own} "
                                 f"shares it out with {sorted(others)}")  # fmt: skip


def refuse_own(module: nn.Module, group: Group, called: str = "group") -> None:
    """``ValueError`` where ranks of `group`, an argument `called` so, have parameters of their own under one name."""
    everyone = set(dist.get_process_group_ranks(group))
    for name, parameter in module.named_parameters():
        if everyone - set(dist.get_process_group_ranks(group_of(parameter, group))):
            raise ValueError(
                f"{called} must hold all parameters alike, and {name!r} belongs to some of its ranks alone"
            )
    refuse_slices(module, group, called)


def begin_alike(module: nn.Module, group: Group) -> None:
    """Let all ranks of `group` begin with the weights and buffers of its rank 0, and those that a parameter belongs to
    with that of their own rank 0.

    ``ValueError``, on every rank and before that, unless all have the same names, shapes and dtypes, the same is
    frozen, and none has another slice. Sends nothing where there is one rank, or no values (the meta device).
    """
    refuse_slices(module, group)
    device = next(module.parameters()).device
    every: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    groups = {name: group_of(tensor, group) for name, tensor in every.items()}
    for each in dict.fromkeys([group, *groups.values()]) if device.type != "meta" else ():
        if dist.get_world_size(each) > 1:
            own = {name: tensor.detach() for name, tensor in every.items() if groups[name] is each}
            alike = [(n, str((tuple(t.shape), t.dtype, t.requires_grad) if n in own else "")) for n, t in every.items()]
            _refuse_unlike(alike, device, each)
            broadcast(list(own.values()), each)


def _refuse_unlike(mine: list[tuple[str, str]], device: torch.device, group: Group) -> None:
    """``ValueError`` unless all ranks of `group` come with the same: one all-reduce of 16 bytes, where all is well."""
    digest = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if dist.get_backend(group) == "fake" or extremes[0] == -extremes[1]:
        return  # a fake group has no other ranks, and a fake tensor no values
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, everyone, strict=True):
        odd = sorted({name for name, _ in set(theirs) ^ set(everyone[0])})
        if odd or theirs != everyone[0]:
            what = ", ".join(map(repr, odd)) or "the order of its parameters"
            raise ValueError(f"module must be alike on all ranks; rank {rank} and rank {ranks[0]} differ in {what}")


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Send `tensors` from the group's rank 0 to all others, one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    root = 0 if group is None else dist.get_global_rank(group, 0)
    for alike in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, src=root, group=group)
        if dist.get_rank() != root:
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                # Through `.data`: a forward pass whose backward is still to come may have saved the tensor, and
                # autograd would refuse it as modified (batch norm's statistics, in two forward passes on end).
                tensor.data.copy_(part.view(tensor.shape))
