"""Weights in 8 bits for their journey, as in ZeRO++: blocks of whole numbers, and one scale for each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dtlib.ranks.shared.peers import Peers

from .exchange import gather


def packed_bytes(num_elements: int, block: int) -> int:
    """Bytes of a quantised chunk: 4 for the scale of each block, 1 for each element, rounded up to a multiple of 4."""
    return 4 * -(-num_elements // block) + 4 * -(-num_elements // 4)


@torch.no_grad()
def quantise(chunk: Tensor, block: int) -> Tensor:
    """A flat chunk as bytes: a float32 scale for each `block` of elements, then the elements as int8.

    scale = max |w| / 127 over the block, q = round(w / scale): w is off by scale/2 at most. uint8, `packed_bytes` long.
    Source: Wang et al. 2023, arXiv 2306.10209, section 3.1.
    """
    num = chunk.numel()
    packed = torch.zeros(packed_bytes(num, block), dtype=torch.uint8, device=chunk.device)
    if num:
        blocks = -(-num // block)
        padded = torch.zeros(blocks * block, dtype=torch.float32, device=chunk.device)
        padded[:num] = chunk
        rows = padded.view(blocks, block)
        scales = rows.abs().amax(dim=1) / 127
        rows /= scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        packed[: 4 * blocks].view(torch.float32).copy_(scales)
        packed[4 * blocks : 4 * blocks + num].view(torch.int8).copy_(padded[:num].round_().clamp_(-127, 127))
    return packed


@torch.no_grad()
def dequantise(packed: Tensor, num_elements: int, block: int) -> Tensor:
    """What `quantise` rounded, as `num_elements` float32."""
    blocks = -(-num_elements // block)
    scales = packed[: 4 * blocks].view(torch.float32)
    padded = torch.zeros(blocks * block, dtype=torch.float32, device=packed.device)
    padded[:num_elements] = packed[4 * blocks : 4 * blocks + num_elements].view(torch.int8)
    padded.view(blocks, block).mul_(scales[:, None])
    return padded[:num_elements]


def gather_quantised(peers: Peers, full: Tensor, bounds: Sequence[int], number: int, *, block: int) -> Iterator[None]:
    """As `exchange.gather`, in 8 bits: `full` is in the end what `quantise` rounded, of every rank alike."""
    sizes = [packed_bytes(stop - start, block) for start, stop in pairwise(bounds)]
    ends, rank = [0, *accumulate(sizes)], peers.rank
    packed = torch.empty(ends[-1], dtype=torch.uint8, device=full.device)
    packed[ends[rank] : ends[rank + 1]] = quantise(full[bounds[rank] : bounds[rank + 1]], block)
    yield from gather(peers, packed, ends, number)
    for (start, stop), (first, last) in zip(pairwise(bounds), pairwise(ends), strict=True):
        full[start:stop] = dequantise(packed[first:last], stop - start, block)
