"""The sizes of the tiny GPT that every chapter trains."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dtlib.theory.ep import checked_routing
from dtlib.theory.models import Architecture, Experts, model_parameters
from dtlib.theory.valid import whole


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: `num_layers` blocks of width `hidden` with `num_heads` heads, reading `seq` tokens of
    `vocab`.

    `tied` shares one matrix between the embedding and the head. `dropout` is a probability (0 by default,
    because a parallel run can only equal a single process where no dice are thrown). With `written_out` attention and
    dropout are written out instead of left to torch: the attention matrix is in memory, in the model's own dtype, and
    a dropout mask has one byte an entry, as papers count them.

    What makes a Llama of it: `num_kv_heads` heads of keys and values, each shared by as many heads of queries (None: as
    many as these), `rms_norm`, `swiglu` (an MLP with a gate of its own), `rotary` positions, and no `biases` in the
    linear layers.

    With `num_experts` the layers after the `first_dense` ones have an `experts.MoE` for an MLP: each token visits
    `top_k` experts of width `expert_ratio` · `hidden` and `num_shared` that all visit; `scoring`, `normalised`,
    `expert_groups`, `top_groups` and `expert_scale` are the `experts.Router`'s, and an expert takes `capacity_factor`
    times its mean share of the tokens of a call (None: all that come). Experts have no biases.

    ``ValueError`` for sizes that do not fit.
    """

    num_layers: int = 2
    hidden: int = 64
    num_heads: int = 4
    seq: int = 64
    vocab: int = 256
    mlp_ratio: int = 4
    tied: bool = True
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    written_out: bool = False
    num_kv_heads: int | None = None
    rms_norm: bool = False
    swiglu: bool = False
    rotary: bool = False
    biases: bool = True
    num_experts: int = 0
    top_k: int = 2
    expert_ratio: float = 2.0
    num_shared: int = 0
    first_dense: int = 0
    scoring: str = "softmax"
    normalised: bool = True
    expert_groups: int = 1
    top_groups: int | None = None
    expert_scale: float = 1.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.default == 0 else 1
            if field.type == "int" and (not isinstance(value, int) or value < least):
                raise ValueError(f"{field.name} must be a whole number of at least {least}, not {value!r}")
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden must be a multiple of num_heads={self.num_heads}, not {self.hidden}")
        if self.num_heads % whole("num_kv_heads", self.kv_heads, 1):
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}, and {self.num_kv_heads} does not")
        if self.rotary and self.hidden // self.num_heads % 2:
            raise ValueError(
                "rotary must be False, or hidden / num_heads even, as it turns pairs of entries; "
                f"{self.hidden} / {self.num_heads} is odd"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        checked_routing(
            self.num_experts, self.top_k, self.scoring, self.normalised, self.expert_groups, self.top_groups
        )
        width = self.expert_ratio * self.hidden
        if not width >= 1 or width % 1:
            raise ValueError(
                f"expert_ratio must make a whole number of hidden={self.hidden}, at least 1, not {self.expert_ratio!r}"
            )
        if self.first_dense >= self.num_layers:
            raise ValueError(f"first_dense must be below num_layers={self.num_layers}, not {self.first_dense}")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor must be above 0, or None, not {self.capacity_factor!r}")
        if not self.expert_scale > 0:
            raise ValueError(f"expert_scale must be above 0, not {self.expert_scale!r}")

    @property
    def expert_hidden(self) -> int:
        """The width of an expert: `expert_ratio` · `hidden`."""
        return round(self.expert_ratio * self.hidden)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts for an MLP."""
        return self.num_experts > 0 and layer >= self.first_dense

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: `num_kv_heads`, or as many as of queries."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def architecture(self) -> Architecture:
        """These sizes as `dtlib.theory` knows a model."""
        experts = Experts(
            num_experts=self.num_experts, top_k=self.top_k, hidden=self.expert_hidden,
            shared_hidden=self.num_shared * self.expert_hidden, first_dense=self.first_dense,
        ) if self.num_experts else None  # fmt: skip
        return Architecture(
            name="", num_layers=self.num_layers, hidden=self.hidden, num_heads=self.num_heads,
            num_kv_heads=self.kv_heads, head_dim=self.hidden // self.num_heads, ffn_hidden=self.mlp_ratio * self.hidden,
            vocab=self.vocab, seq=self.seq, tied=self.tied, biases=self.biases, experts=experts,
            norm="rms" if self.rms_norm else "layer", gated=self.swiglu, learned_positions=not self.rotary,
        )  # fmt: skip

    @property
    def num_params(self) -> int:
        """Ψ, counted from the sizes: 12 l h² + 13 l h + 2 h + (V + s) h for a tied head, `mlp_ratio` 4 and a GPT."""
        return model_parameters(self.architecture).total


#: `tiny` trains in seconds on one core; `25m` (25.3 million parameters) is what the benchmarks time.
PRESETS = {
    "tiny": GPTConfig(),
    "25m": GPTConfig(num_layers=8, hidden=512, num_heads=8, seq=64),
}


def preset(name: str, **changes: Any) -> GPTConfig:
    """The configuration called `name` (see ``PRESETS``), some sizes changed; ``ValueError`` for another."""
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}, not {name!r}")
    return replace(PRESETS[name], **changes)
