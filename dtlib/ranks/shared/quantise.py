"""Numbers in 8 bits, block by block: one fp32 scale a block, and one of up to 256 codes for each entry.

For what travels the codes are k/127: an entry is off by 1/254 of its block's largest at most (Wang et al. 2023,
arXiv 2306.10209, section 3.1). For what an optimizer keeps, `SIGNED` and `UNSIGNED`, they are dense near zero, sparse
near one: seven decades, each with twice as many codes as the one below, so that a moment a thousandth of its neighbours
still keeps two digits (Dettmers et al. 2022, arXiv 2110.02861, section 2).

The codes without a sign begin at a ten-millionth and not at 0. They hold second moments, and Adam divides by their
root: one that was rounded to 0 beside a first moment that was not would leave only `eps` below the line, and one step
would throw the weight away.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .packing import from_bits, from_bytes, to_bits, to_bytes

_DECADES = 7


def _codes(*, signed: bool) -> tuple[float, ...]:
    """256 values in rising order, from 10⁻⁷ (signed: −1) to 1; plain numbers, so that importing makes no tensor."""
    found = [0.0 if signed else 10.0**-_DECADES, 1.0]
    for decade in range(_DECADES):
        num = 2 ** (decade + (0 if signed else 1))
        top = 10.0 ** (decade + 1 - _DECADES)
        middles = [top * (0.1 + 0.9 * (i + 0.5) / num) for i in range(num)]
        found += middles + ([-each for each in middles] if signed else [])
    return tuple(sorted(found))


SIGNED, UNSIGNED = _codes(signed=True), _codes(signed=False)


def quantised(x: Tensor, codes: Sequence[float], block: int) -> tuple[Tensor, Tensor]:
    """`x` as (numbers of its codes, uint8, in the shape of `x`; scales, fp32, one for each `block` entries).

    A block's scale is its largest magnitude; each entry over its scale becomes the nearest code. The last block may be
    shorter. ``ValueError`` for a block below 1.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    num_blocks = -(-x.numel() // block)
    padded = torch.nn.functional.pad(x.flatten().float(), (0, num_blocks * block - x.numel())).view(num_blocks, block)
    scales = padded.abs().amax(dim=1)
    values = torch.tensor(codes, dtype=torch.float32, device=x.device)
    share = padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    numbers = torch.bucketize(share, (values[1:] + values[:-1]) / 2, out_int32=True)
    return numbers.flatten()[: x.numel()].to(torch.uint8).view(x.shape), scales


def dequantised(numbers: Tensor, scales: Tensor, codes: Sequence[float], block: int) -> Tensor:
    """What `quantised` stored, in fp32 and in the shape of `numbers`."""
    values = torch.tensor(codes, dtype=torch.float32, device=numbers.device)[numbers.flatten().int()]
    return values.mul_(scales.repeat_interleave(block)[: numbers.numel()]).view(numbers.shape)


def _even(bits: int) -> list[float]:
    half = 2 ** (bits - 1) - 1
    return [k / half for k in range(-half, half + 1)]


def coded_bytes(num: int, bits: int, block: int) -> int:
    """Bytes of `num` entries that are `coded`: 4 for each block, `bits` for each entry, rounded up."""
    return 4 * -(-num // block) + -(-num * bits // 8)


def coded(x: Tensor, bits: int, block: int) -> Tensor:
    """A float32 scale for each `block` of entries, then codes of `bits`, packed: `coded_bytes` uint8."""
    numbers, scales = quantised(x, _even(bits), block)
    return to_bytes(scales, to_bits(numbers, bits))


def decoded(payload: Tensor, num: int, bits: int, block: int) -> Tensor:
    """What `coded` rounded, float32."""
    scales, codes = from_bytes(payload, (-(-num // block), torch.float32), (-(-num * bits // 8), torch.uint8))
    return dequantised(from_bits(codes, bits, num), scales, _even(bits), block)
