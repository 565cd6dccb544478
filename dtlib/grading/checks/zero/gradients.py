"""zero.5: gradients reduced and freed while backward goes on, stage 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtlib.grading.checks.dp.network import Gradients, local_gradients, trainable_elements
from dtlib.grading.checks.dp.steps import steps_of
from dtlib.grading.checks.on_memory import EXPORTED, held_like, inspect_at_most, risen
from dtlib.grading.checks.on_paper import mistake
from dtlib.grading.checks.on_ranks import FLOAT_BYTES, TWO_RANKS
from dtlib.grading.compare import compare, every_run, right_only_if, some_rank
from dtlib.grading.drawn import shard
from dtlib.grading.exercise import Case, Check, Exercise, Finding, Run, describe_case

from .network import atol, gradient_shards, same, summed
from .own import inspect_needed, needed_like, own_work

_LAYERS_IN_FLIGHT = 6  # a gradient, what is sent and received of it, and the same of one that is still under way


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for n, steps, frozen in ((2, 1, False), (3, 2, True), (4, 2, False)):
        width = int(rng.integers(88, 104))
        case: dict[str, Any] = {
            "world_size": n,
            "steps": steps,
            "samples": int(rng.integers(2, 5)),
            "widths": [*[width] * 21, 1],
            "frozen": frozen,
            "seed": int(rng.integers(0, 2**31)),
        }
        many = "1 backward" if steps == 1 else f"{steps} backwards"
        told = ", one weight frozen" if frozen else ""
        cases.append(case | {"words": f"{n} ranks, 20 layers of {width}×{width}, {many}{told}"})
    return cases


def _names(case: Case) -> list[str]:
    return [f"{2 * layer}.{part}" for layer in range(len(case["widths"]) - 1) for part in ("weight", "bias")]


def _inspect_shards(run: Run) -> Finding | None:
    for rank, data in enumerate(run.ranks):
        for step, seen in enumerate(data["shards"]):
            where = f"on rank {rank}, after backward {step + 1}; {describe_case(run.case)}"
            found = _compare(seen, gradient_shards(run.case, rank, range(step + 1)), run.case, where)
            if found:
                return found
        if any(data["left"]):
            where = f"on rank {rank}; {describe_case(run.case)}"
            return Finding(f"{max(data['left'])} parameters with a `.grad` after backward", "none", where)
    return None


def _compare(seen: Any, expected: Gradients, case: Case, where: str) -> Finding | None:
    if not isinstance(seen, list) or len(seen) != len(expected):
        count = f"a list of {len(seen)}" if isinstance(seen, list) else "no list"
        return Finding(count, f"{len(expected)} entries, one a parameter", where)
    for name, one, two in zip(_names(case), seen, expected, strict=True):
        place = f"`{name}` {where}"
        if two is None or one is None:
            if one is not two:
                words = "nothing, because the parameter is frozen" if two is None else "this rank's share"
                return Finding("a tensor" if one is not None else "None", words, place)
            continue
        one = np.asarray([one]) if isinstance(one, float | int) else one
        found = compare(one, two, place, atol=atol(two))
        if found:
            return found
    return None


def _shards_are(wrong: Callable[[Case, int, int], Gradients], step: int = 0) -> Any:
    """Recognise: after backward `step` of every failing run, rank r holds ``wrong(case, r, step)``."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in failing if run.trouble is None and len(run.ranks[0]["shards"]) > step]
        return bool(back) and all(
            same(_arrays(data["shards"][step]), wrong(run.case, rank, step))
            for run in back
            for rank, data in enumerate(run.ranks)
        )

    return fits


def _arrays(seen: Any) -> Any:
    return [np.asarray([each]) if isinstance(each, float | int) else each for each in seen]


def _local(case: Case, rank: int) -> Gradients:
    n = case["world_size"]
    return [None if each is None else shard(each, n, rank) for each in local_gradients(case, rank, 0)]


def _whole(case: Case) -> Gradients:
    return [None if each is None else each.reshape(-1) for each in summed(case, (0,))]


def _right_first(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
    return bool(_shards_are(lambda case, rank, step: gradient_shards(case, rank, [0]))(failing, passing))


_peak = risen("backward")


def _full_bytes(case: Case) -> int:
    return FLOAT_BYTES * sum(trainable_elements(case))


def _most(case: Case, rank: int) -> float:
    own = FLOAT_BYTES * sum(-(-size // case["world_size"]) for size in trainable_elements(case))
    return own + _LAYERS_IN_FLIGHT * FLOAT_BYTES * max(trainable_elements(case))


def _theory(case: Case) -> float:
    return case["steps"] * (case["world_size"] - 1) * _full_bytes(case)


def _sends_late(run: Run) -> bool:
    """Whether on some rank most collectives of a backward come after its last gradient."""
    for data in run.ranks:
        for events in steps_of(data["events"]):
            last = max((place for place, event in enumerate(events) if event["op"] == "ready"), default=0)
            sent = [place for place, event in enumerate(events) if "bytes" in event]
            if sent and sum(place < last for place in sent) < len(sent) / 2:
                return True
    return False


def _most_open(events: Sequence[Mapping[str, Any]]) -> int:
    """The most calls that were under way at one time: started and not waited for."""
    most, under_way = 0, set[int]()
    for index, event in enumerate(events):
        if "bytes" in event:
            under_way.add(index)
            most = max(most, len(under_way))
        elif event["op"] == "wait":
            under_way.discard(event["of"])
    return most


GRADIENTS = Exercise(
    id="zero.5",
    function="shard_gradients",
    title="Gradients that go as they come",
    harness="zero.gradients",
    draw=_draw,
    timeout_s=20.0,
    checks=(
        own_work("shard_gradients"),
        Check(
            "gradient",
            "gradient",
            3,
            "each entry is this rank's share of the mean gradient, added up over backwards, and every `.grad` is None",
            _inspect_shards,
            mistakes=(
                mistake(
                    "the gradient stays",
                    every_run(lambda run: any(any(data["left"]) for data in run.ranks)),
                    "The whole gradients still hang on the parameters. Who needs them once the share is known?",
                ),
                mistake(
                    "sum for mean",
                    _shards_are(lambda case, rank, step: gradient_shards(case, rank, [0], case["world_size"])),
                    "N times too large. A reduce-scatter adds, and so does whatever you wrote for it. Where is the "
                    "division?",
                ),
                mistake(
                    "no sync",
                    _shards_are(lambda case, rank, step: _local(case, rank)),
                    "These are shares of this rank's own gradient. What do the other ranks know about them?",
                ),
                mistake(
                    "whole gradients",
                    _shards_are(lambda case, rank, step: _whole(case)),
                    "The mean is right, and it is all of it. Which elements of it are this rank's?",
                ),
                mistake(
                    "a share of another rank",
                    _shards_are(lambda case, rank, step: gradient_shards(case, (rank + 1) % case["world_size"], [0])),
                    "The mean is right, and the share is that of another rank. From which number do ranks count?",
                ),
                mistake(
                    "only the last backward",
                    _shards_are(lambda case, rank, step: gradient_shards(case, rank, [1]), 1),
                    "After the second backward only its own gradients are there. What happened to the first ones?",
                ),
                mistake(
                    "the second backward counts otherwise",
                    _right_first,
                    "After the first backward all is right, after the second it is not. What do your lists and "
                    "counters still hold when it begins, and what is in `.grad`?",
                ),
                TWO_RANKS,
                mistake(
                    "a frozen parameter",
                    right_only_if(lambda case: not case["frozen"]),
                    "It goes wrong where a parameter is frozen. Is there anything to hook into, and does its entry "
                    "keep its place in the list?",
                ),
                mistake(
                    "right for divisible lengths only",
                    right_only_if(
                        lambda case: all(size % case["world_size"] == 0 for size in trainable_elements(case)[:-1])
                    ),
                    "It goes wrong where N does not divide the elements of a parameter. Which ranks have one more?",
                ),
            ),
        ),
        Check(
            "memory",
            "memory",
            4,
            "at no moment of backward does a rank hold more than its shares and the gradients of a few layers",
            inspect_at_most(_peak, _most, "more at the peak of backward than at its start"),
            mistakes=(
                EXPORTED,
                mistake(
                    "reduced after backward",
                    every_run(_sends_late),
                    "All gradients are there at the same time before the first of them is reduced. When is the "
                    "gradient of the last layer complete, and who needs it after that?",
                ),
                mistake(
                    "many in flight",
                    some_rank(lambda data, case: _most_open(data["events"]) > _LAYERS_IN_FLIGHT),
                    "More is under way at one time than a few layers. How many requests are open, and what does each "
                    "of them keep alive?",
                ),
                mistake(
                    "gradients never freed",
                    held_like(_peak, lambda case, rank: 0.9 * _full_bytes(case)),
                    "They are reduced while backward goes on, and the whole ones stay all the same. Who still knows "
                    "them: `.grad`, a list, the tensor behind a view?",
                ),
            ),
        ),
        Check(
            "traffic",
            "traffic",
            2,
            "each backward sends one reduce-scatter of all gradients",
            inspect_needed(_theory),
            mistakes=(
                mistake(
                    "all-reduce",
                    needed_like(lambda case: 2 * _theory(case)),
                    "Twice what it takes: the mean arrives in full on every rank. Which part of it is looked at?",
                ),
                mistake(
                    "everything gathered",
                    needed_like(lambda case: case["world_size"] * _theory(case)),
                    "Every rank receives every rank's whole gradient, and adds for itself. Which part of the sum does "
                    "it keep?",
                ),
                mistake(
                    "nothing sent",
                    needed_like(lambda case: 0.0),
                    "Nothing was sent. Do the hooks fire?",
                ),
            ),
        ),
    ),
)
