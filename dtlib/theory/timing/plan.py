"""One plan and the machine it runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtlib.theory import hardware
from dtlib.theory.cluster import Cluster
from dtlib.theory.footprint import Setup
from dtlib.theory.hardware import Accelerator, Link
from dtlib.theory.memory import Recipe
from dtlib.theory.units import us
from dtlib.theory.valid import amount, whole

SCHEDULES = ("1F1B", "interleaved", "ZB-H1")
"""The schedules that are planned: ``"interleaved"`` is 1F1B with several chunks a rank."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`gpus` cards, `node` of them joined by their own link; each has a port of `network` to other nodes.

    The memory of a node's host moves `host_memory_bytes_per_s`, or what hosts of its cards' generation have.

    A partly filled machine is allowed where all cards are in one node; else `node` divides `gpus`, or ``ValueError``.
    """

    accelerator: Accelerator
    gpus: int
    node: int = 8
    network: Link = hardware.LINKS["InfiniBand NDR"]
    host_memory_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.host_memory_bytes_per_s is not None:
            amount("host_memory_bytes_per_s", self.host_memory_bytes_per_s, positive=True)
        gpus, node = whole("gpus", self.gpus, 1), min(whole("node", self.node, 1), self.gpus)
        if gpus % node:
            less, fits = gpus - gpus % node, max(each for each in range(1, node) if gpus % each == 0)
            other = f", or {gpus} with node={fits}" if fits > 1 else ""
            raise ValueError(f"gpus must be a multiple of node={node}, not {gpus}: {less} or {less + node}{other}")
        object.__setattr__(self, "node", node)

    @property
    def host_rate(self) -> float | None:
        """Bytes a second of the memory of a node's host; None where nothing says."""
        link = self.accelerator.host_link
        usual = None if link is None else hardware.HOST_MEMORY.get(link.name)
        return self.host_memory_bytes_per_s or usual

    def group(self, plan: Setup, axes: tuple[str, ...], shares: tuple[float, float, float]) -> Cluster:
        """The ranks of a group of `plan` along `axes`, the outer one first, as a cluster.

        They are in as few nodes as their stride allows; `shares` are those of both rates, and α' in seconds.
        """
        return self._cluster(plan.size(*axes), self.node // plan.stride(axes[-1]), shares)

    def expert_group(self, plan: Setup, shares: tuple[float, float, float]) -> Cluster:
        """The ranks of `plan` that share the experts of a layer: `ep` neighbours along dp."""
        return self._cluster(plan.ep, self.node // plan.size("cp", "tp"), shares)

    def expert_copies(self, plan: Setup, shares: tuple[float, float, float]) -> Cluster:
        """The ranks of `plan` that share the states of the same experts: those of cp, and every ep-th along dp."""
        first = range(min(self.node, plan.expert_copies))
        places = [(copy // plan.cp * plan.ep * plan.cp + copy % plan.cp) * plan.tp for copy in first]
        together = sum(place < self.node for place in places)
        return self._cluster(plan.expert_copies, together, shares)

    def shards(self, plan: Setup, shares: tuple[float, float, float]) -> Cluster:
        """The ranks of `plan` that share states: neighbours along dp and cp, all of them or `plan.shard`."""
        return self._cluster(plan.shards, self.node // plan.tp, shares)

    def shard_copies(self, plan: Setup, shares: tuple[float, float, float]) -> Cluster:
        """The ranks of `plan` that hold the same shard: one of each group of `plan.shard`."""
        return self._cluster(plan.size("dp", "cp") // plan.shards, self.node // (plan.shards * plan.tp), shares)

    def near(self, plan: Setup) -> int:
        """How many of the ranks of `plan` that share states are in one node, where that is a `shard` that it may have,
        below all of them and above one; else 0."""
        size = _together(plan.size("dp", "cp"), self.node // plan.tp)
        return size if 1 < size < plan.size("dp", "cp") and size % plan.least_shard == 0 else 0

    def _cluster(self, size: int, together: int, shares: tuple[float, float, float]) -> Cluster:
        """So many ranks, of which at most so many are in one node: equally many in each."""
        together = _together(size, together)
        inside, across, alpha = shares
        return Cluster(
            name=self.accelerator.name,
            num_nodes=size // together,
            ranks_per_node=together,
            inside_alpha_seconds=5 * us,
            inside_bytes_per_s=self.accelerator.link.link_bytes_per_s * inside,
            across_alpha_seconds=alpha,
            across_bytes_per_s=self.network.link_bytes_per_s * across,
        )


def _together(size: int, most: int) -> int:
    """Of a group, how many ranks are in one node that has room for `most`: equally many in each."""
    return next(each for each in range(max(1, min(size, most)), 0, -1) if size % each == 0)


@dataclass(frozen=True, kw_only=True)
class Plan(Setup):
    """One way to train, and a pipeline's schedule.

    Four habits of libraries: with `keep_gathered` sequence parallelism keeps the inputs that it gathered, with
    `tp_overlap` tensor parallelism's messages travel behind the products in pieces, with `early_stop` a full recompute
    leaves out a layer's last product, which no gradient needs, and with `sums_late` all gradients of a micro-batch
    stand in 16 bits before they are added to those in fp32 (without ZeRO 2 and 3). ``ValueError`` for what `Setup`
    refuses, or an unknown schedule.
    """

    micro_batches: int = 1
    schedule: str = "1F1B"
    keep_gathered: bool = False
    tp_overlap: bool = False
    early_stop: bool = False
    sums_late: bool = False
    recipe: str | Recipe = "18-byte"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if (self.schedule == "interleaved") != (self.chunks > 1):
            raise ValueError(f"chunks must be above 1 where the schedule is interleaved alone, not {self.chunks}")
        super().__post_init__()

    @property
    def passes(self) -> int:
        """Products of each matrix: forward, for the gradient of its input and, unless adapters are trained in its
        place, for its own: 2Ψ operations a token each, so 4Ψ where the matrices stay as they are, not 6Ψ."""
        return 3 if self.adapters is None else 2

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.dp * self.micro_batch * self.micro_batches

    def changed(self, **changes: object) -> Plan:
        """The plan with some of its fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
