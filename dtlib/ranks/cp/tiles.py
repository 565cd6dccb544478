"""Attention of some queries to some keys, tile by tile: a range of positions against a range, and no s × s matrix.

Shapes: b sequences, g heads of keys and values, n heads of queries for each, s queries, t keys, d entries of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Ranges = list[range]


@dataclass(frozen=True)
class Mask:
    """What a query may see: earlier keys and its own if `causal`, and keys of its own document if these are given,
    `documents_bs`, a number for each position."""

    causal: bool = True
    documents_bs: Tensor | None = None

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """What of a tile is masked, to be broadcast to (b, g, n, s, t); None where nothing is."""
        hidden = None
        if self.causal and keys.stop > queries.start + 1:
            q_s, k_t = (torch.arange(each.start, each.stop, device=device) for each in (queries, keys))
            hidden = k_t > q_s[:, None]
        if self.documents_bs is not None:
            own_bs, other_bt = (self.documents_bs[:, each.start : each.stop] for each in (queries, keys))
            others = (own_bs[:, :, None] != other_bt[:, None])[:, None, None]
            hidden = others if hidden is None else hidden | others
        return hidden

    def tiles(self, queries: Ranges, keys: Ranges) -> Iterator[tuple[slice, range, slice, range]]:
        """Each pair of ranges that is not masked as a whole, with their places among the rank's queries and keys."""
        for q_place, q_range in _places(queries):
            for k_place, k_range in _places(keys):
                if not self.causal or k_range.start < q_range.stop:
                    yield q_place, q_range, k_place, k_range


def _places(ranges: Ranges) -> list[tuple[slice, range]]:
    starts = [0]
    for each in ranges:
        starts.append(starts[-1] + len(each))
    return [(slice(*bounds), each) for bounds, each in zip(pairwise(starts), ranges, strict=True)]


def _scores(q_bgnsd: Tensor, k_bgtd: Tensor, hidden: Tensor | None) -> Tensor:
    """Scaled scores (b, g, n, s, t), −∞ where hidden, in float32 at least; queries that share a key are rows of one
    product."""
    rows = q_bgnsd.flatten(2, 3).to(wide(q_bgnsd))  # a rounded score would be off by a factor in its exponential
    x_bgnst = (rows @ k_bgtd.mT.to(rows.dtype)).unflatten(2, q_bgnsd.shape[2:4]).div_(q_bgnsd.shape[-1] ** 0.5)
    return x_bgnst if hidden is None else x_bgnst.masked_fill_(hidden, -torch.inf)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which results are merged."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _finite(total: Tensor) -> Tensor:
    return total.masked_fill(total == -torch.inf, 0)  # a query that sees nothing: exp(−∞ − 0) is 0


def merge_tile(out_bgnsd: Tensor, total_bgns1: Tensor, q_bgnsd: Tensor, kv: Tensor, hidden: Tensor | None) -> None:
    """Merge what the queries see in a tile, keys and values (2, b, g, t, d), into `out_bgnsd` and `total_bgns1`, its
    logarithm, in place."""
    k_bgtd, v_bgtd = kv
    x_bgnst = _scores(q_bgnsd, k_bgtd, hidden)
    part_total = x_bgnst.logsumexp(-1, keepdim=True)
    weights = x_bgnst.sub_(_finite(part_total)).exp_()
    part = (weights.to(v_bgtd.dtype).flatten(2, 3) @ v_bgtd).unflatten(2, q_bgnsd.shape[2:4])
    both = torch.logaddexp(total_bgns1, part_total)
    out_bgnsd.mul_((total_bgns1 - _finite(both)).exp_()).add_(part * (part_total - _finite(both)).exp_())
    total_bgns1.copy_(both)


def add_gradients(
    dq_bgnsd: Tensor, dkv: Tensor, q_bgnsd: Tensor, kv: Tensor,
    dout_bgnsd: Tensor, delta_bgns1: Tensor, total_bgns1: Tensor, hidden: Tensor | None,
) -> None:  # fmt: skip
    """Add a tile's share to the gradients, in place: p = exp(x − L), dx = p (do · v − δ), with δ = do · o."""
    (k_bgtd, v_bgtd), (dk_bgtd, dv_bgtd), shape = kv, dkv, q_bgnsd.shape[2:4]
    p_bgnst = _scores(q_bgnsd, k_bgtd, hidden).sub_(_finite(total_bgns1)).exp_()
    rows_p, rows_do = p_bgnst.to(v_bgtd.dtype).flatten(2, 3), dout_bgnsd.flatten(2, 3)
    dv_bgtd.add_(rows_p.mT @ rows_do)
    dp_bgnst = (rows_do.to(p_bgnst.dtype) @ v_bgtd.mT.to(p_bgnst.dtype)).unflatten(2, shape)
    dx_bgnst = p_bgnst.mul_(dp_bgnst.sub_(delta_bgns1)).div_(q_bgnsd.shape[-1] ** 0.5)
    rows_dx = dx_bgnst.to(k_bgtd.dtype).flatten(2, 3)
    dq_bgnsd.add_((rows_dx @ k_bgtd).unflatten(2, shape))
    dk_bgtd.add_(rows_dx.mT @ q_bgnsd.flatten(2, 3))
