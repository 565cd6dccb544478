"""What a rank of a mesh keeps from step to step."""

from __future__ import annotations

from dtlib.theory.footprint import Setup, rank_states
from dtlib.theory.formula import formula
from dtlib.theory.memory import ModelStates
from dtlib.theory.models import Architecture, checked_model


@formula(
    "threed.state_bytes",
    source="derived here",
    equation=r"\frac{\Psi}{p\,t}\Bigl(w + g + \frac{o}{N}\Bigr) \quad \text{(ZeRO 1)}",
)
def state_bytes(model: Architecture | str, setup: Setup, *, stage: int = 0) -> ModelStates:
    """Model states of a rank of a mesh, bytes.

    Of pipeline stage `stage`: its parameters, Ψ/(pt) of an inner stage, each in the bytes of `setup.recipe`, of which
    ZeRO's stage spreads a part over the N = dp · cp ranks that share a batch, and over N/ep those of experts.
    ``ValueError`` where the model cannot be cut like that.
    """
    model = checked_model(model)
    setup.check(model)
    return rank_states(model, setup, stage)
