"""What the card's allocator was asked for: an account of bytes that knows nothing of the course."""

from __future__ import annotations

import torch


def now() -> int:
    """Bytes of all that is allocated, each as long as it was asked for (what it takes is rounded up)."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def peak() -> int:
    """The most since `begin`."""
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


def begin() -> int:
    """Begin to look for a peak; what there is."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return now()
