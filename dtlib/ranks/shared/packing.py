"""Tensors of several dtypes, and codes of a few bits, as one row of bytes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor


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
    if bits == 8:
        return codes.flatten().to(torch.uint8)
    eights = torch.nn.functional.pad(codes.flatten().long(), (0, -codes.numel() % 8)).view(-1, 8)
    words = (eights << (bits * torch.arange(8, device=codes.device))).sum(dim=1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].flatten()[: -(-codes.numel() * bits // 8)]


def from_bits(packed: Tensor, bits: int, num: int) -> Tensor:
    """The `num` codes that `to_bits` packed, whole numbers of at least 32 bits, from which one may subtract."""
    if bits == 8:
        return packed[:num].int()
    rows = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits)
    words = torch.nn.functional.pad(rows, (0, 8 - bits)).view(torch.int64)
    eights = (words >> (bits * torch.arange(8, device=packed.device))) & (2**bits - 1)
    return eights.flatten()[:num]
