"""Launch ranks: what starts them, keeps them, lets them meet, and ends them all."""

from .launcher import RankError, RankTimeout, run

__all__ = ["RankError", "RankTimeout", "run"]
