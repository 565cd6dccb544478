"""What `dtlib grade` shows while it grades: a bar on a terminal, a line a learner elsewhere."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Event(NamedTuple):
    """How far the grader is: `done` of `total` steps, in `words`; `is_line` where these are worth a line of their own.

    `learner` is who is done, "" where nobody is.
    """

    words: str
    done: int = 0
    total: int | None = None
    is_line: bool = False
    learner: str = ""


class Shown:
    """Shows the events of `grade` on `console`; with `quiet`, nothing. A context manager, called with each of them."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal and not quiet:
            columns = BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True)
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
            self._task = self._bar.add_task("", total=None)
        self._around: Any = self._bar or nullcontext()

    def __enter__(self) -> Shown:
        self._around.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if self._bar is not None:
            self._bar.update(self._task, description=escape(event.words), completed=event.done, total=event.total)
        elif event.is_line and not self._quiet:
            self._console.print(event.words, markup=False, highlight=False, emoji=False, soft_wrap=True)
