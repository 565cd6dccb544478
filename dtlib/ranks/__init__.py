"""How it is done: the book's ideas from scratch on `torch.distributed`, one real process for each rank."""

from . import (
    activations,
    asynchrony,
    batch,
    collectives,
    compression,
    cp,
    dp,
    ep,
    memory,
    model,
    mtp,
    pp,
    sp,
    threed,
    tp,
    zero,
)

__all__ = [
    "activations",
    "asynchrony",
    "batch",
    "collectives",
    "compression",
    "cp",
    "dp",
    "ep",
    "memory",
    "model",
    "mtp",
    "pp",
    "sp",
    "threed",
    "tp",
    "zero",
]
