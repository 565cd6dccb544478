"""Count what a process passes to the point-to-point calls of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SEND = {"c10d::send"}
_RECEIVE = {"c10d::recv_", "c10d::recv_any_source_"}


class SendCounter(TorchDispatchMode):
    """A context in which every send and receive of this thread is counted.

    `sent_bytes` and `received_bytes` are the payloads, `num_sends` and `num_receives` the calls. What a collective
    sends inside the communication library is not seen; `collectives` names those that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = self.received_bytes = self.num_sends = self.num_receives = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operation, then let it run."""
        name = func.name().split(".")[0]
        if name in _SEND:
            self.num_sends += 1
            self.sent_bytes += _bytes(args[0])
        elif name in _RECEIVE:
            self.num_receives += 1
            self.received_bytes += _bytes(args[0])
        elif name.startswith("c10d::"):
            self.collectives.append(name.removeprefix("c10d::").rstrip("_"))
        return func(*args, **(kwargs or {}))


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
