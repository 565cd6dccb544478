"""What a thread of a rank raises is the rank's error. Python prints it, and goes on as if the thread had returned."""

from __future__ import annotations

import threading
from typing import Any

_raised: list[tuple[str, BaseException]] = []


class ThreadRaised(RuntimeError):
    """A thread has raised: its name, and the error."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"the thread {name!r} raised {type(error).__name__}")
        self.name, self.error = name, error


def listen() -> None:
    """From now on note what threads raise. It is printed as ever: the rank may wait for that thread."""
    before = threading.excepthook
    _raised.clear()

    def note(args: Any) -> None:
        before(args)
        if not isinstance(args.exc_value, SystemExit | None):
            _raised.append((args.thread.name if args.thread else "of before", args.exc_value))

    threading.excepthook = note


def raise_first() -> None:
    """Raise `ThreadRaised` from the first error since the last call, if there was one."""
    if _raised:
        name, error = _raised[0]
        _raised.clear()
        raise ThreadRaised(name, error) from error
