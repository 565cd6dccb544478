"""Notices that a submission has replaced parts of the instruments in its own process.

What is judged does not depend on it: bytes and messages are read outside (see `tap`). But what only the process itself
can tell, such as the order of waits, is worth nothing where the instruments were replaced.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

_OURS = ("dtlib.grading", "dtlib.lab")
_TORCH_CLASSES = ("ProcessGroup", "Work")


class Seal:
    """Remembers the instruments as they are; `broken` names those that are not the same any more."""

    def __init__(self) -> None:
        self._before = dict(_parts())

    def broken(self) -> list[str]:
        """The names of the functions that were replaced or whose code was changed since, at most five."""
        after = dict(_parts())
        return [name for name, part in self._before.items() if after.get(name) is not part][:5]


def _parts() -> Iterator[tuple[str, Any]]:
    for name, module in sorted(sys.modules.items()):
        if name.startswith(_OURS) and isinstance(module, types.ModuleType):
            yield from _members(name, vars(module), name)
    torch = sys.modules.get("torch.distributed")
    for name in _TORCH_CLASSES:
        owner = getattr(torch, name, None)
        if isinstance(owner, type):
            for attribute, part in vars(owner).items():
                if callable(part):
                    yield f"torch.distributed.{name}.{attribute}", part


def _members(prefix: str, members: Any, module: str) -> Iterator[tuple[str, Any]]:
    for name, part in list(members.items()):
        if isinstance(part, types.FunctionType):
            yield f"{prefix}.{name}", part
            yield f"{prefix}.{name} (its code)", part.__code__
        elif isinstance(part, type) and part.__module__ == module:
            yield f"{prefix}.{name}", part
            yield from _members(f"{prefix}.{name}", vars(part), module)
