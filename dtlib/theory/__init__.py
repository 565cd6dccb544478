"""What should happen: closed forms and simulations on numpy arrays. Nothing here imports torch."""

from . import (
    activations,
    cluster,
    collectives,
    cp,
    dp,
    footprint,
    hardware,
    memory,
    models,
    planner,
    pp,
    sp,
    threed,
    tp,
    units,
    zero,
)
from .formula import Formula, formula, formulas

__all__ = [
    "Formula",
    "activations",
    "cluster",
    "collectives",
    "cp",
    "dp",
    "footprint",
    "formula",
    "formulas",
    "hardware",
    "memory",
    "models",
    "planner",
    "pp",
    "sp",
    "threed",
    "tp",
    "units",
    "zero",
]
