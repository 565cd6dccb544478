"""One plan and the machine it runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtlib.theory import hardware
from dtlib.theory.activations import Attention
from dtlib.theory.cluster import Cluster
from dtlib.theory.footprint import Setup
from dtlib.theory.hardware import Accelerator, Link
from dtlib.theory.memory import Recipe
from dtlib.theory.models import Architecture
from dtlib.theory.units import us
from dtlib.theory.valid import whole

SCHEDULES = ("1F1B", "interleaved", "ZB-H1")
"""The schedules that are planned: ``"interleaved"`` is 1F1B with several chunks a rank."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`gpus` cards, `node` of them joined by their own link; each has a port of `network` to other nodes.

    A partly filled machine is allowed where all cards are in one node; else `node` divides `gpus`, or ``ValueError``.
    """

    accelerator: Accelerator
    gpus: int
    node: int = 8
    network: Link = hardware.LINKS["InfiniBand NDR"]

    def __post_init__(self) -> None:
        gpus, node = whole("gpus", self.gpus, 1), min(whole("node", self.node, 1), self.gpus)
        if gpus % node:
            less, fits = gpus - gpus % node, max(each for each in range(1, node) if gpus % each == 0)
            other = f", or {gpus} with node={fits}" if fits > 1 else ""
            raise ValueError(f"gpus must be a multiple of node={node}, not {gpus}: {less} or {less + node}{other}")
        object.__setattr__(self, "node", node)

    def axis(self, size: int, stride: int, shares: tuple[float, float, float]) -> Cluster:
        """The `size` ranks that lie `stride` apart, as a cluster; `shares` are those of both rates, and α' in seconds.

        They are in as few nodes as their stride allows.
        """
        together = max(1, min(size, self.node // stride))
        while size % together:
            together -= 1
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to train on dp · cp · tp · pp cards.

    Ranks of a tensor group lie side by side, then those of a context group, of data parallelism, of the pipeline. `cp`
    ranks share each sequence; the states of ZeRO's stage `zero` are shared by dp · cp ranks. All else as
    `footprint.Setup` has it. Three habits of libraries: with `keep_gathered` sequence parallelism keeps the inputs that
    it gathered, with `tp_overlap` tensor parallelism's messages travel behind the products in pieces, and with
    `early_stop` a full recompute leaves out a layer's last product, which no gradient needs. ``ValueError`` for what
    `Setup` refuses, or an unknown schedule.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch: int = 1
    micro_batches: int = 1
    chunks: int = 1
    schedule: str = "1F1B"
    recompute: str = "none"
    seq: int | None = None
    attention: Attention = "flash"
    dropout: bool = False
    keep_gathered: bool = False
    tp_overlap: bool = False
    early_stop: bool = False
    recipe: str | Recipe = "18-byte"

    def __post_init__(self) -> None:
        whole("cp", self.cp, 1)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if (self.schedule == "interleaved") != (self.chunks > 1):
            raise ValueError(f"chunks must be above 1 where the schedule is interleaved alone, not {self.chunks}")
        Setup(dp=self.dp, tp=self.tp, pp=self.pp, zero=self.zero, chunks=self.chunks, micro_batches=self.micro_batches)

    @property
    def world_size(self) -> int:
        """Cards in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.dp * self.micro_batch * self.micro_batches

    def seq_of(self, model: Architecture) -> int:
        """Tokens of a sequence."""
        return model.seq if self.seq is None else self.seq

    def setup(self, model: Architecture) -> Setup:
        """The same for `footprint`: a rank of a context group sees s/cp tokens, and the group shares the states."""
        seq = self.seq_of(model)
        if seq % (self.cp * (2 if self.cp > 1 else 1)):
            raise ValueError(f"seq must be a multiple of 2·cp={2 * self.cp} (zig-zag), not {seq}")
        if self.cp > 1 and self.sequence_parallel and seq % (self.cp * self.tp):
            parts = self.cp * self.tp
            raise ValueError(f"seq must be a multiple of cp·tp={parts} with sequence_parallel, not {seq}")
        made = Setup(
            dp=self.dp * self.cp, tp=self.tp, pp=self.pp, zero=self.zero, recipe=self.recipe,
            micro_batch=self.micro_batch, micro_batches=self.micro_batches, seq=seq // self.cp, chunks=self.chunks,
            sequence_parallel=self.sequence_parallel, recompute=self.recompute, attention=self.attention,
            dropout=self.dropout,
        )  # fmt: skip
        made.check(model)
        if model.learned_positions and seq > model.seq:
            raise ValueError(f"seq of {model.name} must be at most {model.seq}, its learned positions, not {seq}")
        return made

    def changed(self, **changes: object) -> Plan:
        """The plan with some of its fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
