"""Three dimensions and more at once: one GPT on a mesh of data, pipeline, context and tensor parallelism.

One step on a mesh, in few lines, stands on the chapter's page; `Training` takes any axes, schedule and stage of ZeRO.
"""

from .checkpoint import load, save
from .training import Training

__all__ = ["Training", "load", "save"]
