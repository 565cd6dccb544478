"""What a collective costs on a real cluster: fast links inside a node, slow ones across, and the best plan for each.

``cluster("H100", num_nodes=8)`` has eight nodes of eight accelerators. ``best("all_reduce", of_it, full_bytes)`` says
which plan is the fastest, and how long it takes. A page that compares prices compares those of the best plan of each
contender.

Letters: m nodes (`num_nodes`), g ranks a node (`ranks_per_node`), N = m g ranks; α and B inside a node, α' and B'
across; D bytes (`full_bytes`). A node has P ports to other nodes (`ports_per_node`), by default one for each rank; g/P
ranks share one. A rank and a port send and receive at once.
Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from . import hardware
from .collectives.chunks import ceil_log2
from .formula import formula
from .units import us
from .valid import amount, whole


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `ranks_per_node` ranks each.

    In one direction a rank sends `inside_bytes_per_s` to ranks of its node, and a port `across_bytes_per_s` to other
    nodes; a message takes `inside_alpha_seconds` or `across_alpha_seconds` before its first byte arrives.
    `ports_per_node` divides `ranks_per_node`; None is a port for each rank.
    """

    name: str
    num_nodes: int
    ranks_per_node: int
    inside_alpha_seconds: float
    inside_bytes_per_s: float
    across_alpha_seconds: float
    across_bytes_per_s: float
    ports_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        for link in ("inside", "across"):
            amount(f"{link}_alpha_seconds", getattr(self, f"{link}_alpha_seconds"))
            amount(f"{link}_bytes_per_s", getattr(self, f"{link}_bytes_per_s"), positive=True)
        if self.ports_per_node is not None:
            object.__setattr__(self, "ports_per_node", whole("ports_per_node", self.ports_per_node, 1))
            if self.ranks_per_node % self.num_ports:
                raise ValueError(
                    f"ports_per_node must divide ranks_per_node ({self.ranks_per_node}), not {self.ports_per_node}"
                )

    @property
    def world_size(self) -> int:
        """N, ranks in all."""
        return self.num_nodes * self.ranks_per_node

    @property
    def num_ports(self) -> int:
        """P, ports of a node to other nodes."""
        return self.ranks_per_node if self.ports_per_node is None else self.ports_per_node

    @property
    def shared_bytes_per_s(self) -> float:
        """What a rank sends to other nodes while all ranks of its node do: P B'/g."""
        return self.across_bytes_per_s * self.num_ports / self.ranks_per_node

    @property
    def slowest_alpha_seconds(self) -> float:
        """What a round takes at least in which every link is used."""
        used = [self.inside_alpha_seconds] * (self.ranks_per_node > 1)
        used += [self.across_alpha_seconds] * (self.num_nodes > 1)
        return max(used, default=0.0)


def cluster(
    accelerator: str,
    num_nodes: int,
    *,
    ranks_per_node: int = 8,
    network: str = "InfiniBand NDR",
    ports_per_node: int | None = None,
    inside_alpha_seconds: float = 5 * us,
    across_alpha_seconds: float = 10 * us,
) -> Cluster:
    """Nodes of `accelerator` as their data sheets have them, with a port of `network` for each, or as many as named.

    Names are found as `hardware.accelerator` and `hardware.link` find them. No data sheet has a latency: the defaults
    are the order of what small messages take between processes that are waiting for them.
    """
    inside, across = hardware.accelerator(accelerator), hardware.link(network)
    return Cluster(
        name=f"{num_nodes} × {ranks_per_node} {inside.name}, "
        f"{across.name if ports_per_node is None else f'{ports_per_node} × {across.name} a node'}",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        inside_alpha_seconds=inside_alpha_seconds,
        inside_bytes_per_s=inside.link.link_bytes_per_s,
        across_alpha_seconds=across_alpha_seconds,
        across_bytes_per_s=across.link_bytes_per_s,
        ports_per_node=ports_per_node,
    )


# Plans. Each is the seconds of D bytes; `passes` is 2 for an all-reduce, 1 for either of its halves.


def flat_ring(of: Cluster, full_bytes: float, passes: int = 2) -> float:
    """One ring through all ranks, node after node: all wait for the port that leaves a node.

    passes · (N−1) (α' + D/(N B')), with α and B in one node; B' is at most B.
    """
    full_bytes, n = amount("full_bytes", full_bytes), of.world_size
    rate = of.inside_bytes_per_s if of.num_nodes == 1 else of.across_bytes_per_s
    if of.ranks_per_node > 1:
        rate = min(rate, of.inside_bytes_per_s)
    return whole("passes", passes, 1) * (n - 1) * (of.slowest_alpha_seconds + full_bytes / n / rate)


@formula(
    "threed.parallel_rings_seconds",
    source="derived here",
    equation=(
        r"2(N-1)\left(\alpha_{\text{slow}} + \frac{D}{N}"
        r"\max\left(\frac{g-1}{g B}, \frac{1}{P B_{\text{slow}}}\right)\right)"
    ),
)
def parallel_rings(of: Cluster, full_bytes: float, passes: int = 2) -> float:
    """All-reduce in parallel rings, seconds.

    g rings with a g-th of the bytes each; each leaves the nodes behind another rank, so that all P ports work.
    passes · (N−1) (α' + D/N · max((g−1)/(g B), 1/(P B'))): of g rings that pass a rank, one goes out. One ring in one
    node.
    """
    full_bytes, n, g = amount("full_bytes", full_bytes), of.world_size, of.ranks_per_node
    if of.num_nodes == 1:
        return flat_ring(of, full_bytes, passes)
    seconds_per_byte = max((g - 1) / of.inside_bytes_per_s, 1 / of.shared_bytes_per_s)
    return whole("passes", passes, 1) * (n - 1) * (of.slowest_alpha_seconds + full_bytes / n / g * seconds_per_byte)


def two_level(of: Cluster, full_bytes: float, passes: int = 2) -> float:
    """Short rings: inside each node, and across nodes with a g-th of the bytes for each rank.

    passes · [(g−1) (α + D/(g B)) + (m−1) (α' + D/(m P B'))].
    """
    full_bytes = amount("full_bytes", full_bytes)
    across = (of.num_nodes - 1) * (of.across_alpha_seconds + full_bytes / of.world_size / of.shared_bytes_per_s)
    return whole("passes", passes, 1) * (_inside_ring(of, full_bytes) + across)


def pipelined_tree(of: Cluster, full_bytes: float, passes: int = 2) -> float:
    """Rings inside a node; across, two trees that are pipelined, up (to reduce) and down (to broadcast).

    A rank is a leaf of one tree and inside the other, and half of its d = D/g bytes goes through each (Sanders et al.
    2009). With k pieces a round takes α' + passes · D/(k P B'), and passes · ⌈log₂ m⌉ + k − 1 rounds are needed; k is
    the best.
    """
    full_bytes, passes = amount("full_bytes", full_bytes), whole("passes", passes, 1)
    inside = passes * _inside_ring(of, full_bytes)
    if of.num_nodes == 1:
        return inside
    depth, alpha = passes * ceil_log2(of.num_nodes), of.across_alpha_seconds
    sent = passes * full_bytes / of.ranks_per_node / of.shared_bytes_per_s

    def seconds(pieces: int) -> float:
        return (depth + pieces - 1) * (alpha + sent / pieces)

    ideal = math.sqrt((depth - 1) * sent / alpha) if alpha else 1e6  # more than a million pieces are as good as none
    return inside + min(seconds(max(1, pieces)) for pieces in (math.floor(ideal), math.ceil(ideal)))


def flat_tree(of: Cluster, full_bytes: float, passes: int = 2) -> float:
    """A binomial tree over all ranks, whole messages: passes · (⌈log₂ m⌉ (α' + D/B') + ⌈log₂ g⌉ (α + D/B))."""
    full_bytes = amount("full_bytes", full_bytes)
    across = ceil_log2(of.num_nodes) * (of.across_alpha_seconds + full_bytes / of.across_bytes_per_s)
    inside = ceil_log2(of.ranks_per_node) * (of.inside_alpha_seconds + full_bytes / of.inside_bytes_per_s)
    return whole("passes", passes, 1) * (across + inside)


def pairwise(of: Cluster, full_bytes: float, passes: int = 1) -> float:
    """An all-to-all, of which `full_bytes` is what one rank holds before: N − 1 rounds, in each a message of D/N.

    (g−1) (α + D/(N B)) for the ranks of the node, (N−g) (α' + g D/(N P B')) for the others.
    """
    message, g = amount("full_bytes", full_bytes) / of.world_size, of.ranks_per_node
    inside = (g - 1) * (of.inside_alpha_seconds + message / of.inside_bytes_per_s)
    across = (of.world_size - g) * (of.across_alpha_seconds + message / of.shared_bytes_per_s)
    return whole("passes", passes, 1) * (inside + across)


def _inside_ring(of: Cluster, full_bytes: float) -> float:
    g = of.ranks_per_node
    return (g - 1) * (of.inside_alpha_seconds + full_bytes / g / of.inside_bytes_per_s)


_RINGS = (flat_ring, parallel_rings, two_level)
_PLANS: Mapping[str, tuple[int, tuple[Callable[[Cluster, float, int], float], ...]]] = MappingProxyType(
    {
        "all_reduce": (2, (*_RINGS, pipelined_tree, flat_tree)),
        "reduce_scatter": (1, _RINGS),
        "all_gather": (1, _RINGS),
        "broadcast": (1, (pipelined_tree, flat_tree)),
        "reduce": (1, (pipelined_tree, flat_tree)),
        "all_to_all": (1, (pairwise,)),
    }
)
COLLECTIVES = tuple(_PLANS)
"""The names that `plans` and `best` know."""


def plans(collective: str, of: Cluster, full_bytes: float) -> dict[str, float]:
    """The seconds of every plan for `collective` on D bytes, the fastest first."""
    if collective not in _PLANS:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, not {collective!r}")
    passes, known = _PLANS[collective]
    seconds: dict[str, Any] = {plan.__name__: plan(of, full_bytes, passes) for plan in known}
    return dict(sorted(seconds.items(), key=lambda each: each[1]))


@dataclass(frozen=True)
class Best:
    """The fastest plan, and its seconds."""

    plan: str
    seconds: float


def best(collective: str, of: Cluster, full_bytes: float) -> Best:
    """The fastest plan for `collective` on D bytes: what a library would choose, and a page should charge."""
    return Best(*next(iter(plans(collective, of, full_bytes).items())))
