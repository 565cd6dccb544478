"""What a rank of a mesh keeps from step to step."""

from __future__ import annotations

from dtlib.theory.footprint import Setup, stage_parameters
from dtlib.theory.formula import formula
from dtlib.theory.memory import ModelStates
from dtlib.theory.models import Architecture, checked_model
from dtlib.theory.zero import states


@formula(
    "threed.state_bytes",
    source="derived here",
    equation=r"\frac{\Psi}{p\,t}\Bigl(w + g + \frac{o}{N}\Bigr) \quad \text{(ZeRO 1)}",
)
def state_bytes(model: Architecture | str, setup: Setup, *, stage: int = 0) -> ModelStates:
    """Model states of a rank of a mesh, bytes.

    Of pipeline stage `stage`: its parameters, Ψ/(pt) of an inner stage, each in the bytes of `setup.recipe`, of which
    ZeRO's stage spreads a part over the N = dp · cp ranks that share a batch. ``ValueError`` where the model cannot
    be cut like that.
    """
    model = checked_model(model)
    setup.check(model)
    mine = stage_parameters(model, setup.tp, setup.pp, stage, setup.chunks)
    return states(mine.total, setup.size("dp", "cp"), setup.zero, setup.recipe)
