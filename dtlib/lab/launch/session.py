"""`lab.session`: ranks that stay, and what they know with them."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from dtlib.processes.channel import MAX_FRAME_BYTES, send_frame
from dtlib.theory.cluster import Cluster

from . import context, torchrun
from .errors import RankError
from .launcher import LEFT_OUT, check_call, job_of, leave, outcome, positive, receive_report, start
from .ship import pack

_numbers = itertools.count(1)


class Session:
    """`world_size` ranks that do one thing after another, and keep their names from one to the next.

    ``session.cell("x = torch.ones(2) * rank")`` executes code on all of them; ``torch``, ``dist``, ``rank`` and
    ``world_size`` are known. ``session["x"]`` has the value of an expression on each rank, in rank order, and
    ``session.run(fn)`` calls a function, as `lab.run` does. What ranks print appears in rank order, each line marked
    with its rank. Threads, network and cluster as in `lab.run`.

    A rank that raises, exits, is killed or takes more than `timeout_s` seconds ends the session with `RankError` or
    `RankTimeout`, as the others may wait for it. Where all ranks raise the same error within a second, a name that is
    misspelt, none waits: the error comes, and the ranks stay. An interrupt ends them. They end with `close`, with the
    ``with`` block, or with this process.

    ``ValueError`` for a bad argument, ``TypeError`` for an `fn` that cannot be called, ``RuntimeError`` in
    a rank, under ``torchrun``, and once the session has ended.
    """

    def __init__(
        self,
        world_size: int = LEFT_OUT,
        *,
        timeout_s: float = 60,
        threads_per_rank: int = 1,
        network: str = "private",
        cluster: Cluster | None = None,
    ) -> None:
        if context.inside_rank() or torchrun.is_active():
            raise RuntimeError("lab.session starts ranks of its own: it works outside of ranks, and not under torchrun")
        nothing = (int, ())  # the ranks meet, and wait for the first task
        self._job = job_of(nothing, world_size, timeout_s, threads_per_rank, network, cluster, lasts=True)
        self.world_size, self.timeout_s = self._job.world_size, timeout_s
        self._control, pid = start(self._job)
        self.close = weakref.finalize(self, leave, self._control, pid)
        self._answer()

    @property
    def is_open(self) -> bool:
        """Whether its ranks are there."""
        return self.close.alive

    def cell(self, source: str) -> list[str | None]:
        """Execute code on all ranks: how each writes the value of the last line, if that is an expression."""
        _check_code("source", source)
        name = f"<cell {next(_numbers)} of the ranks>"
        self._job.sources[name] = (len(source), None, source.splitlines(keepends=True), name)
        return self._ask("cell", (source, name))

    def __getitem__(self, expression: str) -> list[Any]:
        """The value of an expression, the name of a variable for one, on each rank."""
        _check_code("expression", expression)
        return self._ask("value", expression)

    def run(self, fn: Callable[..., Any], *, args: Sequence[Any] = ()) -> list[Any]:
        """Call ``fn(*args)`` on all ranks, and return their results in rank order."""
        check_call(fn, args)
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
        task = pickle.dumps((positive("timeout_s", self.timeout_s), pickle.dumps((kind, what))))
        if len(task) > MAX_FRAME_BYTES:
            raise ValueError(
                f"what is sent to the ranks may have {MAX_FRAME_BYTES} bytes, not {len(task)}: make it on the ranks"
            )
        return self._answer(task)

    def _answer(self, task: bytes = b"") -> list[Any]:
        """What the ranks say to `task`, or once they have begun; an error, after which they stay or do not."""
        stay = False
        try:
            if task:
                with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, as its missing report says
                    send_frame(self._control, task)
            job = replace(self._job, timeout_s=self.timeout_s)
            report = receive_report(job, self._control)
            stay = report.stays
            return outcome(job, report, self._control)
        except BaseException as error:  # an interrupt too: what the ranks do now nobody would learn
            if not (stay and isinstance(error, RankError)):
                self.close()
            raise


def _check_code(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string of code, not {value!r}")
