"""What the planner is held to: runs that others measured, constants fitted to them, and how far both carry.

`published` says what each row of a table was, `fp8` what those in 8 bits were, `fitting` finds constants, `folds` how
far off times are of runs that were left out of the fit, `measured` moves the constants to runs of one's own. Nothing of
the planner imports this room: what was found ships as its constants and its ``errors.json``.
"""

from . import fitting, folds, fp8, measured, published
from .hits import verdicts

__all__ = ["fitting", "folds", "fp8", "measured", "published", "verdicts"]
