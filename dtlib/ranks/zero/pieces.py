"""What a rank holds of a wrapped module: of what a `Zero` has spread its own pieces, and all of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.held import Held, Place
from dtlib.ranks.shared.replicas import group_of

from .zero import Zero


def held(wrapped: nn.Module, places: Mapping[int, Place], optimizer: Optimizer, group: Group = None) -> Iterator[Held]:
    """The parameters of ``wrapped.module``, which lie in the whole model as `places` says, and their states.

    The ranks of `group` have the rest alike, but for what belongs to some of them.
    """
    spread = set[int]()
    for shard in wrapped.all_shards if isinstance(wrapped, Zero) else ():
        kept = shard.chunk if shard.master is None else shard.master
        spread |= {id(parameter) for parameter in shard.params.values()}
        for index, piece in shard.pieces.items():
            place, start = places[id(shard.params[index])], shard.within(index).start
            yield Held(place, kept[piece], start, shard.weights.get(index), optimizer)
    for parameter in wrapped.module.parameters():
        if id(parameter) not in spread:
            stepped = parameter if parameter.requires_grad else None
            is_first = dist.get_rank(group_of(parameter, group)) == 0
            yield Held(places[id(parameter)], parameter.detach(), 0, stepped, optimizer, is_first)
