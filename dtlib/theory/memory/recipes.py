"""Recipes of mixed-precision training: which copies of each parameter are kept, in how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.lookup import find
from dtlib.theory.valid import amount, whole


@dataclass(frozen=True)
class ModelStates(Breakdown):
    """Bytes of everything that training keeps for the parameters, activations aside.

    `weights` and `gradients` are what the forward and the backward pass use. All else belongs to the optimizer:
    an fp32 copy of the weights, an fp32 copy of the gradients, Adam's two moments, and the scales of moments that
    are kept in 8 bits.
    """

    weights: float
    gradients: float
    master_weights: float = 0
    main_gradients: float = 0
    first_moment: float = 0
    second_moment: float = 0
    moment_scales: float = 0

    @property
    def optimizer(self) -> float:
        """Bytes of the optimizer's part: all but `weights` and `gradients`."""
        return self.total - self.weights - self.gradients

    def sharded(self, *, weights: float, gradients: float, optimizer: float) -> ModelStates:
        """The states of one rank that keeps these shares (each 0 to 1) of weights, gradients and optimizer."""
        shares = {"weights": weights, "gradients": gradients}
        return ModelStates(**{name: value * shares.get(name, optimizer) for name, value in self.parts.items()})


OPTIMIZER_PARTS = tuple(field.name for field in fields(ModelStates))[2:]
"""The parts of `ModelStates` that belong to the optimizer."""


@dataclass(frozen=True)
class Recipe:
    """A way to train: `per_param` has the bytes of one parameter, part by part. `source` says who printed it."""

    name: str
    per_param: ModelStates
    source: str

    @property
    def bytes_per_param(self) -> float:
        """Bytes that one parameter needs."""
        return self.per_param.total

    def only(self, *names: str) -> Recipe:
        """The parts called `names` alone, such as the weights of a model that is not trained."""
        kept = ModelStates(**{name: value if name in names else 0 for name, value in self.per_param.parts.items()})
        return Recipe(f"{self.name}, {' and '.join(names)} alone", kept, self.source)

    def states(self, num_params: float) -> ModelStates:
        """Bytes of the model states of `num_params` parameters: Ψ times each part; ``ValueError`` below 0."""
        num_params = amount("num_params", num_params)
        return self.per_param.scaled(num_params)


def adam_8bit(*, block: int = 2048, master_weights: bool = True) -> Recipe:
    """Adam whose moments have 8 bits each, with one fp32 scale for every `block` entries of each.

    2 + 2 + 4 + 1 + 1 + 8/block bytes a parameter, without `master_weights` 4 less. `block` is a whole number of at
    least 1, else ``ValueError``; 2048 is the paper's, libraries also use 256. Source: Dettmers et al. 2022, arXiv
    2110.02861.
    """
    scales = 2 * 4 / whole("block", block, 1)
    per_param = ModelStates(2, 2, 4 if master_weights else 0, 0, 1, 1, scales)
    return Recipe("adam-8bit", per_param, "Dettmers et al. 2022, arXiv 2110.02861")


_ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054, section 3"
_MEGATRON = "NVIDIA Megatron Core, distributed optimizer"

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe("12-byte", ModelStates(2, 2, 0, 0, 4, 4), "derived here: no master copy, moments in fp32"),
            Recipe("16-byte", ModelStates(2, 2, 4, 0, 4, 4), _ZERO),
            Recipe("18-byte", ModelStates(2, 4, 4, 0, 4, 4), _MEGATRON),
            Recipe("20-byte", ModelStates(2, 2, 4, 4, 4, 4), _MEGATRON),
            Recipe("fp32", ModelStates(4, 4, 0, 0, 4, 4), _MEGATRON),
            adam_8bit(),
        )
    }
)
"""The recipes that `recipe` finds, by name. All are Adam's.

``12-byte`` weights and gradients in bf16, moments in fp32, no master copy. ``16-byte`` with an fp32 master copy.
``18-byte`` with gradients in fp32 alone. ``20-byte`` with gradients in bf16 and, in the optimizer, in fp32. ``fp32``
with everything in fp32, 16 bytes as well. ``adam-8bit`` as ``16-byte``, with 8-bit moments.
"""


def recipe(name: str | Recipe) -> Recipe:
    """The recipe called `name`: ``"16-byte"``, ``"16"``, ``"fp32"``; a `Recipe` of your own is returned as it is.

    Raises ``ValueError`` that lists the names where it is unknown.
    """
    if isinstance(name, Recipe):
        return name
    return RECIPES[name] if isinstance(name, str) and name in RECIPES else find("recipe", name, RECIPES)
