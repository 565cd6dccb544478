"""Three dimensions and more at once: one GPT on a mesh of data, pipeline, context and tensor parallelism."""

from .checkpoint import load, save
from .training import Training

__all__ = ["Training", "load", "save"]
