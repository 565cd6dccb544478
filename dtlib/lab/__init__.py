"""What did happen: instruments that launch ranks, count bytes, record timelines and compare with `theory`."""

from . import ledger
from .compare import CheckError, check
from .context import barrier, inside_rank
from .launch import RankError, RankTimeout, run

__all__ = ["CheckError", "RankError", "RankTimeout", "barrier", "check", "inside_rank", "ledger", "run"]
