"""Which degrees, how fast, and why not otherwise: memory and time of a plan, and the search over all plans.

``plan_memory`` and ``step_time`` say what one plan needs and takes, part by part; ``search`` looks at every plan of a
model on a machine. Both put together what the other rooms of `theory` know; what no data sheet has stands in
`FITTED`. `theory.calibration` holds the planner to runs that others measured, and says how the constants were found.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from dtlib.theory.timing import (
    FITTED,
    MEANING,
    PROFILES,
    SCHEDULES,
    Constants,
    Machine,
    Plan,
    StepTime,
    cuts_for,
    product_share,
    profile,
    step_time,
)
from dtlib.theory.timing.space import FRAMEWORKS, Space

from . import errors, laws, regime
from .answer import Answer, Found
from .cost import Training, training
from .errors import Interval, interval
from .goal import Goal, toward_goal
from .keeping import Keeping, keeping
from .memory import Fit, PlanMemory, fit, least_cards, margin_of, plan_memory
from .partial import Timed
from .search import default_sequences, every_plan, search

__all__ = [
    "FITTED", "FRAMEWORKS", "MEANING", "PROFILES", "SCHEDULES", "Answer", "Constants", "Fit", "Found", "Goal",
    "Interval", "Keeping", "Machine", "Plan", "PlanMemory", "Space", "StepTime", "Timed", "Training", "cuts_for",
    "default_sequences", "errors", "every_plan", "fit", "interval", "keeping", "laws", "least_cards", "margin_of",
    "plan_memory", "product_share", "profile", "regime", "search", "step_time", "toward_goal", "training",
]  # fmt: skip
