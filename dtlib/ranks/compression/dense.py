"""Every entry in fewer bits: a cast that an all-reduce can add up, and 8 bits with scales, which need two passes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.dp import Bucket
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.packing import from_bytes, to_bytes
from dtlib.theory.valid import whole

from .base import Compressed, Sum, start_gather


class Cast(Compressed):
    """All-reduce in another floating-point `dtype`, float16 or bfloat16: half the bytes of float32.

    Sums are rounded at each rank that they pass. float16 ends at 65,504, so a sum may overflow; bfloat16 has the range
    of float32 and 8 bits of significand. ``ValueError`` for a dtype that is no floating-point one, or of one byte:
    an all-reduce cannot add these up.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"dtype must be a floating-point one of 2 bytes or more, not {dtype!r}")
        self.dtype = dtype

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """One all-reduce."""
        short = self.room("short", meant, meant.flat.numel(), self.dtype).copy_(meant.flat)
        yield dist.all_reduce(short, group=group, async_op=True)
        return short, lambda flat: flat.copy_(short)


class Int8(Compressed):
    """Whole numbers from −127 to 127 with a float32 scale for each `block` of entries, in two passes, as in ZeRO++.

    Codes of different scales do not add up, and would overflow: so each rank sends each other its chunk of the bucket
    in 8 bits (all-to-all), adds up what it gets in float32, and sends the sum in 8 bits to all. Each of N ranks sends
    2(N−1) times ⌈n/N⌉ bytes and the scales. An entry is off by at most 1/254 of the largest in its block, once for
    each rank and once for the sum. Source: Wang et al. 2023, arXiv 2306.10209, section 3.3. ``ValueError`` for a block
    below 1.
    """

    def __init__(self, block: int = 256) -> None:
        super().__init__()
        self.block = whole("block", block, 1)

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """An all-to-all and an all-gather."""
        n, num = dist.get_world_size(group), meant.flat.numel()
        chunk = -(-num // n)
        padded = torch.nn.functional.pad(meant.flat.float(), (0, n * chunk - num)).view(n, chunk)
        leaving = torch.stack([self._packed(row) for row in padded])
        arrived = torch.empty_like(leaving)
        yield dist.all_to_all_single(arrived, leaving, group=group, async_op=True)
        own = sum(self._unpacked(row, chunk) for row in arrived)
        rows, work = start_gather(self._packed(own), group)
        yield work
        total = torch.cat([self._unpacked(row, chunk) for row in rows])[:num]
        return total, lambda flat: flat.copy_(total)

    def _packed(self, x: Tensor) -> Tensor:
        blocks = torch.nn.functional.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        scales = blocks.abs().amax(dim=1)
        codes = (blocks * (127 / scales.clamp_min(1e-30))[:, None]).round_().to(torch.int8)
        return to_bytes(scales, codes.flatten()[: x.numel()])

    def _unpacked(self, payload: Tensor, num: int) -> Tensor:
        scales, codes = from_bytes(payload, (-(-num // self.block), torch.float32), (num, torch.int8))
        return codes.float().mul_((scales / 127).repeat_interleave(self.block)[:num])
