"""Methods of torch's classes that tell when they are called, for the time of a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Tell = Callable[[Any], object]


def patched(
    owner: type, name: str, *, before: Tell | None = None, after: Tell | None = None
) -> AbstractContextManager[Any]:
    """In the block, the method `name` of `owner` tells of its object before or after it runs."""
    method = getattr(owner, name)

    def telling(this: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            before(this)
        result = method(this, *args, **kwargs)
        if after:
            after(this)
        return result

    return mock.patch.object(owner, name, telling)
