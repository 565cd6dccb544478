"""`lab.session`: ranks that stay, and what they know with them."""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from dtlib.processes.channel import send_frame

from . import context, torchrun
from .lasting import live
from .launcher import error_of, job_of, leave, outcome, positive, receive, show, start
from .ship import pack

_numbers = itertools.count(1)


class Session:
    """`world_size` ranks that do one thing after another, and keep their names from one to the next.

    ``session.cell("x = torch.ones(2) * rank")`` executes code on all of them; ``torch``, ``dist``, ``rank`` and
    ``world_size`` are known. ``session["x"]`` has the value of an expression on each rank, in rank order, and
    ``session.run(fn)`` calls a function, as `lab.run` does. What ranks print appears in rank order, each line marked
    with its rank. Threads and network as in `lab.run`.

    A rank that raises, exits, is killed or takes more than `timeout_s` seconds ends the session with `RankError` or
    `RankTimeout`, as the others may wait for it. Where all ranks raise the same error, a name that is misspelt, none
    waits: the error comes, and the ranks stay. An interrupt ends them. They end with `close`, with the ``with`` block,
    or with this process.

    ``ValueError`` for a bad argument, ``RuntimeError`` in a rank, under ``torchrun``, and once the session has ended.
    """

    def __init__(
        self, world_size: int = 4, *, timeout_s: float = 60, threads_per_rank: int = 1, network: str = "private"
    ) -> None:
        if context.inside_rank() or torchrun.is_active():
            raise RuntimeError("lab.session starts ranks of its own: it works outside of ranks, and not under torchrun")
        self._job = job_of((live, ()), world_size, timeout_s, threads_per_rank, network, lasts=True)
        self.world_size, self.timeout_s = self._job.world_size, timeout_s
        self._control, pid = start(self._job)
        self.close = weakref.finalize(self, leave, self._control, pid)
        self._answers()

    @property
    def is_open(self) -> bool:
        """Whether its ranks are there."""
        return self.close.alive

    def cell(self, source: str) -> list[str | None]:
        """Execute code on all ranks: how each writes the value of the last line, if that is an expression."""
        name = f"<cell {next(_numbers)} of the ranks>"
        self._job.sources[name] = (len(source), None, source.splitlines(keepends=True), name)
        return self._ask("cell", (source, name))

    def __getitem__(self, expression: str) -> list[Any]:
        """The value of an expression, the name of a variable for one, on each rank."""
        return self._ask("value", expression)

    def run(self, fn: Callable[..., Any], *, args: Sequence[Any] = ()) -> list[Any]:
        """Call ``fn(*args)`` on all ranks, and return their results in rank order."""
        return self._ask("call", pack(fn, tuple(args)))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, kind: str, what: Any) -> list[Any]:
        if not self.is_open:
            raise RuntimeError("this session has ended, and its ranks with it: begin another one")
        task = pickle.dumps((kind, what))
        send_frame(self._control, pickle.dumps((positive("timeout_s", self.timeout_s), task)))
        return [pickle.loads(each) for each in self._answers()]

    def _answers(self) -> list[bytes]:
        """What the ranks say once all are idle; an error that ends the session, or not."""
        try:
            frame = receive(self._control)
            if frame[:1] != b"T":
                outcome(replace(self._job, timeout_s=self.timeout_s), pickle.loads(frame), self._control)
        except BaseException:  # an interrupt too: what the ranks do now nobody would learn
            self.close()
            raise
        report, said, printed = pickle.loads(frame[1:])
        show(printed)
        if report.first is not None:
            raise error_of(self._job, report, [""] * self.world_size)
        return said  # type: ignore[no-any-return]
