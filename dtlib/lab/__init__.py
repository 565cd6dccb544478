"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from .check import CheckError, check
from .cluster import cluster
from .fit import fit_alpha_beta, fit_link
from .launch import RankError, RankTimeout, register, run, session
from .launch.context import barrier
from .launch.faults import Cut as cut
from .launch.faults import Fill as fill
from .launch.faults import Flip as flip
from .launch.faults import Kill as kill
from .launch.faults import Slow as slow
from .launch.faults import Stop as stop
from .launch.faults import step
from .memory import MemorySpan, memory, memory_spans, saved_bytes
from .messages import count_steps, messages
from .parity import ParityError, Piece, over_meshes, parity, piece, watched
from .race import Race, Ratio, fastest, race
from .recorder import SendCounter
from .scale import at_scale
from .timeline import Timeline, timeline
from .wire import paced, wire

__all__ = [
    "CheckError",
    "MemorySpan",
    "ParityError",
    "Piece",
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
    "cut",
    "fastest",
    "fill",
    "fit_alpha_beta",
    "fit_link",
    "flip",
    "kill",
    "memory",
    "memory_spans",
    "messages",
    "over_meshes",
    "paced",
    "parity",
    "piece",
    "race",
    "run",
    "saved_bytes",
    "session",
    "slow",
    "step",
    "stop",
    "timeline",
    "watched",
    "wire",
]

register()  # %%ranks, in a notebook
del register
