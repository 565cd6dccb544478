"""What the exercises on ranks share: cases in words, traffic against theory, rounds, and who wrote the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtlib.grading import rounds
from dtlib.grading.checks.on_paper import NOT_YOUR_OWN, called_library
from dtlib.grading.compare import every_run, right_only_if, some_rank
from dtlib.grading.exercise import Case, Check, Finding, Mistake, Run, describe_case
from dtlib.theory import units

FLOAT_BYTES = 4
# Gloo puts a header of tens of bytes before each message and TCP/IP one of 66 bytes before each packet: under 1 % of a
# long message, and for a short one under 1 KiB a call and rank, as measured on calls of a few hundred bytes.
TRAFFIC_RTOL = 0.01
HEADER_BYTES = 4096
HEADER_BYTES_PER_CALL = 1024
_FULL_RECORD = 4000  # events; what a rank did after so many is not recorded

TWO_RANKS = Mistake(
    "right for two ranks only",
    right_only_if(lambda case: bool(case["world_size"] <= 2)),
    "With two ranks it is right, with more it is not. Two ranks hide a lot: the neighbour on the left is the one on "
    "the right, one step is all there is, and half is one share of the whole. Walk through three ranks on paper.",
)


def ranks_case(world_size: int, num_elements: int, seed: int, **more: Any) -> dict[str, Any]:
    """A case on ranks, with words for messages: ``"3 ranks, 100000 elements, op sum"``."""
    told = "".join(f", {name} {value}" for name, value in more.items() if isinstance(value, str | int))
    words = f"{world_size} ranks, {num_elements} elements{told}"
    return {"world_size": world_size, "num_elements": num_elements, "seed": seed, "words": words, **more}


def full_bytes(case: Case) -> int:
    """The bytes of the full buffer of a case."""
    return FLOAT_BYTES * int(case["num_elements"])


def is_divisible(case: Case) -> bool:
    """Whether the ranks divide the length."""
    return bool(case["num_elements"] % case["world_size"] == 0)


def is_large(case: Case) -> bool:
    """Whether the buffer dwarfs every header, so that counting bytes makes sense."""
    return full_bytes(case) >= 64 * units.KiB


def near_bytes(seen: float, theory: float, num_calls: int = 0) -> bool:
    """Whether counted bytes are those of theory, headers of `num_calls` calls allowed for."""
    return abs(seen - theory) <= TRAFFIC_RTOL * theory + HEADER_BYTES + HEADER_BYTES_PER_CALL * num_calls


def num_calls(data: Mapping[str, Any]) -> int:
    """How many messages and collectives a rank started."""
    return len(rounds.sends(data["events"])) + len(rounds.collectives(data["events"]))


def total_is_near(run: Run, theory: float) -> bool:
    """Whether all ranks together sent what theory says."""
    return near_bytes(total_sent(run), theory, sum(num_calls(data) for data in run.ranks))


def inspect_sent(expected: Callable[[Case], Sequence[float]]) -> Callable[[Run], Finding | None]:
    """A check that every rank sent what ``expected(case)[rank]`` says, and all together the sum of that."""

    def inspect(run: Run) -> Finding | None:
        wanted = expected(run.case)
        for rank, (data, theory) in enumerate(zip(run.ranks, wanted, strict=True)):
            if not near_bytes(data["sent_bytes"], theory, num_calls(data)):
                return Finding(
                    f"{_bytes(data['sent_bytes'])} sent by rank {rank}", _bytes(theory), describe_case(run.case)
                )
        if run.wire_bytes is not None and not total_is_near(run, sum(wanted)):
            return Finding(f"{_bytes(run.wire_bytes)} sent in all", _bytes(sum(wanted)), describe_case(run.case))
        return None

    return inspect


def inspect_total(expected: Callable[[Case], float]) -> Callable[[Run], Finding | None]:
    """A check that all ranks together sent ``expected(case)`` bytes."""

    def inspect(run: Run) -> Finding | None:
        seen, theory = total_sent(run), expected(run.case)
        if total_is_near(run, theory):
            return None
        return Finding(f"{_bytes(seen)} sent by all ranks together", _bytes(theory), describe_case(run.case))

    return inspect


def total_sent(run: Run) -> float:
    """The bytes that all ranks sent: as metered from outside where that was done, else the sum of their own counts."""
    return run.wire_bytes if run.wire_bytes is not None else sum(data["sent_bytes"] for data in run.ranks)


def off_record(data: Mapping[str, Any], case: Case) -> bool:
    """Whether a rank sent more than its recorded calls can have: it communicated in another way."""
    events, n = data["events"], case["world_size"]
    # The most that a call makes a rank send: gloo's reduce-scatter costs an all-reduce.
    factors = {"send": 1.0, "receive": 0.0, "all_gather": n - 1.0, "gather": 1.0, "broadcast": n - 1.0}
    most = sum(event["bytes"] * factors.get(event["op"], 2.0) for event in events if "bytes" in event)
    return len(events) < _FULL_RECORD and bool(
        data["sent_bytes"] > (1 + TRAFFIC_RTOL) * most + HEADER_BYTES + HEADER_BYTES_PER_CALL * num_calls(data)
    )


OFF_RECORD = Mistake(
    "around the record",
    lambda failing, passing: any(off_record(data, run.case) for run in failing for data in run.ranks),
    "Bytes left a rank in a way that goes around torch.distributed's functions, a backend or a socket called by "
    "itself, say. Which messages does the exercise ask you to write?",
)


def inspect_library(run: Run) -> Finding | None:
    """That no rank called the library's own functions, or anything out of sight."""
    found = (called_library(data, "your own code", f" on rank {rank}") for rank, data in enumerate(run.ranks))
    return next((each for each in found if each), None)


def inspect_record(run: Run) -> Finding | None:
    """That the recorded calls account for what was sent."""
    for rank, data in enumerate(run.ranks):
        if off_record(data, run.case):
            return Finding(
                f"{_bytes(data['sent_bytes'])} sent by rank {rank}, more than its recorded calls account for",
                "calls of `torch.distributed` alone",
                describe_case(run.case),
            )
    return None


def sent_like(theory: Callable[[Case, int], float]) -> Any:
    """Recognise traffic: in every failing run each rank sent ``theory(case, rank)`` bytes."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            near_bytes(data["sent_bytes"], theory(run.case, rank))
            for run in back
            for rank, data in enumerate(run.ranks)
        )

    return fits


def total_like(theory: Callable[[Case], float]) -> Any:
    """Recognise traffic by what all ranks together sent: ``theory(case)`` bytes in every failing run."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(total_is_near(run, theory(run.case)) for run in back)

    return fits


def inspect_rounds(expected: Callable[[Case], int]) -> Callable[[Run], Finding | None]:
    """A check that the messages take ``expected(case)`` rounds, as `rounds.count_rounds` counts."""

    def inspect(run: Run) -> Finding | None:
        seen, wanted = rounds.count_rounds([data["events"] for data in run.ranks]), expected(run.case)
        if seen == wanted:
            return None
        said = "messages whose order cannot be followed" if seen is None else _plural(seen, "round")
        return Finding(
            f"{said} of messages" if seen is not None else said, _plural(wanted, "round"), describe_case(run.case)
        )

    return inspect


def peers(data: Mapping[str, Any]) -> set[int]:
    """The ranks that a rank sent to."""
    return {event["peer"] for event in rounds.sends(data["events"])}


def own_work(function: str, points: int = 1) -> Check:
    """The check that a collective was written on send and receive: nothing else counts until it holds."""

    def inspect(run: Run) -> Finding | None:
        library = inspect_library(run)
        if library:
            return library
        for rank, data in enumerate(run.ranks):
            called = rounds.collectives(data["events"])
            if called:
                return Finding(f"torch's {called[0]} called on rank {rank}", "send and receive alone")
        around = inspect_record(run)
        if (
            around is None
            and run.case["world_size"] > 1
            and not any(rounds.sends(data["events"]) for data in run.ranks)
        ):
            return Finding("not a single message", "messages between the ranks", describe_case(run.case))
        return around

    return Check(
        name="own work",
        kind="schedule",
        points=points,
        description=f"`{function}` is built from send and receive",
        inspect=inspect,
        gate=True,
        mistakes=(
            *NOT_YOUR_OWN,
            Mistake(
                "built-in called",
                some_rank(lambda data, case: bool(rounds.collectives(data["events"]))),
                "The collective does the work that this exercise asks you to do. Which messages does it send, to "
                "whom, and in which order? Write those.",
            ),
            OFF_RECORD,
            Mistake(
                "nothing sent",
                every_run(lambda run: True),
                "What one rank knows, another learns through a message only.",
            ),
        ),
    )


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes:,.0f} B ({units.format_bytes(num_bytes)})" if num_bytes >= units.KiB else f"{num_bytes:,.0f} B"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
