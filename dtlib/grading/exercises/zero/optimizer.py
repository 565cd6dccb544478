"""zero.4: each rank keeps the optimizer's states of its share, stage 1."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, kinds, oracle, signs
from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.exercises.seen import Case, Observed

from ._shared import positions, share_bytes

STATES = {"adamw": 2, "sgd": 1}  # numbers that torch's optimizer keeps for each element
ATOL = 2e-4  # a step moves a weight by about 1e-2; float32 rounds gradients, and eps multiplies that


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Both optimizers on 2 to 4 ranks, SGD as Nesterov has it too, so many weights that they can be weighed. N divides
    their number in one case of each; elsewhere one is left over."""
    cases: inputs.Cases = []
    for n, kind in ((3, "adamw"), (2, "sgd"), (4, "adamw"), (4, "sgd"), (4, "adamw")):
        weighed = len(cases) == 4
        middle = n * int(rng.integers(90 // n, 120 // n)) - ((n, kind) in ((2, "sgd"), (4, "adamw")))
        widths = [64, 2048, 2800, 1] if weighed else [48, middle, 12 * int(rng.integers(7, 9)), 1]
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": n == 4}
        if kind == "adamw":
            settings = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-4}
        settings["weight_decay"] = float(rng.choice([0.05, 0.1]))
        own = {"optimizer": kind, "settings": settings, "steps": 2 if weighed else 3, "weighed": weighed}
        words = f"{kind}{', nesterov=True' * settings.get('nesterov', False)}, layers of {', '.join(map(str, widths))}"
        properties = {"divisible": sum(oracle.sizes({"widths": widths})) % n == 0, "adamw": kind == "adamw"}
        properties["plain"] = not settings.get("nesterov")
        cases.append(inputs.training(rng, n, widths, words, properties, **own))
    return cases


def asked_for(case: Case) -> Any:
    total = sum(oracle.sizes(case))
    return positions(case, total) if case["weighed"] else np.arange(total)


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The model, its batches and the optimizer; after each step, what is asked for."""
    start = {**inputs.model(case, rank, case["steps"]), "optimizer": case["optimizer"], "settings": case["settings"]}
    return [("start", start), *[("between steps", asked_for(case))] * case["steps"]]


def told(case: Case, path: list[oracle.Tensors]) -> Any:
    """What every rank tells that has these weights after each step."""
    return [[oracle.flat(each)[asked_for(case)] for each in path]] * case["world_size"]


def after_steps(
    factor: Callable[[int], float] = lambda n: 1.0, *, fresh: bool = False, own: bool = False, late: bool = False
) -> signs.Theory:
    """What every rank tells where a step takes ``factor(n)`` times the mean gradient, or for each share that of its
    `own` rank; `late` tells the weights before each step."""

    def theory(case: Case) -> Any:
        known: list[oracle.Tensors] = []

        def gradients(now: Any, number: int) -> Any:
            known.append(now)
            at, n = known[max(0, number - late)], case["world_size"]
            if not own:
                return oracle.combined([oracle.mean_gradients(case, [number], at)], factor(n))
            parts = [oracle.flat(oracle.loss_and_gradients(case, at, rank, number)[1]) for rank in range(n)]
            whole = np.concatenate([np.array_split(part, n)[rank] for rank, part in enumerate(parts)])
            pieces = np.split(whole, np.cumsum(oracle.sizes(case))[:-1])
            return [piece.reshape(each.shape) for piece, each in zip(pieces, at, strict=True)]

        path = oracle.trajectory(case, case["steps"], gradients, fresh=fresh)
        return told(case, known if late else path)

    return oracle.remembered(theory)


def at_start(case: Case) -> Any:
    return told(case, [oracle.start(case)] * case["steps"])


def new(observed: Observed) -> Any:
    """For each rank, which elements are right after the first step; none, unless the others are as at the start."""
    said = np.stack([rank["weights"][0] for rank in observed.said])
    found = np.abs(said - right(observed.case)[0][0]) <= ATOL
    return found & np.all(found | (np.abs(said - at_start(observed.case)[0][0]) <= 1e-7))


def some_never_move(failing: Sequence[Observed], passing: Sequence[Observed]) -> bool:
    """Whether all ranks have the same elements as at the start, and new ones beside them; a sample may hold none."""
    found = [told for each in failing if each.has_come and not (told := new(each)).all()]
    return all((each == each[0]).all() for each in found) and any(each.any() for each in found)


def most(case: Case, rank: int) -> float:
    """The weights; of the share the states, a copy and the gradient."""
    own = (STATES[case["optimizer"]] + 2) * share_bytes(case, rank, flat=True)
    return oracle.num_bytes(case) + own + kinds.ROOM


@oracle.remembered
def changes(case: Case) -> list[tuple[float, float]]:
    """Of some elements the sum of their changes after each step, and how far off it may be."""
    start, *path = map(oracle.flat, [oracle.start(case), *oracle.trajectory(case, case["steps"])])
    some = inputs.every_so_often(len(start))
    found = [new[some] - start[some] for new in path]
    return [(float(each.sum()), 0.02 * float(np.linalg.norm(each))) for each in found]


def early(observed: Observed, rank: int) -> bool:
    """Whether a rank whose weights are right asked which of them are wanted before it had them."""
    said, wanted = np.stack(observed.said[rank]["weights"]), np.stack(right(observed.case)[rank])
    asked = [ask.shown for ask in observed.seen.asked(rank, "between steps")]
    came = [abs(shown - total) <= off for shown, (total, off) in zip(asked, changes(observed.case), strict=True)]
    return bool((np.abs(said - wanted) <= ATOL).all()) and not all(came)


def right_only(condition: str) -> signs.Sign:
    """Right in just the cases with a property, and far off elsewhere."""

    def off(each: Observed) -> bool:
        told = np.stack([rank["weights"] for rank in each.said])
        return bool((np.abs(told - np.stack(right(each.case))) > ATOL).mean() > 0.05)

    holds = signs.only_if(condition).fits
    return signs.Sign(lambda failing, passing: holds(failing, passing) and all(map(off, failing)))


def needed(case: Case) -> float:
    return 2 * case["steps"] * oracle.gather_bytes(case)


right = after_steps()
WEIGHTS: signs.Wrong = {
    "sum for mean": after_steps(lambda n: n),
    "divided twice": after_steps(lambda n: 1 / n),
    "nothing happened": at_start,
    "a fresh optimizer each step": after_steps(fresh=True),
    "each rank's own gradient": after_steps(own=True),
    "the weights before the step": after_steps(late=True),
    "only the own share is new": signs.every(lambda each: new(each).any(0).all() and not new(each).all(1).any()),
    "some weights never move": signs.Sign(some_never_move),
    "right for one optimizer only": (right_only("adamw"), right_only("plain")),
}
MEMORY: kinds.Ranges = {
    "whole parameters on a rank": signs.every(  # some hold more than others by more than all weights are
        lambda each: (
            np.ptp([each.seen.held(rank, "between steps") for rank in range(each.case["world_size"])])
            > 1.2 * oracle.num_bytes(each.case)
        )
    ),
    "replicated states": (lambda case, _: oracle.num_bytes(case) * (1 + STATES[case["optimizer"]]) - kinds.ROOM, None),
    "more than a share needs": (most, None),
}
TRAFFIC: signs.Wrong = {
    "all-reduce, then all-gather": lambda case: 1.5 * needed(case),
    "two all-reduces": lambda case: 2 * needed(case),
    "the gradients do not travel": lambda case: needed(case) / 2,
    "everything gathered": lambda case: needed(case) / 2 * (case["world_size"] + 1),
}
CHECKS = (
    kinds.own_work("sharded_optimizer", built_in=True),
    kinds.heard("sharded_optimizer", lambda case: needed(case) / 2),
    kinds.values(
        3, "weights", "after every step each rank has the weights of a single process", right, of="weights", atol=ATOL,
        names=lambda case: [f"weights after step {step + 1}" for step in range(case["steps"])], wrong=WEIGHTS,
    ),
    kinds.keeps(
        4, "memory", "between steps a rank keeps no more than the states, a copy and the gradient of its own share",
        kinds.held_at("between steps"), most, "held between steps, the weights among them", wrong=MEMORY, early=early,
    ),
    kinds.sends(  # where weighed, gloo's own reduce sends long tensors in more pieces than it must
        3, "traffic", "a step sends one reduce-scatter of gradients and one all-gather of weights", needed,
        where="not weighed", wrong=TRAFFIC,
    ),
)  # fmt: skip
EXERCISE = Exercise(
    id="zero.4", function="sharded_optimizer", title="States for a share of the weights", harness="zero.optimizer",
    draw=draw, handed_out=handed_out, checks=CHECKS,
)  # fmt: skip
