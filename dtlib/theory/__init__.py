"""What should happen: closed forms and simulations on numpy arrays. Nothing here imports torch."""

from . import collectives, units
from .formula import Formula, formula, formulas

__all__ = ["Formula", "collectives", "formula", "formulas", "units"]
