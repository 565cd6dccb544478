"""Tensors of several dtypes, and codes of a few bits, as one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.dp.bucketed import Started
from dtlib.ranks.mesh import Group


def to_bytes(*tensors: Tensor) -> Tensor:
    """Their contents one behind the other, flat uint8."""
    return torch.cat([each.flatten().view(torch.uint8) for each in tensors])


def from_bytes(payload: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """The flat tensors of so many elements and such a dtype that `to_bytes` was given."""
    ends = accumulate((num * dtype.itemsize for num, dtype in parts), initial=0)
    cuts = zip(pairwise(ends), parts, strict=True)
    return [payload[start:stop].clone().view(dtype) for (start, stop), (_, dtype) in cuts]  # a copy is aligned


def to_bits(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers from 0 to 2^`bits` − 1 (`bits` ≤ 8), of `bits` each: ⌈n·bits/8⌉ uint8, on a little-endian machine.

    Eight codes fill `bits` bytes.
    """
    eights = torch.nn.functional.pad(codes.flatten().long(), (0, -codes.numel() % 8)).view(-1, 8)
    words = (eights << (bits * torch.arange(8, device=codes.device))).sum(dim=1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].flatten()[: -(-codes.numel() * bits // 8)]


def from_bits(packed: Tensor, bits: int, num: int) -> Tensor:
    """The `num` codes that `to_bits` packed, int64."""
    rows = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits)
    words = torch.nn.functional.pad(rows, (0, 8 - bits)).view(torch.int64)
    eights = (words >> (bits * torch.arange(8, device=packed.device))) & (2**bits - 1)
    return eights.flatten()[:num]


def start_gather(payload: Tensor, group: Group) -> tuple[Tensor, Started]:
    """Every rank's `payload`, of one length on all, as the rows of a matrix; and what to wait for."""
    rows = payload.new_empty((dist.get_world_size(group), payload.numel()))
    work = dist.all_gather(list(rows), payload, group=group, async_op=True)
    return rows, work


def per_entry(values: Sequence[Tensor] | Tensor, sizes: Sequence[int]) -> Tensor:
    """One value a parameter, repeated for each of its entries."""
    values = values if isinstance(values, Tensor) else torch.stack(list(values))
    return values.repeat_interleave(torch.tensor(sizes, device=values.device), output_size=sum(sizes))
