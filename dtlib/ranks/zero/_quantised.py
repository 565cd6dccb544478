"""An all-gather of weights in 8 bits, as ZeRO++ does: blocks of whole numbers, and one scale for each block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dtlib.ranks.collectives._peers import Peers

from ._exchange import Gather


class QuantisedGather:
    """An all-gather under way of what `quantise` makes of each rank's chunk.

    Every rank, the owner too, ends with the same rounded weights in `full`, flat and cut at `bounds`; the chunk itself
    stays exact with its owner. Sends (N−1)/N · (1 + 4/block) bytes for each element, and holds as many for all of them
    until `wait` returns. Source: Wang et al. 2023, arXiv 2306.10209, section 3.1.
    """

    def __init__(
        self, peers: Peers, full: Tensor, bounds: Sequence[int], number: int, *, block: int, shard: Tensor
    ) -> None:
        self._full, self._bounds, self._block = full, bounds, block
        sizes = [packed_bytes(stop - start, block) for start, stop in pairwise(bounds)]
        self._places = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
        self._packed = torch.empty(self._places[-1], dtype=torch.uint8, device=full.device)
        self._packed[self._places[peers.rank] : self._places[peers.rank + 1]] = quantise(shard, block)
        self._gather = Gather(peers, self._packed, self._places, number)

    @torch.no_grad()
    def wait(self) -> None:
        """Return once all chunks are there, widened to the weights' dtype."""
        self._gather.wait()
        for rank, start in enumerate(self._bounds[:-1]):
            stop = self._bounds[rank + 1]
            packed = self._packed[self._places[rank] : self._places[rank + 1]]
            self._full[start:stop] = dequantise(packed, stop - start, self._block)
        self._packed = self._packed[:0].clone()


def packed_bytes(num_elements: int, block: int) -> int:
    """Bytes of a quantised chunk: 4 for the scale of each block, 1 for each element, rounded up to a multiple of 4."""
    return 4 * -(-num_elements // block) + 4 * -(-num_elements // 4)


@torch.no_grad()
def quantise(chunk: Tensor, block: int) -> Tensor:
    """A flat chunk as bytes: a float32 scale for each `block` of elements, then the elements as int8.

    scale = max |w| / 127 over the block, q = round(w / scale); so w is off by scale/2 at most. The last block may be
    shorter. uint8, of `packed_bytes` length.
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
