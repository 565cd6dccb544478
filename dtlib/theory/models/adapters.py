"""Low-rank adapters: what is trained where the matrices of a model stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.valid import whole

from .architecture import Architecture
from .presets import checked_dense
from .tensor_parallel import checked_tp, kv_width_of_rank

MODULES = ("qkv", "out", "up", "down")
"""Matrices of a layer that may be adapted: queries, keys and values together, what follows attention, the MLP's first
(both, if gated) and its second. Their names are those of `ranks.model`."""


@dataclass(frozen=True)
class Adapters:
    """Of each layer the matrices W of `modules` become W + A·B, with A of (inputs, `rank`) and B of (`rank`, outputs);
    A and B alone are trained. ``ValueError`` for a rank below 1 and modules that are none or unknown.

    Source: Hu et al. 2021, arXiv 2106.09685.
    """

    rank: int
    modules: tuple[str, ...] = MODULES

    def __post_init__(self) -> None:
        whole("rank", self.rank, 1)
        object.__setattr__(self, "modules", tuple(self.modules))
        unknown = sorted(set(self.modules) - set(MODULES))
        if unknown or not self.modules or len(set(self.modules)) < len(self.modules):
            raise ValueError(f"modules must be some of {', '.join(MODULES)}, each once, not {self.modules}")

    def check(self, model: Architecture) -> None:
        """``ValueError`` for a model with experts, latent attention or modules for further tokens, or with an adapted
        matrix of which a side is below the rank."""
        if self.rank > (least := min(map(min, self.matrices(checked_dense(model, "the law of adapters (LoRA)"))))):
            raise ValueError(f"rank must be at most {least}, the shortest side of an adapted matrix, not {self.rank}")

    def matrices(self, model: Architecture, tp: int = 1) -> list[tuple[int, int]]:
        """Inputs and outputs of the adapted matrices of a layer on one of `tp` ranks, which split what W splits: the
        outputs of "qkv" and "up", the inputs of "out" and "down". The other side of an adapter is on every rank."""
        t, h, f = checked_tp(model, tp), model.hidden, (2 if model.gated else 1) * model.ffn_hidden
        known = {
            "qkv": (h, model.query_width // t + 2 * kv_width_of_rank(model, t)),
            "out": (model.query_width // t, h),
            "up": (h, f // t),
            "down": (model.ffn_hidden // t, h),
        }
        return [known[name] for name in self.modules]

    def layer_parameters(self, model: Architecture, tp: int = 1) -> int:
        """Parameters of a layer's adapters on one of `tp` ranks: r(inputs + outputs) for each matrix."""
        return self.rank * sum(inputs + outputs for inputs, outputs in self.matrices(model, tp))
