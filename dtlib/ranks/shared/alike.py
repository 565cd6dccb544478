"""What ranks are called with must be alike before they send each other anything: gloo ends a process that gets more
bytes than it waits for.

A group's ranks tell each other, through the store by which they met, what is new to them: at a shape's first call, and
never again, so no step sends more than theory counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE_S = 20.0
"""How long a rank with something new waits for the others to come with something new, if there was a call before."""


@dataclass
class _Calls:
    number: int = 0
    known: set[str] = field(default_factory=set)


_calls: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], _Calls]] = WeakKeyDictionary()


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks of `group`; ``ValueError`` where this rank is none of them."""
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must contain this rank ({dist.get_rank()}), and does not")
    return dist.get_world_size(group)


def gathered(row: Tensor, group: dist.ProcessGroup | None, all_gather: Any = None) -> Tensor:
    """The `row` of each rank of `group`, below each other, on the CPU; by `all_gather` in the place of torch's."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    (all_gather or dist.all_gather)(rows, row, group=group)
    return torch.stack(rows).cpu()


def described(tensor: Tensor, *, but_last: bool = False) -> str:
    """What of `tensor` must be alike: its shape, without its last entry if ranks split it, and its dtype."""
    shape = (*map(str, tensor.shape[: -1 if but_last else None]), *(["..."] if but_last else []))
    return f"({', '.join(shape)}) of {str(tensor.dtype).removeprefix('torch.')}"


def refuse_unlike_calls(name: str, what: str, group: dist.ProcessGroup | None) -> None:
    """``ValueError``, on all ranks of `group`, unless all of them are called with the same `what` as `name`: at their
    first call, and at each with which something new comes. See `refuse_unlike`."""
    if size_of(group) > 1 and dist.get_backend(group) != "fake":
        refuse_unlike(name, what, dist.get_process_group_ranks(group))


def refuse_unlike(name: str, what: str, ranks: list[int]) -> None:
    """As `refuse_unlike_calls`, of these ranks of the job. All of them must call it equally often.

    What all of them have had is not asked again. A rank that alone comes with something new waits for `PATIENCE_S`, and
    says so: the others are under way with what they know. A store that waits for less has nobody else in it, as behind
    the walls of grading, where each rank has one of its own: nothing is asked there.
    """
    what += "" if torch.is_grad_enabled() else ", without gradients"
    calls = _calls.setdefault(dist.group.WORLD, {}).setdefault((name, tuple(ranks)), _Calls())
    calls.number += 1
    if what in calls.known:
        return
    store, me, must = _get_default_store(), dist.get_rank(), f"{name} must be alike on all ranks of group"
    if store.timeout < timedelta(seconds=PATIENCE_S):
        return
    keys = {rank: f"alike/{name}/{'-'.join(map(str, ranks))}/{calls.number}/{rank}" for rank in ranks}
    store.set(keys[me], what)
    try:
        if calls.known:
            store.wait(list(keys.values()), timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:  # stores have no common word for it
        raise ValueError(
            f"{must}; rank {me} has {what}, which is new, and after {PATIENCE_S:.0f} seconds not all others have "
            "something new"
        ) from error
    found = {rank: store.get(key).decode() for rank, key in keys.items()}
    for rank, theirs in found.items():
        if theirs != found[ranks[0]]:
            raise ValueError(f"{must}; rank {ranks[0]} has {found[ranks[0]]}, and rank {rank} {theirs}")
    calls.known.add(what)
