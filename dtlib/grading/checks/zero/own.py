"""What the exercises on ranks share: whose work it is, and what was sent beside what had to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtlib.grading.checks.on_memory import told_bytes
from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, mistake
from dtlib.grading.checks.on_ranks import OFF_RECORD, inspect_library, inspect_record, near_bytes, total_sent
from dtlib.grading.compare import some_rank
from dtlib.grading.exercise import Case, Check, Finding, Run, describe_case

# gloo puts 576 bytes for each other rank around an all-reduce, as measured on calls of a few hundred bytes; half of it
# around a gather, less around the others. A reduce-scatter on a list is as many collectives as there are ranks.
_HEADER_BYTES = 600


def own_work(function: str) -> Check:
    """The check that neither the course's ZeRO nor torch's does the work: nothing else counts until it holds."""

    def inspect(run: Run) -> Finding | None:
        for rank, data in enumerate(run.ranks):
            if data["built_in"]:
                return Finding(f"torch's {data['built_in'][0]} called on rank {rank}", "your own code")
        return inspect_library(run) or inspect_record(run)

    return Check(
        "own work",
        "schedule",
        0,
        f"`{function}` does its work itself",
        inspect,
        mistakes=(
            *NOT_YOUR_OWN,
            mistake(
                "built-in called",
                some_rank(lambda data, case: bool(data["built_in"])),
                "FSDP, DTensor or a sharded optimizer of torch does here what the exercise asks you to do. Which "
                "tensors does it keep, and what does it send when? Write that.",
            ),
            OFF_RECORD,
        ),
        gate=True,
    )


def needed_sent(run: Run) -> float:
    """What all ranks sent, as if each collective had sent what one needs.

    gloo's own reduce-scatter sends an all-reduce, and its reduce a gather more than its share.
    """
    n = run.case["world_size"]
    surplus = {"reduce_scatter": (n - 1) / n, "reduce": (n - 1) / n**2}  # of the bytes, on each rank
    return total_sent(run) - sum(
        surplus.get(event["op"], 0.0) * event["bytes"]
        for data in run.ranks
        for event in data["events"]
        if "bytes" in event
    )


def _is_near(run: Run, theory: float) -> bool:
    """Whether that is `theory`, the headers allowed for that the calls put on the wire."""
    n = run.case["world_size"]
    headers = sum(
        _HEADER_BYTES * (n - 1) * (n if event["op"] == "reduce_scatter" else 1)
        for data in run.ranks
        for event in data["events"]
        if "bytes" in event
    )
    seen = needed_sent(run)
    return near_bytes(min(max(seen - headers, theory), seen), theory)


def inspect_needed(
    expected: Callable[[Case], float], also: Callable[[Case], float] | None = None
) -> Callable[[Run], Finding | None]:
    """A check that all ranks together sent ``expected(case)`` bytes, or ``also(case)``."""

    def inspect(run: Run) -> Finding | None:
        seen, theory = needed_sent(run), expected(run.case)
        if _is_near(run, theory) or (also is not None and _is_near(run, also(run.case))):
            return None
        seen_words = f"{told_bytes(seen)} sent by all ranks together"
        return Finding(seen_words, told_bytes(theory), describe_case(run.case))

    return inspect


def needed_like(theory: Callable[[Case], float]) -> Any:
    """Recognise traffic by what all ranks together sent: ``theory(case)`` bytes in every failing run."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(_is_near(run, theory(run.case)) for run in back)

    return fits


def calls(op: str) -> Any:
    """Recognise a mistake by a collective that some rank called."""
    return some_rank(lambda data, case: any(event["op"] == op for event in data["events"]))
