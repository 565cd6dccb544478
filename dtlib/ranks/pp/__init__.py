"""Pipelines on real ranks: one executor for all schedules, backward passes in two parts, and PipeDream.

The loop of the executor in few lines stands on the chapter's page.
"""

from .executor import Pipeline
from .pipedream import Versioned, train_pipedream
from .split import SplitBackward
from .stages import Stage, Timed, cut

__all__ = ["Pipeline", "SplitBackward", "Stage", "Timed", "Versioned", "cut", "train_pipedream"]
