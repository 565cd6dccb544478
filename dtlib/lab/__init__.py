"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from . import ledger
from .compare import CheckError, check
from .context import barrier, inside_rank
from .fit import AlphaBeta, LinkFit, fit_alpha_beta, fit_link
from .launch import RankError, RankTimeout, run
from .memory import Memory, Moment, memory
from .pace import paced
from .record import Collective, Collectives, Message, Messages, SendCounter, count_steps, messages
from .saved import Saved, SavedTensor, saved_bytes
from .scale import AtScale, at_scale
from .spans import MemorySpan, memory_spans
from .storages import MEMORY_KINDS, KindBytes
from .timeline import Timeline, Timelines, timeline
from .wire import Wire, wire

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
