"""Exact inside a node, where links are fast; compressed across, where they are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.dp import Bucket, Exchange
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.exchange import gather, scatter
from dtlib.ranks.shared.peers import Peers
from dtlib.theory.valid import node_size, whole

from .base import Compressed, Sum, is_finite, sizes_of


class Hierarchy(Compressed):
    """Reduce-scatter inside a node, the exchange `across` among the ranks of one place in all nodes, all-gather inside.

    Ranks 0 to g − 1 of a group are the first node of g = `ranks_per_node`, and so on. Each place has a g-th of each
    parameter's rows, whatever bucket it travels in, so that what `across` remembers fits; to it they are matrices of
    fewer rows. Where a group is one node all of it is exact. ``ValueError`` for a size below 1, an `across` that cannot
    be called, and, on all ranks, unless the size divides that of the group.
    """

    def __init__(self, ranks_per_node: int, across: Exchange) -> None:
        super().__init__()
        if not callable(across):
            raise ValueError(f"across must be a function of a bucket and a group, not {across!r}")
        self.ranks_per_node, self.across = whole("ranks_per_node", ranks_per_node, 1), across
        self._groups: dict[Group, tuple[Group, Group]] = {}
        self._number = 0

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """A reduce-scatter, what `across` sends of the chunk, an all-gather."""
        g = self.ranks_per_node
        inside, across = self._groups_of(group)
        peers, number = Peers(meant.flat.device, inside), self._number
        self._number += 1
        parts = {name: torch.atleast_1d(view).tensor_split(g) for name, view in meant.views.items()}
        by_place = [{name: each[place] for name, each in parts.items()} for place in range(g)]
        bounds = [*accumulate((sum(part.numel() for part in own.values()) for own in by_place), initial=0)]
        flat = torch.cat([part.flatten() for own in by_place for part in own.values()])
        if not is_finite(flat):
            flat.fill_(torch.nan)  # so that it shows at every place
        chunks = flat.split([stop - start for start, stop in pairwise(bounds)])
        own, chunk = by_place[peers.rank], chunks[peers.rank]
        for _ in scatter(peers, flat, bounds, number):
            yield None
        if len(chunk):
            views = {name: each.view_as(part) for (name, part), each in _cut(own, chunk) if part.numel()}
            try:
                yield self.across(Bucket(chunk, views, group=across), across)
            except FloatingPointError:
                chunk.fill_(torch.nan)  # the others of the node are told by what they gather
        for _ in gather(peers, flat, bounds, number):
            yield None

        def write(total: Tensor) -> None:
            views = dict(zip(meant.views, total.split(sizes_of(meant)), strict=True))
            starts = dict.fromkeys(views, 0)
            for own, chunk in zip(by_place, chunks, strict=True):
                for (name, part), each in _cut(own, chunk):
                    views[name][starts[name] : starts[name] + part.numel()] = each
                    starts[name] += part.numel()

        return flat, write

    def rescale(self, *, old_lr: float, new_lr: float) -> None:
        """As `across` does."""
        super().rescale(old_lr=old_lr, new_lr=new_lr)
        if isinstance(self.across, Compressed):
            self.across.rescale(old_lr=old_lr, new_lr=new_lr)

    def state_dict(self) -> dict[str, Any]:
        """What `across` remembers on this rank."""
        return super().state_dict() | {"across": self.across.state_dict() if hasattr(self.across, "state_dict") else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Compressed.load_state_dict`."""
        super().load_state_dict(state)
        if hasattr(self.across, "load_state_dict"):
            self.across.load_state_dict(state["across"])

    def _groups_of(self, group: Group) -> tuple[Group, Group]:
        """The ranks of this one's node, and those of its place in all nodes; made at the first call."""
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            g = node_size(len(ranks), self.ranks_per_node)
            node, place = divmod(dist.get_rank(group), g)
            inside, across = ranks[node * g : (node + 1) * g], ranks[place::g]
            self._groups[group] = (dist.new_group(inside, use_local_synchronization=True),
                                   dist.new_group(across, use_local_synchronization=True))  # fmt: skip
        return self._groups[group]


def _cut(parts: Mapping[str, Tensor], chunk: Tensor) -> Iterator[tuple[tuple[str, Tensor], Tensor]]:
    """Each of `parts` beside its place in `chunk`."""
    return zip(parts.items(), chunk.split([part.numel() for part in parts.values()]), strict=True)
