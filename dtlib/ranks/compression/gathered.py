"""What does not add up travels to everybody: codes with a scale each, and entries at other places on each rank.

Each of N ranks sends N−1 times its message, and adds up all N in one order.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.dp import Bucket
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.packing import from_bits, from_bytes, to_bits, to_bytes
from dtlib.theory.valid import whole

from .base import Compressed, Sum, per_entry, sizes_of, start_gather


class TopK(Compressed):
    """The largest `share` of each parameter's entries by magnitude, rounded and at least one; the rest waits its turn.

    A message has each entry's value, and its place in the bucket as an int32. Without `feedback` the rest is lost, and
    small entries never move. Sources: Stich et al. 2018, arXiv 1809.07599; Lin et al. 2017, arXiv 1712.01887.
    ``ValueError`` for a share outside of (0, 1].
    """

    def __init__(self, share: float, feedback: bool = True) -> None:
        super().__init__(feedback=feedback)
        self.share = share_of(share)

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """One all-gather."""
        sizes = sizes_of(meant)
        starts = accumulate(sizes, initial=0)
        parts = zip(meant.flat.split(sizes), starts, strict=False)
        chosen = torch.cat([start + part.abs().topk(kept(self.share, len(part)), sorted=False).indices
                            for part, start in parts])  # fmt: skip
        k, dtype = len(chosen), meant.flat.dtype
        rows, work = start_gather(to_bytes(chosen.int(), meant.flat[chosen]), group)
        yield work
        arrived = [from_bytes(row, (k, torch.int32), (k, dtype)) for row in rows]

        def write(total: Tensor) -> None:
            total.zero_()
            for places, values in arrived:
                total.index_add_(0, places, values)
            if self.feedback:
                meant.flat[chosen] = 0

        return torch.cat([values for _, values in arrived]), write


class Sign(Compressed):
    """One bit an entry, and for each parameter the mean of its magnitudes, float32: what is sent is ±that mean.

    The means differ from rank to rank, so that signs cannot be added up on the way. Sources: Seide et al. 2014;
    Karimireddy et al. 2019, arXiv 1901.09847.
    """

    def __init__(self, feedback: bool = True) -> None:
        super().__init__(feedback=feedback)

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """One all-gather."""
        num, sizes, dtype = meant.flat.numel(), sizes_of(meant), meant.flat.dtype
        parts = meant.flat.split(sizes)  # nothing has no mean
        scales = torch.stack([part.abs().mean() if len(part) else part.sum() for part in parts]).float()
        rows, work = start_gather(to_bytes(scales, to_bits(meant.flat >= 0, 1)), group)
        yield work
        arrived = [from_bytes(row, (len(sizes), torch.float32), (-(-num // 8), torch.uint8)) for row in rows]

        def write(total: Tensor) -> None:
            total.zero_()
            for rank, (scales, bits) in enumerate(arrived):
                said = per_entry(scales.to(dtype), sizes).mul_(from_bits(bits, 1, num) * 2 - 1)
                total += said
                if self.feedback and rank == dist.get_rank(group):
                    meant.flat -= said

        return torch.cat([scales for scales, _ in arrived]), write


class QSGD(Compressed):
    """Each entry as a share of its parameter's norm, rounded at random to one of `levels` steps or 0, with its sign.

    The mean over the draws is the gradient itself, so nothing needs to be remembered; the variance is at most
    min(n/s², √n/s) times the squared norm of a parameter of n entries at s `levels`. An entry takes ⌈log₂(2s + 1)⌉
    bits, a parameter 4 bytes for its norm. `seed` is the same on all ranks, the draws are not. Source: Alistarh et al.
    2017, arXiv 1610.02132. ``ValueError`` for levels outside of 1 to 127.
    """

    def __init__(self, levels: int, seed: int = 0) -> None:
        super().__init__()
        self.levels, self.seed = whole("levels", levels, 1), seed
        if self.levels > 127:
            raise ValueError(f"levels must be at most 127, so that an entry fits into a byte, not {levels}")
        self.bits = (2 * self.levels).bit_length()

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """One all-gather."""
        num, sizes, dtype = meant.flat.numel(), sizes_of(meant), meant.flat.dtype
        norms = torch.stack([part.norm() for part in meant.flat.split(sizes)]).float()
        here = meant.flat.device  # to draw on the host and to copy would take a card longer than all the rest
        dice = [self.generator(self.seed, name, dist.get_rank(group), device=here) for name in meant.views]
        draws = [torch.rand(size, generator=of, device=here) for of, size in zip(dice, sizes, strict=True)]
        steps = (
            meant.flat.abs().float() / per_entry(norms.clamp_min(torch.finfo(torch.float32).tiny), sizes) * self.levels
        )
        steps = (steps + torch.cat(draws)).floor_().clamp_(max=self.levels)
        codes = (steps * meant.flat.sign() + self.levels).nan_to_num_()
        packed = to_bits(codes, self.bits)
        rows, work = start_gather(to_bytes(norms, packed), group)
        yield work
        arrived = [from_bytes(row, (len(sizes), torch.float32), (len(packed), torch.uint8)) for row in rows]

        def write(total: Tensor) -> None:
            total.zero_()
            for norms, packed in arrived:
                shares = (from_bits(packed, self.bits, num) - self.levels).to(dtype) / self.levels
                total += shares.mul_(per_entry(norms.to(dtype), sizes))

        return torch.cat([norms for norms, _ in arrived]), write


def share_of(share: float) -> float:
    """`share`, or ``ValueError`` unless it is above 0 and at most 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share!r}")
    return float(share)


def kept(share: float, num: int) -> int:
    """How many of `num` entries are kept: `share` of them, rounded, and at least one."""
    return min(num, max(1, round(share * num)))
