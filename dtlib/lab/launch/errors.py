"""How a run that did not end well is told: who, where, and what happened to the others."""

from __future__ import annotations

from dtlib.processes.crew import Report

from .stacks import place, readable
from .worker import Job

_OTHER_SIZE = "Received data size doesn't match expected size"  # gloo's words, before it aborts
_COMPARED = (
    "With TORCH_DISTRIBUTED_DEBUG=DETAIL in os.environ ranks compare what they ask for before they send, and the error "
    "says whose differs in what"
)


class RankError(RuntimeError):
    """A rank raised, exited or was killed. `rank` names it, `traceback` is its own.

    In a run with faults `step` is the last one that it marked, None where it marked none.
    """

    def __init__(self, message: str, rank: int, traceback: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.step = step


class RankTimeout(TimeoutError):
    """The time was up before all ranks had returned. `ranks` did not report; `stacks` says where each one was.

    In a run with faults `steps` has the last step that each rank marked, by rank.
    """

    def __init__(
        self, message: str, ranks: list[int], stacks: dict[int, str], steps: dict[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.stacks = stacks
        self.steps = steps or {}


def error_of(job: Job, report: Report, first: int, stacks: list[str], printed: str, alone: bool = False) -> RankError:
    """The error of rank `first`, with what the other ranks had to say, or `alone`."""
    failure = report.failures[first]
    stack = failure.traceback or readable(stacks[first], job.sources)
    message = f"rank {first} of {job.world_size} {failure.summary}"
    if "killed by signal" in failure.summary and _OTHER_SIZE in printed:
        message += f". It got a tensor of another size than it asked for: shapes or dtypes differ. {_COMPARED}"
    if stack:
        message += f"\n\n{stack}"
    others = {rank: other.summary for rank, other in report.failures.items() if rank != first}
    for summary, ranks in [] if alone else _grouped(others):
        message += f"\n\n{_ranks(ranks)} {'too' if summary == failure.summary else _shortened(summary)}"
    message += "".join(f"\n\n{each}" for each in _struck(job, report, stacks, [first] if alone else None, message))
    return RankError(message, first, stack, report.steps.get(first))


def _struck(job: Job, report: Report, stacks: list[str], of: list[int] | None, message: str = "") -> list[str]:
    """In a run with faults: what happened to which rank, unless `message` says so, and where the ranks `of` were."""
    if not job.faults:
        return []
    faults = [job.faults[index] for index in report.happened]
    told = [f"rank {fault.rank} {fault.told}" for fault in faults]
    told = [each for fault, each in zip(faults, told, strict=True) if fault.told not in message]
    places: dict[str, list[int]] = {}
    for rank in range(job.world_size) if of is None else of:
        failure = report.failures.get(rank)
        where = place((failure and failure.traceback) or readable(stacks[rank], job.sources))
        is_told = failure and not _only_follows(failure.summary)  # a traceback of its own says better at which line
        if where and not (is_told and where.startswith("at")):
            step = f" at step {report.steps[rank]}" if rank in report.steps else " before its first step"
            places.setdefault(where + step, []).append(rank)
    return told + [f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {where}" for where, ranks in places.items()]


def _grouped(summaries: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks that ended alike, together; what only follows from a lost connection counts as one."""
    groups: dict[str, list[int]] = {}
    for rank, summary in summaries.items():
        told = "then lost the connection to it" if _only_follows(summary) else summary
        groups.setdefault(told, []).append(rank)
    return list(groups.items())


def _only_follows(summary: str) -> bool:
    return "gloo/transport" in summary or "Connection closed by peer" in summary


def _shortened(summary: str) -> str:
    line = summary.split("\n")[0]
    return line if len(line) <= 160 else f"{line[:160]}…"


def timeout_of(job: Job, report: Report, stacks: list[str]) -> RankTimeout:
    """Who had not returned, and where each of them was."""
    late = [rank for rank, state in enumerate(report.states) if state == "running"]
    done = [rank for rank, state in enumerate(report.states) if state == "done"]
    silent = "  (it did not answer: a stopped process, or one that blocks signals)"
    where = {rank: readable(stacks[rank], job.sources) or silent for rank in late}
    message = f"{after(job)}{_ranks(late)} had not returned"
    message += f", while {_ranks(done)} had" if done else ""
    message += "".join(f". {each[0].upper()}{each[1:]}" for each in _struck(job, report, stacks, late))
    message += ". Where each one was (innermost call last):"
    message += "".join(f"\n\nrank {rank}:\n{stack}" for rank, stack in where.items())
    if not report.happened and any("distributed_c10d.py" in stack for stack in where.values()):
        message += f"\n\n{_COMPARED}."
    return RankTimeout(message, late, where, report.steps)


def after(job: Job) -> str:
    """How the message of a time-out begins."""
    return f"after {job.timeout_s:g} s "


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
