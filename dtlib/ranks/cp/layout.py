"""Which tokens of a sequence each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import size_of
from dtlib.theory.cp import pieces


@dataclass(frozen=True)
class Layout:
    """`seq` tokens on the ranks of `group`, in an order of `theory.cp.ORDERS`; parts need not be equal.

    ``ValueError`` for another order, fewer tokens than parts, or a group without this rank.
    """

    seq: int
    group: Group = None
    order: str = "zigzag"

    @cached_property
    def ranges(self) -> list[list[range]]:
        """The positions of each rank, as ranges without gaps."""
        return pieces(self.seq, size_of(self.group), self.order)

    def __post_init__(self) -> None:
        len(self.ranges)  # refuses what does not go round, and who is not there

    def length(self, rank: int) -> int:
        """How many tokens `rank` of the group has."""
        return sum(map(len, self.ranges[rank]))

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions (s/N,) of this rank's tokens, int64."""
        own = self.ranges[dist.get_rank(self.group)]
        return torch.cat([torch.arange(each.start, each.stop, device=device) for each in own])

    def take(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor with all tokens along `dim`."""
        return whole.index_select(dim, self.positions(whole.device))

    def put_together(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """All tokens along `dim`, in their order, from the parts of all ranks in the order of ranks."""
        order = torch.tensor([p for own in self.ranges for each in own for p in each], device=parts[0].device)
        return torch.cat(parts, dim).index_select(dim, order.argsort())
