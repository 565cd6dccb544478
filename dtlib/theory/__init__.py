"""What should happen: closed forms and simulations on numpy arrays. Nothing here imports torch."""

from . import collectives, dp, hardware, memory, models, units, zero
from .formula import Formula, formula, formulas

__all__ = ["Formula", "collectives", "dp", "formula", "formulas", "hardware", "memory", "models", "units", "zero"]
