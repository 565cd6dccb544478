"""Memory: what the tensors of a process hold, what for, and what autograd keeps of them."""

from .held import Memory, Moment, memory
from .saved import Saved, SavedTensor, saved_bytes
from .spans import MemorySpan, memory_spans
from .storages import MEMORY_KINDS, KindBytes

__all__ = [
    "MEMORY_KINDS",
    "KindBytes",
    "Memory",
    "MemorySpan",
    "Moment",
    "Saved",
    "SavedTensor",
    "memory",
    "memory_spans",
    "saved_bytes",
]
