"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from .check import CheckError, check
from .cluster import cluster
from .fit import fit_alpha_beta, fit_link
from .launch import RankError, RankTimeout, register, run, session
from .launch.context import barrier
from .memory import MemorySpan, memory, memory_spans, saved_bytes
from .messages import count_steps, messages
from .race import Race, Ratio, fastest, race
from .recorder import SendCounter
from .scale import at_scale
from .timeline import Timeline, timeline
from .wire import paced, wire

__all__ = [
    "CheckError",
    "MemorySpan",
    "Race",
    "RankError",
    "RankTimeout",
    "Ratio",
    "SendCounter",
    "Timeline",
    "at_scale",
    "barrier",
    "check",
    "cluster",
    "count_steps",
    "fastest",
    "fit_alpha_beta",
    "fit_link",
    "memory",
    "memory_spans",
    "messages",
    "paced",
    "race",
    "run",
    "saved_bytes",
    "session",
    "timeline",
    "wire",
]

register()  # %%ranks, in a notebook
del register
