"""Splitting the depth: schedules as data, generated, checked, priced and drawn."""

from .schedule import Action, Kind, Schedule

__all__ = ["Action", "Kind", "Schedule"]
