"""Pipelines on real ranks: one executor for all schedules, backward passes in two parts, and PipeDream."""

from .executor import Pipeline
from .pipedream import Versioned, train_pipedream
from .simple import simple_pipeline
from .split import SplitBackward
from .stages import Stage, Timed, cut

__all__ = ["Pipeline", "SplitBackward", "Stage", "Timed", "Versioned", "cut", "simple_pipeline", "train_pipedream"]
