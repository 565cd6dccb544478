"""Ring attention on a page: forward, without a mask, with equal parts; each block travels while it is looked at.

Shapes: b sequences, a heads, s/N positions of this rank, d entries of a head. Source: Liu et al. 2023, arXiv
2310.01889.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.peers import Peers, wait_for


def simple_ring_attention(q_basd: Tensor, k_basd: Tensor, v_basd: Tensor, group: Group = None) -> Tensor:
    """What this rank's queries see of the keys and values of all ranks of `group`, (b, a, s/N, d); no gradient.

    N rounds. In each the rank merges what its queries see in one rank's block into what they have seen, by
    L = log(exp L₁ + exp L₂), o = exp(L₁ − L) o₁ + exp(L₂ − L) o₂, while the block goes on to the next rank.
    """
    peers = Peers(q_basd.device, group)
    block, out_basd = torch.stack([k_basd, v_basd]), torch.zeros_like(q_basd)
    total_bas1 = q_basd.new_full((*q_basd.shape[:3], 1), -torch.inf)
    for i in range(peers.n):
        arriving, under_way = torch.empty_like(block), []
        if i < peers.n - 1:  # nobody needs the last one
            under_way = peers.exchange(block, (peers.rank + 1) % peers.n, arriving, (peers.rank - 1) % peers.n)
        scores_bast = q_basd @ block[0].mT / q_basd.shape[-1] ** 0.5
        part_total_bas1 = scores_bast.logsumexp(-1, keepdim=True)
        part_basd = (scores_bast - part_total_bas1).exp() @ block[1]
        both_bas1 = torch.logaddexp(total_bas1, part_total_bas1)
        out_basd = (total_bas1 - both_bas1).exp() * out_basd + (part_total_bas1 - both_bas1).exp() * part_basd
        total_bas1 = both_bas1
        wait_for(under_way)
        block = arriving
    return out_basd
