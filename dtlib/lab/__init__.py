"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from . import ledger
from .compare import CheckError, check
from .context import barrier, inside_rank
from .fit import AlphaBeta, LinkFit, fit_alpha_beta, fit_link
from .launch import RankError, RankTimeout, run
from .sends import SendCounter
from .timeline import Timeline, Timelines, timeline
from .wire import Wire, wire

__all__ = [
    "AlphaBeta",
    "CheckError",
    "LinkFit",
    "RankError",
    "RankTimeout",
    "SendCounter",
    "Timeline",
    "Timelines",
    "Wire",
    "barrier",
    "check",
    "fit_alpha_beta",
    "fit_link",
    "inside_rank",
    "ledger",
    "run",
    "timeline",
    "wire",
]
