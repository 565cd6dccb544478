"""Keys and values of the positions that were seen, so that a pass reads its new tokens alone.

Shapes: a heads of queries, g of keys and values, d entries of a head, s new positions, t all positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtlib.theory.valid import whole


class CachedCore(nn.Module):
    """Attention of new queries to all keys and values so far."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        """Keep what is new, and let each new position see what came before, and itself: (b, a, s, d)."""
        new = k_bgsd, v_bgsd
        before = self.kept or tuple(each[:, :, :0] for each in new)
        k_bgtd, v_bgtd = self.kept = tuple(torch.cat(both, 2) for both in zip(before, new, strict=True))  # type: ignore[assignment]
        s, t = q_basd.shape[2], k_bgtd.shape[2]
        seen_st = torch.ones(s, t, dtype=torch.bool, device=q_basd.device).tril(t - s)
        shared = q_basd.shape[1] > k_bgtd.shape[1]
        return F.scaled_dot_product_attention(q_basd, k_bgtd, v_bgtd, attn_mask=seen_st, enable_gqa=shared)


class Cache:
    """The keys and values of some `blocks`, for as long as the ``with`` block lasts: within it each call of a block
    reads the positions that come next, and `length` says how many it knows."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        self.attentions = [block.attention for block in blocks]
        self.cores = [CachedCore() for _ in self.attentions]
        self.own = [each.core for each in self.attentions]

    def __enter__(self) -> Cache:
        """Put the caches in place."""
        for attention, core in zip(self.attentions, self.cores, strict=True):
            attention.core = core
        return self

    def __exit__(self, *raised: object) -> None:
        """Give the blocks their own attention back."""
        for attention, core in zip(self.attentions, self.own, strict=True):
            attention.core = core

    @property
    def length(self) -> int:
        """Positions that are known."""
        return 0 if not self.cores or self.cores[0].kept is None else self.cores[0].kept[0].shape[2]

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on; ``ValueError`` if there are not so many."""
        if whole("length", length, 0) > self.length and self.cores:
            raise ValueError(f"length must be at most the {self.length} positions that are known, not {length}")
        for core in self.cores:
            if core.kept is not None:
                core.kept = core.kept[0][:, :, :length], core.kept[1][:, :, :length]
