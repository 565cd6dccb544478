"""memory.7: what a rank holds that it should not, or lacks, by what it held at ten moments; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper, values
from dtlib.theory import memory

NOTHING, NO_MASTER, NARROW, WIDE, UNFROZEN, KEPT, GRAPH, OUTPUTS = (
    "nothing wrong", "no master copy", "narrow moments", "wide gradients", "nothing frozen", "gradients kept",
    "graph kept", "outputs kept",
)  # fmt: skip
STEPS = 3

#: What is wrong, the bytes of a weight, a gradient, a master copy and a moment, and the share that is trained. Narrow
#: moments and a master copy that is missing are as large as each other; with half the weights frozen, so are gradients
#: that are twice as wide and those of all weights.
KINDS = (
    (NOTHING, (2, 2, 4, 4), 1), (NOTHING, (4, 4, 0, 4), 1), (NOTHING, (2, 2, 0, 2), 0.5), (NOTHING, (2, 4, 4, 4), 0.3),
    (NOTHING, (2, 2, 4, 2), 1),
    (NO_MASTER, (2, 2, 4, 4), 1), (NO_MASTER, (2, 4, 4, 2), 0.4),
    (NARROW, (2, 2, 4, 4), 1), (NARROW, (4, 4, 0, 4), 1), (NARROW, (2, 4, 4, 4), 0.5),
    (WIDE, (2, 2, 4, 4), 1), (WIDE, (2, 2, 4, 4), 0.5), (WIDE, (2, 2, 0, 4), 0.25),
    (UNFROZEN, (2, 2, 4, 4), 0.5), (UNFROZEN, (4, 4, 0, 4), 0.5), (UNFROZEN, (2, 2, 0, 2), 0.1),
    (KEPT, (2, 2, 4, 4), 1), (KEPT, (4, 4, 0, 4), 0.5),
    (GRAPH, (2, 2, 4, 4), 1), (GRAPH, (2, 4, 4, 4), 0.2),
    (OUTPUTS, (2, 2, 4, 4), 1), (OUTPUTS, (4, 4, 0, 4), 0.5),
)  # fmt: skip
"""Each fault with several recipes, and runs without one, in any order; batches of any length."""


def case(rng: Rng, number: int, kind: str, widths: tuple[int, ...], share: float) -> dict[str, Any]:
    num_params = 10**4 * int(rng.integers(10**3, 10**5))
    trained = round(num_params * share)
    drawn = rng.uniform(0.5, 4, STEPS)
    if share == 1 or kind == GRAPH:  # batches that grow, or shrink where something stays: with a graph both
        drawn = np.sort(drawn * (1, 2, 4))[:: -1 if share == 1 and kind in (GRAPH, OUTPUTS) else 1]
    activations = [int(each) for each in num_params * drawn]
    outputs = [int(each * (rng.uniform(0.05, 0.12) if share == 1 else rng.uniform(0.6, 0.9))) for each in activations]
    held, meant = (moments(each, num_params, trained, widths, activations, outputs) for each in (kind, NOTHING))
    surplus = [total(one) - total(two) for one, two in zip(held, meant, strict=True)]
    named = dict(zip(("weight_bytes", "gradient_bytes", "master_bytes", "moment_bytes"), widths, strict=True))
    run = {"num_params": num_params, "num_trained": trained, **named, "held": held}
    return call(f"run {number}: {in_words(run)}", [run]) | {"right": [kind, max(surplus, key=abs)]}


def moments(
    kind: str, num_params: int, trained: int, widths: tuple[int, ...], activations: list[int], outputs: list[int]
) -> list[dict[str, Any]]:
    """The bytes of each part before the first step, and of each step after forward, backward and update."""
    weight, gradient, master, moment = widths
    trained = num_params if kind == UNFROZEN else trained
    gradient, master = 4 if kind == WIDE else gradient, 0 if kind == NO_MASTER else master
    moment = moment // 2 if kind == NARROW else moment
    states = memory.ModelStates(weight, gradient, master, 0, moment, moment).scaled(trained)
    found, stays, left = [part("start", num_params * weight, 0, int(states.master_weights), 0)], 0, 0
    for number, (kept, output) in enumerate(zip(activations, outputs, strict=True)):
        before = int(states.optimizer if number else states.master_weights)
        found.append(part("forward", num_params * weight, left, before, kept + stays))
        stays = kept if kind == GRAPH else stays + output if kind == OUTPUTS else 0
        found.append(part("backward", num_params * weight, int(states.gradients), before, stays))
        left = int(states.gradients) if kind == KEPT else 0
        found.append(part("update", num_params * weight, left, int(states.optimizer), stays))
        stays = 0 if kind == GRAPH else stays  # until the next loss takes its place
    return found


def part(when: str, weights: int, gradients: int, optimizer: int, activations: int) -> dict[str, Any]:
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": activations}
    return {"when": when, **parts}


def total(moment: dict[str, Any]) -> int:
    return sum(size for name, size in moment.items() if name != "when")


def right(case: Case) -> list[Any]:
    return list(case["right"])


PARTS = "what, how many bytes"
of = by("right", right, part=0, parts=PARTS, kind="memory")
EXERCISE = on_paper(
    "memory.7", "diagnose_held", "What does this rank hold?", in_any_order(KINDS, case),
    of(NO_MASTER, NARROW, WIDE, UNFROZEN)(3, "states", "states that are missing, or too wide, or too many"),
    of(KEPT, GRAPH, OUTPUTS)(3, "kept", "what is kept too long"),
    of(NOTHING)(1, "nothing", "nothing is found where nothing is wrong"),
    values(2, "bytes", "by how many bytes", right, part=1, parts=PARTS, kind="memory"),
)  # fmt: skip
