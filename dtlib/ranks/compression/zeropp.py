"""ZeRO++: stage 3 for ranks in nodes, with codes of few bits, so that little travels from node to node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.exchange import gather_parts, swap
from dtlib.ranks.shared.peers import Peers
from dtlib.ranks.shared.quantise import coded, coded_bytes, decoded
from dtlib.ranks.zero import Shard, Zero
from dtlib.theory.valid import node_size, whole


class NodeShard(Shard):
    """A shard whose weights cross nodes once a step, in 8 bits, and whose gradients do once, in `gradient_bits`.

    m nodes of q ranks. `secondary` are the codes of the m chunks that ranks of this one's place in their nodes own, Ψ/q
    bytes: they come from the other nodes with the first gather after a step, and all others from inside the node.
    """

    def __init__(self, *what: Any, inside: Group, across: Group, gradient_bits: int, **options: Any) -> None:
        super().__init__(*what, **options)
        self.inside, self.across = Peers(self.full.device, inside), Peers(self.full.device, across)
        self.gradient_bits = gradient_bits
        self.secondary: Tensor | None = None
        self.sizes = [stop - start for start, stop in pairwise(self.bounds)]

    def gather_rounded(self) -> Iterator[None]:
        """Gather across nodes the chunks of this place, unless they are here, then inside the node those of all."""
        q, block = self.inside.n, self.quantised_block
        assert block is not None
        num_bytes = [coded_bytes(size, 8, block) for size in self.sizes]
        if self.secondary is None:
            own, of_place = coded(self.chunk, 8, block), num_bytes[self.inside.rank :: q]
            self.secondary = yield from gather_parts(self.across, own, of_place, self.number)
        of_places = [sum(num_bytes[place::q]) for place in range(q)]
        codes = yield from gather_parts(self.inside, self.secondary, of_places, self.number)
        ranks = [rank for place in range(q) for rank in range(place, len(self.sizes), q)]
        for rank, part in zip(ranks, codes.split([num_bytes[rank] for rank in ranks]), strict=True):
            self.full[self.bounds[rank] : self.bounds[rank + 1]] = decoded(part, self.sizes[rank], 8, block)

    def scatter(self, sent: Tensor) -> Iterator[None]:
        """All-to-all inside the node, sums in float32, all-to-all across nodes, sums."""
        chunks, q = sent.split(self.sizes), self.inside.n
        mine = yield from self._summed(self.inside, [torch.cat(chunks[place::q]) for place in range(q)])
        total = yield from self._summed(self.across, mine.split(self.sizes[self.inside.rank :: q]))
        sent[self.own] = total

    def _summed(self, peers: Peers, rows: Any) -> Generator[None, None, Tensor]:
        """What all of them have for this rank: its own as it is, the others' rounded."""
        total, num = rows[peers.rank].float(), rows[peers.rank].numel()
        how = self.gradient_bits, self.quantised_block or 1
        room = coded(torch.zeros(num, device=total.device), *how)
        arrived = {rank: torch.empty_like(room) for rank in range(peers.n) if rank != peers.rank}
        yield from swap(peers, {rank: coded(rows[rank], *how) for rank in arrived}, arrived, self.number)
        for part in arrived.values():
            total = total + decoded(part, num, *how)
        return total

    def take_full(self) -> None:
        """As `Shard.take_full`."""
        super().take_full()
        self.secondary = None

    def tensors_by_kind(self) -> Iterator[tuple[Tensor, str]]:
        """As `Shard.tensors_by_kind`."""
        yield from super().tensors_by_kind()
        if self.secondary is not None:
            yield self.secondary, "parameters"


class ZeroPlusPlus(Zero):
    """Stage 3 of `Zero` on nodes of `ranks_per_node`, neighbours in `group`: int8 weights, gathered across nodes once a
    step; gradients of `gradient_bits`, added up in float32 inside each node, then across. `quantised_block` entries
    share a float32 scale. `options` as in `Zero`, without `stage` and `replicas`.

    ``ValueError`` for a node that does not divide the group, or bits outside of 2 to 8. Source: Wang et al. 2023, arXiv
    2306.10209, section 3. There the codes of a rank's own part are rounded too; here what does not travel is exact.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Any], Optimizer],
        *,
        ranks_per_node: int,
        quantised_block: int = 256,
        gradient_bits: int = 4,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        q, block = node_size(dist.get_world_size(group), ranks_per_node), whole("quantised_block", quantised_block, 1)
        if not 2 <= whole("gradient_bits", gradient_bits, 2) <= 8:
            raise ValueError(f"gradient_bits must be at most 8, not {gradient_bits}")
        ranks, (node, place) = dist.get_process_group_ranks(group), divmod(dist.get_rank(group), q)
        inside, across = (
            dist.new_group(each, use_local_synchronization=True)
            for each in (ranks[node * q : (node + 1) * q], ranks[place::q])
        )
        self.shard_type = functools.partial(NodeShard, inside=inside, across=across, gradient_bits=gradient_bits)
        super().__init__(module, make_optimizer, stage=3, replicas=None, group=group, quantised_block=block, **options)

    def publish(self) -> None:
        """As `Zero.publish`."""
        super().publish()
        for shard in self.all_shards:
            shard.secondary = None  # type: ignore[attr-defined]
