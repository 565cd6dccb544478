"""What the exercises on ranks share: whose work it is, and what was sent beside what had to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtlib.grading.checks.on_memory import told_bytes
from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, mistake
from dtlib.grading.checks.on_ranks import OFF_RECORD, inspect_library, inspect_record, near_bytes, num_calls, total_sent
from dtlib.grading.compare import some_rank
from dtlib.grading.exercise import Case, Check, Finding, Run, describe_case


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
    """What all ranks sent, as if each reduce-scatter had sent what one needs: gloo's own sends an all-reduce."""
    share = (run.case["world_size"] - 1) / run.case["world_size"]
    surplus = sum(
        share * event["bytes"] for data in run.ranks for event in data["events"] if event["op"] == "reduce_scatter"
    )
    return total_sent(run) - surplus


def _is_near(run: Run, theory: float) -> bool:
    return near_bytes(needed_sent(run), theory, sum(num_calls(data) for data in run.ranks))


def inspect_needed(expected: Callable[[Case], float]) -> Callable[[Run], Finding | None]:
    """A check that all ranks together sent ``expected(case)`` bytes."""

    def inspect(run: Run) -> Finding | None:
        seen, theory = needed_sent(run), expected(run.case)
        if _is_near(run, theory):
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
