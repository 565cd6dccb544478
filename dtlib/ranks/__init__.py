"""How it is done: the book's ideas from scratch on `torch.distributed`, one real process for each rank."""

from . import collectives, dp, model, zero

__all__ = ["collectives", "dp", "model", "zero"]
