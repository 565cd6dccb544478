"""Pictures of the book: one style, one function a kind of figure, sliders for the static page too."""

from . import style
from .knowledge import knowledge
from .slider import Slider, slider
from .timeline import Bar, timeline

__all__ = ["Bar", "Slider", "knowledge", "slider", "style", "timeline"]
