"""Launch ranks: what starts them, keeps them, lets them meet, and ends them all."""

from .errors import RankError, RankTimeout
from .launcher import run
from .magic import register
from .session import Session as session

__all__ = ["RankError", "RankTimeout", "register", "run", "session"]
