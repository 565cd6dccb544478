"""zero.7: the norm of gradients that nobody holds in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading import rounds
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import TWO_RANKS, ranks_case
from dtlib.grading.compare import close, compare, compare_ranks, each_rank, gives, right_only_if
from dtlib.grading.drawn import all_values
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .own import own_work

_RTOL = 1e-4  # of a sum of squares in float32
_ATOL = 1e-5


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, clips in ((2, True), (3, False), (4, True), (3, True)):
        pieces = [int(each) for each in rng.integers(3000, 9000, 4)] + [0, 1]
        case = ranks_case(n, sum(pieces), int(rng.integers(0, 2**31)), pieces=pieces)
        factor = float(rng.uniform(0.05, 0.4) if clips else rng.uniform(1.5, 4))
        max_norm = round(factor * _norm(case), 3)
        told = "below" if clips else "above"
        cases.append(
            {
                **case,
                "max_norm": max_norm,
                "clips": clips,
                "words": f"{n} ranks, {len(pieces)} tensors, max_norm {told} the norm",
            }
        )
    return cases


def _norms(case: Case) -> Any:
    return np.sqrt((all_values(case) ** 2).sum(1))


def _norm(case: Case) -> float:
    return float(np.sqrt((all_values(case) ** 2).sum()))


def _clipped(norm: Callable[[Case, int], float], *, up: bool = False) -> Callable[[Case], list[Any]]:
    def wrong(case: Case) -> list[Any]:
        factors = [case["max_norm"] / norm(case, rank) for rank in range(case["world_size"])]
        return [row * (each if up else min(1.0, each)) for row, each in zip(all_values(case), factors, strict=True)]

    return wrong


_expected = _clipped(lambda case, rank: _norm(case))


def _clipped_is(wrong: Callable[[Case], list[Any]]) -> Any:
    return gives(each_rank("tensor"), wrong, rtol=_RTOL, atol=_ATOL)


def _inspect_norm(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        found = compare(_number(data["returned"]), _norm(run.case), f"on rank {rank}; {describe_case(run.case)}", _RTOL)
        if found:
            return found
    return None


def _number(seen: Any) -> Any:
    return seen.item() if isinstance(seen, np.ndarray) and seen.size == 1 else seen


def _norm_is(wrong: Callable[[Case, int], float]) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            close(_number(data["returned"]), wrong(run.case, rank), _RTOL)
            for run in back
            for rank, data in enumerate(run.ranks)
        )

    return fits


def _inspect_call(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        events = [event for event in data["events"] if "bytes" in event]
        called = rounds.collectives(data["events"])
        if called != ["all_reduce"] or len(events) != 1:
            words = f"{len(events)} calls ({', '.join(event['op'] for event in events[:6])})" if events else "no call"
            return Finding(f"{words} on rank {rank}", "one all_reduce", describe_case(run.case))
        if events[0]["bytes"] > 8:
            return Finding(
                f"an all_reduce of {events[0]['bytes']:,} B", "one of a single number", describe_case(run.case)
            )
    return None


def _called(predicate: Callable[[list[Any], Case], bool]) -> Any:
    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None]
        return bool(back) and all(
            predicate([event for event in data["events"] if "bytes" in event], run.case)
            for run in back
            for data in run.ranks
        )

    return fits


def _sum_of_tensor_norms(case: Case) -> float:
    ends = np.cumsum(case["pieces"])[:-1]
    return float(sum(np.sqrt((part**2).sum()) for row in all_values(case) for part in np.split(row, ends)))


CLIP = Exercise(
    id="zero.7",
    function="clip_shards",
    title="The norm of what nobody holds",
    harness="zero.clip",
    draw=_draw,
    checks=(
        own_work("clip_shards"),
        Check(
            "norm",
            "value",
            2,
            "the norm of all gradients, on every rank",
            _inspect_norm,
            mistakes=(
                mistake(
                    "local norm",
                    _norm_is(lambda case, rank: float(_norms(case)[rank])),
                    "This is the norm of this rank's shards. What do the other ranks hold of the same gradient?",
                ),
                mistake(
                    "norms added",
                    _norm_is(lambda case, rank: float(_norms(case).sum())),
                    "The ranks' norms were added. Two sides of a right angle, of length 3 and 4: how long is the "
                    "third?",
                ),
                mistake(
                    "norms of the tensors added",
                    _norm_is(lambda case, rank: _sum_of_tensor_norms(case)),
                    "The norms of all tensors were added. Two sides of a right angle, of length 3 and 4: how long is "
                    "the third?",
                ),
                mistake(
                    "root forgotten",
                    _norm_is(lambda case, rank: _norm(case) ** 2),
                    "This is the sum of the squares. What is missing to make it a norm?",
                ),
                mistake(
                    "a mean over the ranks",
                    _norm_is(lambda case, rank: _norm(case) / float(np.sqrt(case["world_size"]))),
                    "The squares were averaged over the ranks. Do the ranks hold the same elements, or different ones?",
                ),
                mistake(
                    "the largest norm",
                    _norm_is(lambda case, rank: float(_norms(case).max())),
                    "This is the largest of the ranks' norms. Is a whole as long as the longest of its parts?",
                ),
                mistake(
                    "the norm afterwards",
                    _norm_is(lambda case, rank: min(_norm(case), float(case["max_norm"]))),
                    "This is the norm after clipping. Which one does the task ask for?",
                ),
                mistake(
                    "nothing returned",
                    lambda failing, passing: all(
                        data["returned"] is None for run in failing if run.trouble is None for data in run.ranks
                    ),
                    "Nothing came back. Whoever trains wants to see the norm from step to step: where does it go?",
                ),
                TWO_RANKS,
            ),
        ),
        Check(
            "clipped",
            "gradient",
            2,
            "every shard scaled by the same factor, in place, and only where the norm is too large",
            lambda run: compare_ranks(run, "tensor", _expected(run.case), _RTOL, _ATOL),
            mistakes=(
                mistake(
                    "local norm",
                    _clipped_is(_clipped(lambda case, rank: float(_norms(case)[rank]))),
                    "Every rank scales by a norm of its own, so the pieces of one gradient no longer fit together: its "
                    "direction has changed. Whose norm decides?",
                ),
                mistake(
                    "norms added",
                    _clipped_is(_clipped(lambda case, rank: float(_norms(case).sum()))),
                    "The factor comes from the sum of the ranks' norms, so too much is taken away. How do lengths add "
                    "up that stand at right angles?",
                ),
                mistake(
                    "scaled up",
                    _clipped_is(_clipped(lambda case, rank: _norm(case), up=True)),
                    "Small gradients were made longer. What is clipping for?",
                ),
                mistake(
                    "nothing happened",
                    _clipped_is(lambda case: list(all_values(case))),
                    "The shards are as they were. Does the scaling reach the caller's tensors, or copies of them?",
                ),
                mistake(
                    "root forgotten",
                    _clipped_is(_clipped(lambda case, rank: _norm(case) ** 2)),
                    "Far too much was taken away. Is it the norm that the factor is made of?",
                ),
                mistake(
                    "right only where it clips",
                    right_only_if(lambda case: bool(case["clips"])),
                    "It goes wrong where the norm is small enough. What is there to do in that case?",
                ),
                TWO_RANKS,
            ),
        ),
        Check(
            "one number",
            "traffic",
            1,
            "one all-reduce of one number is all that travels",
            _inspect_call,
            mistakes=(
                mistake(
                    "gradients gathered",
                    _called(lambda events, case: sum(event["bytes"] for event in events) > 1000),
                    "Whole gradients travel, and a rank may not even have room for them. What is the least that the "
                    "others must know of a shard?",
                ),
                mistake(
                    "a call for each tensor",
                    _called(lambda events, case: len(events) >= len(case["pieces"]) - 1),
                    "Every tensor makes a call of its own, and each pays its latency. What may be added up before it "
                    "travels?",
                ),
                mistake(
                    "a gather of norms",
                    _called(lambda events, case: len(events) == 1 and events[0]["op"] != "all_reduce"),
                    "The bytes hardly matter, and every rank adds for itself. Which collective adds on the way?",
                ),
                mistake(
                    "nothing sent",
                    _called(lambda events, case: not events),
                    "Nothing travels, so nobody knows the rest of the gradient.",
                ),
            ),
        ),
    ),
)
