"""The complete ring: forward and backward, any mask, any lengths, shared heads; the next block is under way meanwhile.

Shapes: as in `tiles`; a heads of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtlib.ranks.shared.alike import refuse_unlike_calls
from dtlib.ranks.shared.peers import Peers, wait_for

from .layout import Layout
from .tiles import Mask, Ranges, add_gradients, merge_tile, wide


def ring_attention(q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, layout: Layout, mask: Mask | None = None) -> Tensor:
    """What this rank's queries see of all keys and values, (b, a, s/N, d); `mask` is causal if None.

    | | whole | this rank |
    |---|---|---|
    | queries, result | (b, a, s, d) | (b, a, s/N, d) |
    | keys, values | (b, g, s, d) | (b, g, s/N, d), and a block that comes by |
    | scores | (b, a, s, s) | a tile |

    - forward: N − 1 hops of keys and values, 2bgd · s/N elements each;
    - input gradient: N − 1 hops of these and N − 1 of their gradients, which end where they began;
    - kept: the rank's own queries, keys, values, result, and a number for each query and head.

    ``ValueError`` for tensors whose shapes do not fit each other or `layout`. Source: Liu et al. 2023, arXiv
    2310.01889; zig-zag order: Dubey et al. 2024, arXiv 2407.21783, section 3.3.2.
    """
    peers = Peers(q_basd.device, layout.group)
    refuse_shapes(q_basd, k_bgsd, v_bgsd, layout)
    return attend(q_basd, k_bgsd, v_bgsd, peers, layout.ranges, mask or Mask())


def attend(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, peers: Peers | None, ranges: list[Ranges], mask: Mask
) -> Tensor:
    """`ring_attention` of tokens at `ranges`, one list a rank; without `peers` the only list is this process's."""
    q_bgnsd = q_basd.unflatten(1, (k_bgsd.shape[1], -1))
    with torch.autocast(q_basd.device.type, enabled=False):  # which would round scores
        out: Tensor = _Ring.apply(q_bgnsd, k_bgsd, v_bgsd, peers, ranges, mask)
    return out.flatten(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q_bgnsd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, peers: Peers | None, ranges: list[Ranges],
        mask: Mask,
    ) -> Tensor:  # fmt: skip
        context.peers, context.ranges, context.mask = peers, ranges, mask
        own = torch.stack([k_bgsd, v_bgsd])
        b, g, n, s, d = q_bgnsd.shape
        out_bsgnd = q_bgnsd.new_zeros(b, s, g, n, d, dtype=wide(q_bgnsd))
        out_bgnsd = out_bsgnd.permute(0, 2, 3, 1, 4)  # token by token: what reads it next keeps no copy
        total_bgns1 = out_bgnsd.new_full((*q_bgnsd.shape[:4], 1), -torch.inf)
        rank = peers.rank if peers else 0
        for owner, block in _blocks(own, peers, ranges):
            for q, q_range, k, k_range in mask.tiles(ranges[rank], ranges[owner]):
                hidden = mask.hidden(q_range, k_range, q_bgnsd.device)
                merge_tile(out_bgnsd[..., q, :], total_bgns1[..., q, :], q_bgnsd[..., q, :], block[..., k, :], hidden)
        out_bgnsd = out_bgnsd.to(q_bgnsd.dtype)
        context.save_for_backward(q_bgnsd, k_bgsd, v_bgsd, out_bgnsd, total_bgns1)
        return out_bgnsd

    @staticmethod
    @once_differentiable
    def backward(context: Any, dout_bgnsd: Tensor) -> Any:
        q_bgnsd, k_bgsd, v_bgsd, out_bgnsd, total_bgns1 = context.saved_tensors
        peers, ranges, mask = context.peers, context.ranges, context.mask
        delta_bgns1 = (dout_bgnsd * out_bgnsd.to(total_bgns1.dtype)).sum(-1, keepdim=True)
        own, dq_bgnsd = torch.stack([k_bgsd, v_bgsd]), torch.zeros_like(out_bgnsd, dtype=wide(q_bgnsd))
        n, rank = (peers.n, peers.rank) if peers else (1, 0)
        mine, arriving = torch.zeros_like(own, dtype=wide(own)), None
        under_way: list[Any] = []
        for owner, block in _blocks(own, peers, ranges):
            gradients = mine if owner == rank else torch.zeros_like(block, dtype=mine.dtype)
            for q, q_range, k, k_range in mask.tiles(ranges[rank], ranges[owner]):
                hidden = mask.hidden(q_range, k_range, q_bgnsd.device)
                add_gradients(
                    dq_bgnsd[..., q, :], gradients[..., k, :], q_bgnsd[..., q, :], block[..., k, :],
                    dout_bgnsd[..., q, :], delta_bgns1[..., q, :], total_bgns1[..., q, :], hidden,
                )  # fmt: skip
            if owner == rank:
                continue  # its owner adds its own part when the others' has come round
            wait_for(under_way)
            gradients += 0 if arriving is None else arriving
            arriving = _room(own, ranges[(owner - 1) % n])
            leaving = gradients.to(own.dtype)  # rounded at each hop, in half precision
            under_way = peers.exchange(leaving, (rank + 1) % n, arriving, (rank - 1) % n)
        wait_for(under_way)
        mine += 0 if arriving is None else arriving
        return dq_bgnsd.to(q_bgnsd.dtype), *mine.to(own.dtype), None, None, None


def _blocks(own: Tensor, peers: Peers | None, ranges: list[Ranges]) -> Iterator[tuple[int, Tensor]]:
    """The keys and values (2, b, g, t, d) of all ranks with their owners, this rank's first; while one is used, it goes
    on to the next rank and the next one comes."""
    n, rank = (peers.n, peers.rank) if peers else (1, 0)
    block = own
    for i in range(n):
        owner, arriving, under_way = (rank - i) % n, block, []
        if peers and i < n - 1:  # nobody needs the last one
            arriving = _room(own, ranges[(owner - 1) % n])
            under_way = peers.exchange(block, (rank + 1) % n, arriving, (rank - 1) % n)
        yield owner, block
        wait_for(under_way)
        block = arriving


def _room(like: Tensor, ranges: Ranges) -> Tensor:
    """Memory for a block of tokens at `ranges`, (2, b, g, t, d)."""
    return like.new_empty((*like.shape[:3], sum(map(len, ranges)), like.shape[4]))


def refuse_shapes(q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, layout: Layout) -> None:
    """``ValueError`` unless these are queries, keys and values of this rank's tokens, and alike on all ranks."""
    length = layout.length(dist.get_rank(layout.group))
    shapes = {name: tuple(each.shape) for name, each in (("q_basd", q_basd), ("k_bgsd", k_bgsd), ("v_bgsd", v_bgsd))}
    for name, shape in shapes.items():
        if len(shape) != 4 or shape[2] != length:
            raise ValueError(f"{name} must be of shape (batch, heads, {length}, head_dim), as layout says, not {shape}")
    if shapes["k_bgsd"] != shapes["v_bgsd"]:
        raise ValueError(f"v_bgsd must have the shape of k_bgsd, {shapes['k_bgsd']}, not {shapes['v_bgsd']}")
    (b, a, _, d), (b_k, g, _, d_k) = shapes["q_basd"], shapes["k_bgsd"]
    if (b, d) != (b_k, d_k) or a % g:
        raise ValueError(f"k_bgsd must have batch {b}, head_dim {d} and a divisor of {a} heads, not {shapes['k_bgsd']}")
    dtypes = {each.dtype for each in (q_basd, k_bgsd, v_bgsd)}
    if len(dtypes) > 1:
        raise ValueError(f"q_basd, k_bgsd and v_bgsd must be of one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    what = f"{b} sequences of {layout.seq} tokens in {layout.order} order, {g} heads of {d} {k_bgsd.dtype}"
    refuse_unlike_calls("k_bgsd", what, layout.group)
