"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from . import ledger
from .compare import CheckError, check
from .fit import AlphaBeta, LinkFit, fit_alpha_beta, fit_link
from .launch import RankError, RankTimeout, run
from .launch.context import barrier, inside_rank
from .memory import (
    MEMORY_KINDS,
    KindBytes,
    Memory,
    MemorySpan,
    Moment,
    Saved,
    SavedTensor,
    memory,
    memory_spans,
    saved_bytes,
)
from .record import Collective, Collectives, Message, Messages, SendCounter, count_steps, messages
from .scale import AtScale, at_scale
from .timeline import Timeline, Timelines, timeline
from .wire import Wire, paced, wire

__all__ = [
    "MEMORY_KINDS",
    "AlphaBeta",
    "AtScale",
    "CheckError",
    "Collective",
    "Collectives",
    "KindBytes",
    "LinkFit",
    "Memory",
    "MemorySpan",
    "Message",
    "Messages",
    "Moment",
    "RankError",
    "RankTimeout",
    "Saved",
    "SavedTensor",
    "SendCounter",
    "Timeline",
    "Timelines",
    "Wire",
    "at_scale",
    "barrier",
    "check",
    "count_steps",
    "fit_alpha_beta",
    "fit_link",
    "inside_rank",
    "ledger",
    "memory",
    "memory_spans",
    "messages",
    "paced",
    "run",
    "saved_bytes",
    "timeline",
    "wire",
]
