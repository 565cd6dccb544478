"""Pictures of the book: one style, one function a kind of figure, sliders for the static page too."""

from . import style
from .breakdown import breakdown_bars, part_look
from .calculator import Calculator, calculator
from .knowledge import knowledge
from .memory import memory_timeline
from .owners import ADDENDS, EVERY, NOBODY, owners
from .pipeline import Pipeline, pipeline
from .planner import Planner, planner
from .slider import Slider, slider
from .timeline import Bar, timeline

__all__ = [
    "ADDENDS",
    "EVERY",
    "NOBODY",
    "Bar",
    "Calculator",
    "Pipeline",
    "Planner",
    "Slider",
    "breakdown_bars",
    "calculator",
    "knowledge",
    "memory_timeline",
    "owners",
    "part_look",
    "pipeline",
    "planner",
    "slider",
    "style",
    "timeline",
]
