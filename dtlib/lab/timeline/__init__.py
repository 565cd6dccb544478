"""Timelines: when a rank computes, when it communicates, and how much of the one hides behind the other."""

from .recorded import Timeline, Timelines, timeline

__all__ = ["Timeline", "Timelines", "timeline"]
