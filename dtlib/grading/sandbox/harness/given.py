"""What a call was given, and whether it is still so when it has answered."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtlib.grading.exercises.plain import pack


class Given:
    """Arguments of a `function`, remembered by checksums: nothing is copied, so it can be weighed."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._arguments, self._sums = list(arguments), [_checksum(each) for each in arguments]
        try:
            self._names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            self._names = []

    def changed(self) -> list[str]:
        """The names of those that are not what they were."""
        names = [*self._names, *(f"argument {place}" for place in range(len(self._names), len(self._sums)))]
        told = zip(names, self._arguments, self._sums, strict=False)
        return [name for name, value, before in told if _checksum(value) != before]


def _checksum(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), _of_tensor(value.detach())
    if isinstance(value, torch.nn.Module):
        return [_checksum(each) for each in value.parameters()]
    if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor | list | tuple) for each in value):
        return [_checksum(each) for each in value]
    return zlib.crc32(pack(value))


def _of_tensor(tensor: torch.Tensor, start: int = 0) -> int:
    """Row by row where they do not lie one after the other: a copy would be weighed."""
    if tensor.numel() == 0:
        return start
    if tensor.is_contiguous():
        return zlib.crc32(tensor.reshape(-1).numpy(), start)
    for row in tensor:
        start = _of_tensor(row, start)
    return start
