"""dp.6: buckets that travel while backward still computes.

Between two layers stands a gate (see `inputs`), at which a rank asks the desk for a key. One rank leads: the others get
a key only when it has asked for its next one, so whatever it has begun by then it has begun without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dtlib.graded import inputs, oracle
from dtlib.graded.compare import close
from dtlib.graded.exercise import Exercise, Finding
from dtlib.graded.kinds import NOTHING_ELSE, every, heard, only_if, order, own_work, sends, values
from dtlib.graded.seen import Ask, Case, Observed

FUNCTION = "overlap_gradients"
LAYERS, STEPS = 6, 2
LAST_GATE, FINISHED, A_STEP = LAYERS - 2, LAYERS, LAYERS + 1  # places of questions in a step, from the first gate on


def draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Buckets of several parameters (one filled to the last byte), of one each, of some, of all; layers in the order
    of the list, and in another."""
    cases: list[dict[str, Any]] = []
    for n, of_layer, shuffled in ((2, 2.3, False), (3, 0.1, False), (2, 1.4, True), (3, 2.2, True), (3, 100.0, False)):
        width = int(rng.integers(40, 60))
        use = [0, *(int(each) for each in rng.permutation(range(1, LAYERS - 1))), LAYERS - 1]
        if shuffled and use == sorted(use):
            use[1], use[2] = use[2], use[1]
        case: dict[str, Any] = {
            "world_size": n,
            "samples": int(rng.integers(2, 5)),
            "widths": [*[width] * LAYERS, 1],
            "use": use if shuffled else list(range(LAYERS)),
            "gated": True,
            "bucket_bytes": int(of_layer * oracle.FLOAT_BYTES * width * width),
            "leader": int(rng.integers(0, n)),
            "seed": int(rng.integers(0, 2**31)),
            "weights_seed": int(rng.integers(0, 2**31)),
        }
        if not cases:  # one limit that a bucket fills to the last byte
            case["bucket_bytes"] = sum(buckets(case)[0])
        told = ", used in another order" if shuffled else ""
        case["words"] = f"{n} ranks, layers of {width}×{width}{told}, buckets of {case['bucket_bytes']} B"
        case["is"] = {"two ranks": n == 2, "one bucket": len(buckets(case)) == 1, "in order": not shuffled}
        cases.append(case)
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The network; in each step a key at each gate, and nothing when backward and `finish` have ended."""
    start = {**inputs.network(case, rank, STEPS), "bucket_bytes": case["bucket_bytes"]}
    ends = [("backward ended", None), ("finished", None)]
    return [("start", start), *(piece for step in range(STEPS) for piece in [*inputs.gates(case, rank, step), *ends])]


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """The leader is one gate ahead: the others wait at each gate for its next question, and it for them to follow."""
    leader, found = case["leader"], []
    for rank in (rank for rank in range(case["world_size"]) if rank != leader):
        for step in range(STEPS):
            first = 1 + step * A_STEP  # the piece of the first gate
            for gate in range(first, first + LAST_GATE + 1):
                until = gate + 1 if gate < first + LAST_GATE else first + FINISHED
                found += [(rank, gate, leader, until), (leader, gate + 1, rank, gate)]
    return found


# Buckets


def sizes(case: Case) -> list[int]:
    """Bytes of each parameter, from the last to the first."""
    return [oracle.FLOAT_BYTES * size for size in reversed(oracle.sizes(case))]


def buckets(case: Case, *, largest: int | None = None, in_order: bool = False) -> list[list[int]]:
    """Bytes of the parameters in each bucket: it closes before it would exceed `largest`."""
    most = case["bucket_bytes"] if largest is None else largest
    found: list[list[int]] = []
    for size in sizes(case)[::-1] if in_order else sizes(case):
        if found and sum(found[-1]) + size <= most:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def complete_at(case: Case) -> list[int]:
    """For each bucket, at which question of the leader in a step (0: the first gate) all its gradients are there."""
    ready = {layer: place for place, layer in enumerate(reversed(case["use"]))}
    of_parameter = [ready[index // 2] for index in reversed(range(len(oracle.sizes(case))))]
    ends = list(accumulate(len(bucket) for bucket in buckets(case)))
    return [max(of_parameter[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def sent_in_step(observed: Observed, rank: int, step: int) -> list[int]:
    """The bytes of each all-reduce that `rank` began in a step, in their order."""
    n = observed.case["world_size"]
    begun = observed.seen.collectives(rank)
    each = len(begun) // STEPS
    return [round(size / (2 * (n - 1))) for _, size in begun[step * each : (step + 1) * each]]


def near_sizes(seen: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether these are the sizes of these buckets: gloo may round the pieces of an all-reduce up."""
    return len(seen) == len(wanted) and all(abs(one - two) <= 64 for one, two in zip(seen, wanted, strict=True))


def find_buckets(observed: Observed) -> Finding | None:
    """That each step's all-reduces are as long as the buckets."""
    wanted = sorted(sum(bucket) for bucket in buckets(observed.case))
    for step in range(STEPS):
        seen = sorted(sent_in_step(observed, observed.case["leader"], step))
        if not near_sizes(seen, wanted):
            return Finding(f"all-reduces of {listed(seen)} B", f"{listed(wanted)} B", observed.words)
    return None


def listed(numbers: Sequence[int]) -> str:
    """Some numbers in words."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "") if numbers else "0"


def cut_like(theory: Callable[[Case], Sequence[int]]) -> Any:
    """The buckets are cut in another way."""
    return every(
        lambda each: all(
            near_sizes(sorted(sent_in_step(each, each.case["leader"], step)), sorted(theory(each.case)))
            for step in range(STEPS)
        )
    )


def overflows(observed: Observed) -> bool:
    """Whether a bucket is longer than it may be."""
    longest = max(observed.case["bucket_bytes"], *sizes(observed.case)) + 64
    return any(
        size > longest for step in range(STEPS) for size in sent_in_step(observed, observed.case["leader"], step)
    )


# Overlap


def questions(observed: Observed, step: int) -> list[Ask]:
    """What the leader asked in a step: at the gates, when backward had ended, when `finish` had."""
    asked = [each for each in observed.seen.asks if each.rank == observed.case["leader"] and each.number]
    return asked[step * A_STEP : (step + 1) * A_STEP]


def begun(observed: Observed, step: int) -> list[int]:
    """How many all-reduces the leader had begun by each of its questions in a step."""

    def count(position: int) -> int:
        return len({each.which for each in observed.seen.begun_by(observed.case["leader"], position)})

    before = count(questions(observed, step - 1)[-1].position) if step else 0
    return [count(each.position) - before for each in questions(observed, step)]


def lengths(case: Case, **how: Any) -> list[int]:
    """The bytes of each bucket."""
    return [sum(bucket) for bucket in buckets(case, **how)]


def complete(case: Case) -> list[int]:
    """How many buckets have all their gradients by each of the leader's questions in a step."""
    done_at = {layer: place for place, layer in enumerate(reversed(case["use"]))}
    of_parameter = [done_at[index // 2] for index in reversed(range(len(oracle.sizes(case))))]
    ends = list(accumulate(len(bucket) for bucket in buckets(case)))
    at = [max(of_parameter[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [sum(place <= question for place in at) for question in range(LAYERS)]


def kept_waiting(observed: Observed, *, at_last: bool) -> list[bool]:
    """For each time that another rank was let go on at a gate (the last, or all others): whether nothing moved."""
    places = [each for each in observed.seen.asks if each.rank != observed.case["leader"] and each.label == "gate"]
    return [each.why == "quiet" for each in places if ((each.number - 1) % A_STEP == LAST_GATE) == at_last]


def find_overlap(observed: Observed) -> Finding | None:
    """That each bucket leaves when it is complete, nobody waits for one during backward, and `finish` does."""
    if not observed.seen.is_proved:
        return None
    if any(kept_waiting(observed, at_last=False)):
        return Finding("a rank that waits for the others during backward", "none before it ends", observed.words)
    for step in range(STEPS):
        for number, wanted in zip(begun(observed, step), complete(observed.case), strict=False):
            if number < wanted:
                where = f"step {step + 1}, {observed.words}"
                return Finding(f"{number} buckets under way when {wanted} were complete", f"{wanted}", where)
    if not all(kept_waiting(observed, at_last=True)):
        return Finding("`finish` ending before the others had sent all", "it to wait for them", observed.words)
    return None


def total(case: Case) -> float:
    """What all ranks send in all steps."""
    return 2.0 * STEPS * (case["world_size"] - 1) * sum(sizes(case))


@oracle.remembered
def right(case: Case) -> Any:
    """The mean over the ranks, after each step on every rank."""
    return [[each for step in range(STEPS) for each in oracle.mean_gradients(case, [step])]] * case["world_size"]


def contributions(case: Case, rank: int) -> Any:
    """What each rank finds, in both steps."""
    n = case["world_size"]
    return [[g for step in range(STEPS) for g in oracle.local_gradients(case, r, step)] for r in range(n)]


def right_in_first_step(observed: Observed) -> bool:
    """Whether the first step is right on every rank."""
    wanted = right(observed.case)
    half = len(wanted[0]) // STEPS
    return all(
        close(said["gradients"][:half], two[:half], 1e-3, 1e-5) for said, two in zip(observed.said, wanted, strict=True)
    )


def some_stay_local(observed: Observed) -> bool:
    """Whether each parameter holds either the mean or the rank's own gradient after the first step, and both occur."""
    wanted = right(observed.case)[0]
    kinds = set()
    for rank, said in enumerate(observed.said):
        local = oracle.local_gradients(observed.case, rank, 0)
        for seen, mean, own in zip(said["gradients"], wanted, local, strict=False):
            kinds.add("mean" if close(seen, mean, 1e-3, 1e-5) else "own" if close(seen, own, 1e-3, 1e-5) else "other")
    return kinds == {"mean", "own"}


def more_each_step(observed: Observed) -> bool:
    """Whether the second step sends more than the first."""
    half = questions(observed, 0)[-1].position
    first = sum(each.num_bytes for each in observed.seen.log[:half] if each.kind == "data")
    return observed.seen.total_bytes > 2.1 * first


EXERCISE = Exercise(
    id="dp.6",
    function=FUNCTION,
    title="Buckets that hide behind backward",
    harness="dp.overlap",
    draw=draw,
    handed_out=handed_out,
    holds=holds,
    checks=(
        own_work(FUNCTION, built_in=True),
        heard(FUNCTION, lambda case: total(case) / 2 / (LAYERS + 1)),
        values(
            4,
            "gradient",
            "after `finish()` every `.grad` is the mean over the ranks, step after step",
            right,
            of="gradients",
            kind="gradient",
            rtol=1e-3,
            atol=1e-5,
            names=lambda case: [
                f"step {step + 1}, gradient of {name}" for step in range(STEPS) for name in oracle.names(case)
            ],
            sums=contributions,
            wrong={
                "a bucket is dropped": every(some_stay_local),
                "right in the first step only": every(right_in_first_step),
                "right for one bucket size only": only_if("one bucket"),
                "right for layers in order only": only_if("in order"),
            },
        ),
        sends(
            2,
            "traffic",
            "each step sends what one all-reduce of all gradients needs",
            total,
            wrong={
                "everything twice": lambda case: 2 * total(case),
                "grows with the steps": every(more_each_step),
                "gathered, then added": every(
                    lambda each: any(op == "all_gather" for op, _ in each.seen.collectives())
                ),
            },
        ),
        order(
            2,
            "buckets",
            "the buckets are cut greedily, from the last parameter to the first",
            find_buckets,
            wrong={
                "a bucket for each parameter": cut_like(sizes),
                "one bucket for all": cut_like(lambda case: [sum(sizes(case))]),
                "full taken for too full": cut_like(
                    lambda c: [sum(b) for b in buckets(c, largest=c["bucket_bytes"] - 1)]
                ),
                "from the first parameter": cut_like(lambda case: [sum(b) for b in buckets(case, in_order=True)]),
                "elements for bytes": cut_like(lambda c: [sum(b) for b in buckets(c, largest=4 * c["bucket_bytes"])]),
                "buckets that overflow": every(overflows),
            },
        ),
        order(
            3,
            "overlap",
            "each bucket leaves when its last gradient is ready, and nobody waits before backward ends",
            find_overlap,
            where="not one bucket",
            kind="overlap",
            wrong={
                "blocking in the hook": every(lambda each: any(kept_waiting(each, at_last=False))),
                "launched after backward": every(lambda each: begun(each, 0)[LAYERS - 1] == 0),
                "one bucket for all": every(lambda each: len(each.seen.collectives(each.case["leader"])) <= STEPS),
                "finish does not wait": every(lambda each: not all(kept_waiting(each, at_last=True))),
                "launched late": NOTHING_ELSE,
            },
        ),
    ),
)
