"""How it is done: the book's ideas from scratch on `torch.distributed`, one real process for each rank."""

from . import activations, collectives, dp, memory, model, sp, tp, zero

__all__ = ["activations", "collectives", "dp", "memory", "model", "sp", "tp", "zero"]
