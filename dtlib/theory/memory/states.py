"""Model states as one closed form, and the largest model whose states fit."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount

from . import recipes
from .recipes import ModelStates, Recipe


def model_states(num_params: float, recipe: str | Recipe = "16-byte") -> ModelStates:
    """Bytes of the model states under `recipe`, part by part, on a device that shares nothing.

    Ψ (`num_params`) times the bytes of each part. ``ValueError`` for a negative number or an unknown recipe. Source:
    Rajbhandari et al. 2020, arXiv 1910.02054, section 3.
    """
    return recipes.recipe(recipe).states(num_params)


@formula(
    "memory.model_state_bytes",
    source="rajbhandari2020zero",
    label="eq-memory-states",
    equation=r"(w + g + o)\,\Psi",
)
def model_state_bytes(num_params: float, bytes_per_param: float = 16) -> float:
    """Bytes of the model states.

    Ψ times the bytes of one parameter: 16 for bf16 weights and gradients, an fp32 master copy and Adam's two moments.
    ``ValueError`` for negative numbers. Source as `model_states`.
    """
    num_params = amount("num_params", num_params)
    bytes_per_param = amount("bytes_per_param", bytes_per_param)
    return num_params * bytes_per_param


@formula(
    "memory.largest_num_params",
    source="derived here",
    label="eq-memory-states",
    equation=r"\Psi_{\max} = \frac{M}{w + g + o}",
    use="The states of a larger model do not fit on one device.",
)
def largest_num_params(memory_bytes: float, bytes_per_param: float) -> float:
    """The largest model whose states fit.

    Memory over the bytes that one parameter costs a device: Ψ = M / (bytes a parameter). With 32 GB and 16 bytes, 2
    billion. ``ValueError`` for a negative `memory_bytes` or a `bytes_per_param` that is not positive.
    """
    memory_bytes = amount("memory_bytes", memory_bytes)
    bytes_per_param = amount("bytes_per_param", bytes_per_param, positive=True)
    return memory_bytes / bytes_per_param
