"""How a model is trained: over how many ranks, how sharded, with which batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dtlib.theory.activations import Attention, checked_attention
from dtlib.theory.memory import Recipe, checked_recompute, recipe
from dtlib.theory.models import Adapters, Architecture, checked_ep, checked_model, checked_tp
from dtlib.theory.valid import at_least, flag, whole
from dtlib.theory.zero import checked_stage

from .stages import cost_layers, piece_layers

BALANCES = ("layers", "cost")
"""How stages are cut: as many layers as each other, or as many entries of matrices, the head's among them."""

PRECISIONS = ("bf16", "fp8")
"""In what the products of layers are computed: in 16 bits, or in 8 with one scale for each tensor."""

AXES = ("pp", "dp", "cp", "tp")
"""The axes of a mesh of ranks, the outermost first: those of a tensor group lie side by side."""

DEGREES = ("dp", "tp", "pp", "cp", "ep")
"""The sizes of these axes, and the ranks of dp that share experts, in the order in which plans are told."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train: dp · cp · tp · pp ranks.

    `dp` ranks of data parallelism, and the `cp` ranks that share each of their sequences, share the states as
    ZeRO's stage `zero` says; `tp` ranks split each matrix, and with `sequence_parallel` what lies between the
    matrices; `pp` stages split the layers, each with `chunks` pieces of them if interleaved (`piece_layers`). A
    rank works on `micro_batches` micro-batches of `micro_batch` sequences between two updates (default: as many as
    there are stages), `seq` tokens each (default: the model's). `recipe` names the bytes of a parameter,
    `recompute` what is computed again (with `recompute_layers` a full one of so many layers of each piece alone, the
    first of them), `attention` how attention is stored (``"flash"`` or ``"matrix"``);
    `prefetched` modules are gathered ahead at stage 3. Stages are cut by their number of layers, or with `balance`
    ``"cost"`` by their share of all matrices (`cost_layers`, without chunks).

    With `shard` the states are split among so many neighbours of these dp · cp ranks alone, and each such group has a
    copy of all of them (hybrid sharding); it is None where it is all of them.

    `ep` of the dp ranks share the experts of a layer: each holds as many, and dp · cp/ep ranks hold the same ones, over
    which ZeRO shards them, or the `shard`/ep of them in one group; `tp` splits each, as other matrices. The busiest
    rank is sent `imbalance` times as many tokens as the mean.

    Where there are `adapters`, they alone are trained: of the model itself weights are kept, without gradients and what
    the optimizer keeps.

    With `offload` the host keeps what the optimizer keeps, and updates the weights; cards have weights and gradients.

    `precision` ``"fp8"`` computes the products of layers in 8 bits. Attention, norms, head, embedding, messages, what
    is kept and the states stay as they are.

    ``ValueError`` for counts below 1 and unknown words; what depends on the model is checked when it is known.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    shard: int | None = None
    recipe: str | Recipe = "16-byte"
    micro_batch: int = 1
    micro_batches: int | None = None
    seq: int | None = None
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_layers: int | None = None
    attention: Attention = "flash"
    dropout: bool = False
    prefetched: int = 1
    imbalance: float = 1
    balance: str = "layers"
    precision: str = "bf16"
    adapters: Adapters | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        for name in (*DEGREES, "micro_batch", "chunks"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        for name in ("sequence_parallel", "dropout", "offload"):
            flag(name, getattr(self, name))
        for name in ("micro_batches", "seq"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        whole("prefetched", self.prefetched, 0)
        checked_stage(self.zero, "zero")
        recipe(self.recipe)
        checked_recompute(self.recompute)
        checked_attention(self.attention)
        if self.balance not in BALANCES:
            raise ValueError(f"balance must be one of {', '.join(BALANCES)}, not {self.balance!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}: recipes with a scale for "
                "each block or row (mx, nvfp4, rowwise) have products at rates of their own, which are not known here"
            )
        if self.balance == "cost" and self.chunks > 1:
            raise ValueError(f"balance must be 'layers' where chunks={self.chunks} are interleaved, not 'cost'")
        if self.dp % self.ep:
            raise ValueError(f"ep must divide dp={self.dp}, whose ranks share the experts; {self.ep} does not")
        if at_least("imbalance", self.imbalance, 1) > self.ep:
            raise ValueError(f"imbalance must be from 1 to ep={self.ep}, all tokens on one rank, not {self.imbalance}")
        if self.recompute_layers is not None:
            layers = whole("recompute_layers", self.recompute_layers, 1)
            if self.recompute != "full":
                raise ValueError(f"recompute_layers must be absent with recompute={self.recompute}, not {layers}")
        if self.shard is not None:
            self._check_shard(whole("shard", self.shard, 1))
        if self.chunks > 1 and self.num_micro_batches % self.pp:
            raise ValueError(
                f"micro_batches must be a multiple of pp={self.pp} where chunks={self.chunks} are interleaved, "
                f"not {self.num_micro_batches}"
            )

    def _check_shard(self, shard: int) -> None:
        ranks, least = self.size("dp", "cp"), self.least_shard
        if self.zero == 0:
            raise ValueError(f"shard must be absent with zero=0, which splits no states, not {shard}")
        if shard == 1 < ranks:
            raise ValueError("shard must be at least 2, not 1: a rank alone shares no states, which is zero=0")
        if ranks % shard:
            raise ValueError(f"shard must divide dp·cp={ranks}, whose ranks share the states; {shard} does not")
        if shard % least:
            raise ValueError(f"shard must be a multiple of ep·cp={least}, whose ranks share the experts, not {shard}")
        object.__setattr__(self, "shard", None if shard == ranks else shard)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.size(*AXES)

    def size(self, *axes: str) -> int:
        """Ranks of a group along these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts, over which their states are shared; with `shard`, those of one group."""
        return self.shards // self.ep

    @property
    def shards(self) -> int:
        """Ranks over which the states of all but experts are shared."""
        return self.size("dp", "cp") if self.shard is None else self.shard

    @property
    def least_shard(self) -> int:
        """What a `shard` is a multiple of: ranks that share experts share their states too."""
        return self.ep * self.cp if self.ep > 1 else 1

    def stride(self, axis: str) -> int:
        """How far apart neighbours along an axis lie: there are as many ranks on the axes inside it."""
        return self.size(*AXES[AXES.index(axis) + 1 :])

    @property
    def least_recipe(self) -> str | Recipe:
        """What a parameter of the model itself has on a card."""
        return self.trained_recipe if self.adapters is None else _only(self.recipe, "weights")

    @property
    def trained_recipe(self) -> str | Recipe:
        """What a parameter has on a card that is trained."""
        return _only(self.recipe, "weights", "gradients") if self.offload else self.recipe

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a rank between two updates."""
        return self.pp if self.micro_batches is None else self.micro_batches

    def seq_of(self, model: Architecture) -> int:
        """Tokens of a sequence."""
        return model.seq if self.seq is None else self.seq

    def tokens_of(self, model: Architecture) -> int:
        """Tokens of a sequence that a rank sees: all, or where `cp` ranks share each, its part."""
        return self.seq_of(model) // self.cp

    def pieces(self, model: Architecture) -> list[list[int]]:
        """Layers of each piece of each stage."""
        if self.balance == "cost":
            return [[layers] for layers in cost_layers(model, self.pp)]
        return piece_layers(model.num_layers, self.pp, self.chunks)

    def check(self, model: Architecture) -> None:
        """``ValueError`` that says what is possible where `model` cannot be cut like this."""
        checked_tp(model, self.tp)
        checked_ep(model, self.ep)
        checked_pp(model, self.pp)
        self.pieces(model)
        if self.adapters is not None:
            self.adapters.check(model)
        seq, parts = self.seq_of(model), self.cp * self.tp
        if self.cp > 1 and seq % (2 * self.cp):
            raise ValueError(f"seq must be a multiple of 2·cp={2 * self.cp} (zig-zag), not {seq}")
        if self.sequence_parallel and seq % parts:
            name = "cp·tp" if self.cp > 1 else "tp"
            raise ValueError(f"seq must be a multiple of {name}={parts} with sequence_parallel, not {seq}")
        if model.learned_positions and seq > model.seq:
            raise ValueError(f"seq of {model.name} must be at most {model.seq}, its learned positions, not {seq}")


@lru_cache
def _only(of: str | Recipe, *names: str) -> Recipe:
    return recipe(of).only(*names)


def checked_pp(model: Architecture | str, pp: Any) -> int:
    """`pp` as an int from 1 to the number of layers, or ``ValueError``."""
    model = checked_model(model)
    if whole("pp", pp, 1) > model.num_layers:
        raise ValueError(f"pp of {model.name} must be from 1 to {model.num_layers}, its layers, not {pp}")
    return int(pp)
