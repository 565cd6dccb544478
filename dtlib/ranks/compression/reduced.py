"""What adds up although it is short: entries at the same places on all ranks, and factors of low rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.dp import Bucket
from dtlib.ranks.mesh import Group
from dtlib.theory.valid import whole

from .base import Compressed, Sum, is_finite, per_entry, sizes_of
from .gathered import kept, share_of


class RandomK(Compressed):
    """A `share` of each parameter's entries, drawn anew at each step and alike on all ranks: places need no bytes.

    With `feedback` what is left out waits; without, entries are multiplied by n/k, so that the mean over the draws is
    the gradient, at n/k − 1 times its square in variance. `seed` must be the same on all ranks. Source: Stich et al.
    2018, arXiv 1809.07599. ``ValueError`` for a share outside of (0, 1].
    """

    def __init__(self, share: float, seed: int = 0, feedback: bool = True) -> None:
        super().__init__(feedback=feedback)
        self.share, self.seed = share_of(share), seed

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """One all-reduce."""
        chosen, scales, start = [], [], 0
        for name, view in meant.views.items():
            n, k = view.numel(), kept(self.share, view.numel())
            chosen.append(start + torch.randperm(n, generator=self.generator(self.seed, name))[:k])
            scales.append(1.0 if self.feedback or not k else n / k)
            start += n
        places = torch.cat(chosen).to(meant.flat.device)
        own = meant.flat[places] * per_entry(meant.flat.new_tensor(scales), [len(each) for each in chosen])
        values = own if is_finite(meant.flat) else own.fill_(torch.nan)  # whether or not the lot fell on it
        yield dist.all_reduce(values, group=group, async_op=True)

        def write(total: Tensor) -> None:
            total.zero_().index_copy_(0, places, values)
            if self.feedback:
                meant.flat[places] = 0

        return values, write


class PowerSGD(Compressed):
    """Each gradient as a matrix M (o, i) of which P Qᵀ is sent, of `rank` columns; vectors travel as they are.

    One step of the power method, at two all-reduces a bucket: P = M Q, summed and made orthonormal, then Q = Mᵀ P,
    summed. Both are linear in M, so the sums are those of the mean gradient. Q must begin alike on all ranks (`seed`);
    with `warm_start` it is the last step's, so that the steps together follow the largest singular vectors. A gradient
    of more dimensions is a matrix of its first by all others; one that r(o + i) elements would not make shorter is sent
    whole. Source: Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2. ``ValueError`` for a rank below 1.
    """

    def __init__(self, rank: int, feedback: bool = True, warm_start: bool = True, seed: int = 0) -> None:
        super().__init__(feedback=feedback)
        self.rank, self.warm_start, self.seed = whole("rank", rank, 1), warm_start, seed

    def summed(self, meant: Bucket, group: Group) -> Sum:
        """Two all-reduces: of all P with what is sent whole, then of all Q."""
        matrices = {name: v.flatten(1) for name, v in meant.views.items() if v.dim() > 1 and self._pays(v.flatten(1))}
        whole_ones = [view for name, view in meant.views.items() if name not in matrices]
        p_each = [m @ self._start(name, m) for name, m in matrices.items()]
        first = torch.cat([each.flatten() for each in (*whole_ones, *p_each)])
        yield dist.all_reduce(first, group=group, async_op=True)
        sums = first.split([each.numel() for each in (*whole_ones, *p_each)])
        p_each = [orthonormal(part.view_as(p)) for part, p in zip(sums[len(whole_ones) :], p_each, strict=True)]
        own = [p.T @ m for m, p in zip(matrices.values(), p_each, strict=True)]  # Qᵀ, (r, i): twice as fast as Mᵀ P
        second = torch.cat([first.new_empty(0), *(q.flatten() for q in own)])
        yield dist.all_reduce(second, group=group, async_op=True) if own else None
        q_each = [part.view_as(q) for part, q in zip(second.split([q.numel() for q in own]), own, strict=True)]

        def write(total: Tensor) -> None:
            parts = dict(zip(meant.views, total.split(sizes_of(meant)), strict=True))
            for name, summed in zip((name for name in parts if name not in matrices), sums, strict=False):
                parts[name].copy_(summed)
                if self.feedback:
                    meant.views[name].zero_()
            for (name, m), p, mine, q in zip(matrices.items(), p_each, own, q_each, strict=True):
                torch.mm(p, q, out=parts[name].view(m.shape))
                if self.feedback:
                    m.addmm_(p, mine, alpha=-1)  # P and `mine` are what this rank's message said
                if self.warm_start:
                    self.remember("q", name, q)

        return torch.cat([first, second]), write

    def _pays(self, m: Tensor) -> bool:
        return min(self.rank, *m.shape) * sum(m.shape) < m.numel()

    def _start(self, name: str, m: Tensor) -> Tensor:
        q, columns = self.remembered.get("q", {}).get(name), min(self.rank, *m.shape)
        if q is None or q.shape != (columns, m.shape[1]):
            q = m.new_zeros(columns, m.shape[1])
        if not (known := q.any(dim=1, keepdim=True)).all():  # of zeros (no gradient, say) no power of M makes more
            drawn = torch.randn(m.shape[1], columns, generator=self.generator(self.seed, name)).to(m).T
            q = torch.where(known, q, drawn)
        return orthonormal(q.T)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span what `columns` do, and more where these are zero or depend on each other."""
    return torch.linalg.qr(columns.to(torch.promote_types(columns.dtype, torch.float32))).Q.to(columns.dtype)
