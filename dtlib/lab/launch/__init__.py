"""Launch ranks: what starts them, keeps them, lets them meet, and ends them all."""

from .launcher import RankError, RankTimeout, run
from .magic import register
from .session import Session as session

__all__ = ["RankError", "RankTimeout", "register", "run", "session"]
