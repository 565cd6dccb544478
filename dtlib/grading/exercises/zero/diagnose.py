"""zero.1: what is wrong with a run of a stage, by what its ranks hold and send; on paper."""

from typing import Any

from dtlib.grading.exercises.inputs import Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import collectives, zero

NOTHING, OPTIMIZER, GRADIENTS, WEIGHTS, ALL_REDUCED, EACH, OFTEN = (
    "nothing wrong", "optimizer whole", "gradients whole", "weights whole", "gradients all-reduced",
    "each micro-batch", "gathered too often",
)  # fmt: skip

#: What is wrong, the stage that is meant, micro-batches, bytes of an element's weight, gradient and optimizer state,
#: and the numbers of ranks. Weights and gradients as wide as each other, and not; never two micro-batches, where
#: an all-reduce sends as much as one exchange for each.
KINDS = (
    (NOTHING, 0, 1, (2, 2, 12), (2, 4, 8)), (NOTHING, 0, 4, (2, 4, 8), (4, 8)), (NOTHING, 1, 1, (4, 4, 8), (2, 4, 6)),
    (NOTHING, 1, 8, (2, 2, 12), (8, 16, 64)), (NOTHING, 2, 1, (2, 4, 12), (4, 8, 12)),
    (NOTHING, 2, 6, (2, 2, 12), (2, 8)), (NOTHING, 3, 1, (2, 2, 12), (2, 3, 5)), (NOTHING, 3, 4, (2, 4, 8), (8, 32)),
    (OPTIMIZER, 1, 1, (2, 2, 12), (2, 4, 8)), (OPTIMIZER, 2, 4, (2, 4, 8), (4, 12)),
    (OPTIMIZER, 3, 3, (4, 4, 8), (2, 3, 6)),
    (GRADIENTS, 2, 1, (2, 2, 12), (4, 8, 16)), (GRADIENTS, 2, 4, (2, 4, 8), (2, 6)),
    (GRADIENTS, 3, 1, (2, 2, 12), (2, 4)), (GRADIENTS, 3, 8, (4, 4, 8), (8, 16, 24)),
    (WEIGHTS, 3, 1, (2, 2, 12), (2, 4)), (WEIGHTS, 3, 5, (4, 4, 8), (3, 6, 9)), (WEIGHTS, 3, 4, (2, 4, 12), (8, 64)),
    (ALL_REDUCED, 1, 1, (2, 2, 12), (2, 4, 8)), (ALL_REDUCED, 2, 4, (2, 4, 8), (4, 8)),
    (ALL_REDUCED, 3, 3, (4, 4, 8), (2, 5)),
    (EACH, 0, 4, (2, 2, 12), (2, 4, 8)), (EACH, 1, 8, (2, 4, 8), (8, 16)), (EACH, 1, 3, (4, 4, 8), (2, 6)),
    (OFTEN, 3, 1, (2, 2, 12), (4, 8)), (OFTEN, 3, 4, (2, 4, 8), (2, 16)), (OFTEN, 2, 4, (4, 4, 8), (2, 4, 6)),
    (OFTEN, 1, 3, (2, 2, 12), (8, 12)),
)  # fmt: skip
"""Each fault at each stage that can have it, and each stage without a fault, in any order."""


def case(
    rng: Rng, number: int, kind: str, stage: int, micro_batches: int, widths: tuple[int, ...], ranks: tuple[int, ...]
) -> dict[str, Any]:
    num_params, other = int(rng.integers(100, 9000)) * 10**6, float(rng.uniform(5, 40)) * 1e9
    weight, gradient, optimizer = widths
    reduces, gathers = exchanges(kind, stage, micro_batches)

    def sent(times: int, width: int) -> list[int]:
        wire = float(rng.uniform(1.001, 1.006))  # headers
        return [
            round(wire * times * collectives.ring_all_gather_bytes(num_params * width, n)) if times else 0
            for n in ranks
        ]

    told = {
        "stage": stage, "micro_batches": micro_batches, "num_params": num_params, "weight_bytes": weight,
        "gradient_bytes": gradient, "optimizer_bytes": optimizer, "ranks": list(ranks),
        "held_bytes": [round(other + num_params * held(kind, n, stage, widths)) for n in ranks],
        "gradient_sent": sent(reduces, gradient), "weight_sent": sent(gathers, weight),
    }  # fmt: skip
    return call(f"run {number}: {in_words(told)}", [told]) | {"wrong": kind}


def held(kind: str, n: int, stage: int, widths: tuple[int, ...]) -> float:
    """Bytes of states a parameter that a rank holds: the part that is whole by mistake is not shared out."""
    whole = (kind == WEIGHTS, kind == GRADIENTS, kind == OPTIMIZER)
    shared = [0 if each else width for each, width in zip(whole, widths, strict=True)]
    return zero.bytes_per_param(n, stage, *shared) + sum(widths) - sum(shared)


def exchanges(kind: str, stage: int, micro_batches: int) -> tuple[int, int]:
    """How often a buffer's (N−1)/N are sent for one update, of gradients and of weights."""
    reduces = (2, 1, micro_batches, micro_batches)[stage]
    gathers = (0, 1, 1, 2 * micro_batches)[stage]
    if kind == GRADIENTS:
        reduces = 1  # of their sum
    if kind == WEIGHTS:
        gathers = 1  # they are there until the update
    if kind == ALL_REDUCED:
        reduces *= 2
    if kind == EACH:
        reduces *= micro_batches
    if kind == OFTEN:
        gathers = 3 * micro_batches if stage == 3 else micro_batches
    return reduces, gathers


of = by("wrong", kind="schedule")

EXERCISE = on_paper(
    "zero.1", "diagnose_stage", "Which part is not shared out?", in_any_order(KINDS, case),
    of(OPTIMIZER, GRADIENTS, WEIGHTS)(3, "held", "a part that is whole on every rank"),
    of(ALL_REDUCED, EACH, OFTEN)(3, "sent", "more sent than the stage needs"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
