"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from . import ledger
from .compare import CheckError, check
from .context import barrier, inside_rank
from .launch import RankError, RankTimeout, run
from .sends import SendCounter
from .timeline import Timeline, Timelines, timeline
from .wire import Wire, wire

__all__ = [
    "CheckError",
    "RankError",
    "RankTimeout",
    "SendCounter",
    "Timeline",
    "Timelines",
    "Wire",
    "barrier",
    "check",
    "inside_rank",
    "ledger",
    "run",
    "timeline",
    "wire",
]
