"""Several hooks that come and go as one."""

from __future__ import annotations

from typing import Any


class Handles:
    """The hooks of one parameter, to be removed together."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove all of them."""
        for handle in self._handles:
            handle.remove()
