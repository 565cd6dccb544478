"""A request of a communication library, whose wait is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Awaited:
    """A started operation that calls `arrived` when it has been waited for; otherwise the request it stands for."""

    def __init__(self, request: Any, arrived: Callable[[], None]) -> None:
        self._request, self._arrived = request, arrived

    def wait(self, *args: Any, **options: Any) -> Any:
        """As the request's own, which may raise; then nothing has arrived."""
        result = self._request.wait(*args, **options)
        self._arrived()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
