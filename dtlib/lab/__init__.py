"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from . import ledger
from .compare import CheckError, check
from .context import barrier, inside_rank
from .fit import AlphaBeta, LinkFit, fit_alpha_beta, fit_link
from .launch import RankError, RankTimeout, run
from .messages import Message, Messages, count_steps, messages
from .pace import paced
from .sends import SendCounter
from .timeline import Timeline, Timelines, timeline
from .wire import Wire, wire

__all__ = [
    "AlphaBeta",
    "CheckError",
    "LinkFit",
    "Message",
    "Messages",
    "RankError",
    "RankTimeout",
    "SendCounter",
    "Timeline",
    "Timelines",
    "Wire",
    "barrier",
    "check",
    "count_steps",
    "fit_alpha_beta",
    "fit_link",
    "inside_rank",
    "ledger",
    "messages",
    "paced",
    "run",
    "timeline",
    "wire",
]
