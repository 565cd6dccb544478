"""What should happen: closed forms and simulations on numpy arrays. Nothing here imports torch."""

from . import collectives, dp, hardware, models, units
from .formula import Formula, formula, formulas

__all__ = ["Formula", "collectives", "dp", "formula", "formulas", "hardware", "models", "units"]
