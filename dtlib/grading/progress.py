"""What `dtlib grade` shows while it grades: a bar on a terminal, a line a learner elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .grader import Event


class Shown:
    """Shows the events of `grade` on `console`; with `quiet`, nothing. A context manager, called with each of them."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._kept = 0
        draws = console.is_terminal and not console.is_dumb_terminal
        self._bar = _bar(console) if draws and not quiet else None
        self._task = None if self._bar is None else self._bar.add_task("reading", total=None)
        self._tell: Callable[[Event], None] = self._on_bar if self._bar else self._nothing if quiet else self._in_lines

    def __enter__(self) -> Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._tell(event)

    def _nothing(self, event: Event) -> None:
        pass

    def _on_bar(self, event: Event) -> None:
        assert self._bar is not None
        assert self._task is not None
        if event.what == "read":
            self._bar.update(self._task, completed=event.done, total=event.total)
        elif event.what == "begin":  # from here on, a step is an exercise
            self._bar.reset(self._task, total=(event.total - event.done) * event.num_exercises)
        elif event.what in ("exercise", "learner"):
            words = f"{event.done} of {event.total} learners · {escape(event.learner[:24])}"
            self._bar.update(self._task, description=words, advance=1)

    def _in_lines(self, event: Event) -> None:
        if event.what == "kept":
            self._kept += 1
        elif event.what == "begin" and self._kept:
            self._say(f"{self._kept} of {event.total} learners are kept from an earlier run")
        elif event.what == "learner" and event.standing is not None:
            each = event.standing
            points = "the grader failed" if each.status == "error" else f"{each.points} of {each.max_points} points"
            self._say(f"[{event.done}/{event.total}] {each.learner}: {points}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)
