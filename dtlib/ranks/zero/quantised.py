"""Weights in 8 bits for their journey, as in ZeRO++: blocks of whole numbers, and one scale for each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dtlib.ranks.shared.peers import Peers
from dtlib.ranks.shared.quantise import EVEN, dequantised, quantised

from .exchange import gather


def packed_bytes(num_elements: int, block: int) -> int:
    """Bytes of a quantised chunk: 4 for the scale of each block, 1 for each element, rounded up to a multiple of 4."""
    return 4 * -(-num_elements // block) + 4 * -(-num_elements // 4)


@torch.no_grad()
def packed(chunk: Tensor, block: int) -> Tensor:
    """A flat chunk as bytes, `packed_bytes` uint8: a float32 scale for each `block` of elements, then their codes."""
    numbers, scales = quantised(chunk, EVEN, block)
    parts = torch.zeros(packed_bytes(chunk.numel(), block), dtype=torch.uint8, device=chunk.device)
    parts[: 4 * scales.numel()].view(torch.float32).copy_(scales)
    parts[4 * scales.numel() : 4 * scales.numel() + chunk.numel()] = numbers
    return parts


@torch.no_grad()
def unpacked(parts: Tensor, num_elements: int, block: int) -> Tensor:
    """What `packed` rounded, as `num_elements` float32."""
    end = 4 * -(-num_elements // block)
    return dequantised(parts[end : end + num_elements], parts[:end].view(torch.float32), EVEN, block)


def gather_quantised(peers: Peers, full: Tensor, bounds: Sequence[int], number: int, *, block: int) -> Iterator[None]:
    """As `exchange.gather`, in 8 bits: `full` is in the end what `packed` rounded, of every rank alike."""
    sizes = [packed_bytes(stop - start, block) for start, stop in pairwise(bounds)]
    ends, rank = [0, *accumulate(sizes)], peers.rank
    parts = torch.empty(ends[-1], dtype=torch.uint8, device=full.device)
    parts[ends[rank] : ends[rank + 1]] = packed(full[bounds[rank] : bounds[rank + 1]], block)
    yield from gather(peers, parts, ends, number)
    for (start, stop), (first, last) in zip(pairwise(bounds), pairwise(ends), strict=True):
        full[start:stop] = unpacked(parts[first:last], stop - start, block)
