"""What a plan of training is, and how long its step takes: term by term, for one plan or for many that share a mesh.

What no data sheet has stands in `FITTED`; `dtlib.theory.calibration` says how it was found, `planner` searches among
the plans of `space`.
"""

from .constants import FITTED, MEANING, Constants
from .host import host_bytes
from .layer import kept_bytes
from .plan import SCHEDULES, Machine, Plan
from .products import CAST_BYTES, FP8_BYTES, cuts_for, product_share
from .profiles import PROFILES, profile
from .step import CHOICES, StepTime, step_terms, step_time

__all__ = [
    "CAST_BYTES", "CHOICES", "FITTED", "FP8_BYTES", "MEANING", "PROFILES", "SCHEDULES", "Constants", "Machine", "Plan",
    "StepTime", "cuts_for", "host_bytes", "kept_bytes", "product_share", "profile", "step_terms", "step_time",
]  # fmt: skip
