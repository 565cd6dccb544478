"""asynchrony.2: steps alone, and after every few of them a mean of the weights by the samples of each rank."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import GATHERED, Theory, Wrong, every

Array = inputs.Array
RTOL, ATOL = 1e-4, 1e-4
#: What all ranks send beside the weights, for each pair of them in an exchange, and once more: numbers of samples.
BESIDE_BYTES = 64
#: A reduce to one rank and a broadcast take a quarter more than an all-reduce, a gather from three ranks half more.
SLACK = 1.3

#: Ranks, rows (0: none), entries of a row, local steps, steps, and whether all ranks have as many samples.
KINDS = (
    (1, 0, 60, 2, 5, False), (2, 0, 700, 1, 4, False), (2, 3, 250, 5, 7, False), (3, 37, 31, 2, 7, False),
    (4, 0, 1603, 3, 8, False), (3, 0, 1001, 5, 11, False), (4, 6, 90, 4, 3, False), (2, 0, 500, 3, 7, True),
)  # fmt: skip


def drawn(rng: inputs.Rng, n: int, rows: int, columns: int, local_steps: int, steps: int, even: bool) -> dict[str, Any]:
    """Flat and in rows, steps that the local ones divide and not, and too few of them for an exchange."""
    columns = columns + int(rng.integers(0, 7))
    shape = [rows, columns] if rows else [columns]
    samples = [int(each) for each in rng.permutation([3, 8, 21, 55])[:n] + rng.integers(0, 3)]
    samples = samples[:1] * n if even else samples
    words = (
        f"{n} {'ranks' if n > 1 else 'rank'}, weights of shape {tuple(shape)}, local_steps={local_steps}, "
        f"{steps} steps, samples {', '.join(map(str, samples))}"
    )
    return {
        "world_size": n, "shape": shape, "local_steps": local_steps, "steps": steps, "samples": samples,
        "rate": float(rng.choice([0.25, 0.4, 0.6])), "seed": int(rng.integers(2**31)), "words": words,
        "is": {"one dimension": not rows, "two ranks": n == 2, "some ranks": n > 1},
    }  # fmt: skip


@oracle.remembered
def numbers(case: Case) -> tuple[Array, Array]:
    """The weights at the start, [entries], and gradients, [steps, ranks, entries], float32."""
    rng, size = np.random.default_rng(case["seed"]), int(np.prod(case["shape"]))
    gradients = rng.normal(0, 1, (case["steps"], case["world_size"], size)) + rng.normal(0, 1, size)
    return rng.normal(0, 2, size).astype(np.float32), gradients.astype(np.float32)


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    weights, gradients = numbers(case)
    start = {name: case[name] for name in ("rate", "local_steps", "steps")}
    start |= {"weights": weights.reshape(case["shape"]), "samples": case["samples"][rank]}
    return [("start", start), *(("gradient", each[rank].reshape(case["shape"])) for each in gradients)]


# What ranks do in a step; arrays have a row a rank.

Due = Callable[[int, int], bool]
"""(steps so far, local steps): whether ranks exchange now."""
Join = Callable[[Array, Array], Array]
"""(weights, samples): the weights after an exchange, of each rank or of all."""


def after_each(step: int, local_steps: int) -> bool:
    return step % local_steps == 0


def by_samples(weights: Array, samples: Array) -> Array:
    return np.asarray(samples @ weights / samples.sum())


def theory(
    *, due: Due = after_each, join: Join = by_samples, kept: bool = True, early: bool = False, last: bool = False,
    rated: bool = True,
) -> Theory:  # fmt: skip
    """Of each rank its weights after each step. What is named: the mean is that of the weights before the step
    (`early`) or of the last gradient (`last`), or is returned and not `kept`; gradients are not `rated`."""

    def of(case: Case) -> list[Any]:
        (start, gradients), samples = numbers(case), np.array(case["samples"], float)
        own, found = np.repeat(start[None].astype(np.float64), case["world_size"], 0), []
        for step, gradient in enumerate(gradients.astype(np.float64), 1):
            down = (case["rate"] if rated else 1) * gradient
            alone = after = own - down
            if due(step, case["local_steps"]):
                after = join(own, samples) - down if early else own - join(down, samples) if last else after
                after = after if early or last else np.broadcast_to(join(after, samples), own.shape)
            found.append(after)
            own = after if kept else alone
        return [[each[rank].reshape(case["shape"]) for each in found] for rank in range(case["world_size"])]

    return oracle.remembered(of)


def on_rank_0(weights: Array, samples: Array) -> Array:
    return np.concatenate([by_samples(weights, samples)[None], weights[1:]])


JOINS: dict[str, Join] = {
    "unweighted": lambda weights, samples: weights.mean(0),
    "sum for mean": lambda weights, samples: weights.sum(0),
    "not divided by the samples": lambda weights, samples: samples @ weights,
    "divided by the ranks": lambda weights, samples: samples @ weights / len(samples),
    "divided by its own samples": lambda weights, samples: samples @ weights / (samples[:, None] * len(samples)),
    "no sync": lambda weights, samples: weights,
    "on rank 0 only": on_rank_0,
    "the weights of rank 0": lambda weights, samples: weights[0],
}
DUES: dict[str, Due] = {
    "an exchange at every step": lambda step, local_steps: True,
    "never counts anew": lambda step, local_steps: step >= local_steps,
    "once only": lambda step, local_steps: step == local_steps,
    "a step too late": lambda step, local_steps: step % (local_steps + 1) == 0,
    "at the first step of a round": lambda step, local_steps: (step - 1) % local_steps == 0,
}
RIGHT = theory()
WEIGHTS: Wrong = {
    **{name: theory(join=join) for name, join in JOINS.items()},
    **{name: theory(due=due) for name, due in DUES.items()},
    "before the step": theory(early=True),
    "the last gradient averaged": theory(last=True),
    "returned, not kept": theory(kept=False),
    "without the rate": theory(rated=False),
}


def needed(case: Case) -> float:
    """What the all-reduces of the weights take."""
    rounds = case["steps"] // case["local_steps"]
    return float(rounds * 2 * (case["world_size"] - 1) * np.prod(case["shape"]) * oracle.FLOAT_BYTES)


def find_more(each: Observed) -> Finding | None:
    """That more was sent than about one all-reduce of the weights after each of the local steps."""
    case, seen, wanted = each.case, each.seen.total_bytes, needed(each.case)
    exchanges = case["steps"] // case["local_steps"] + 1
    if seen <= SLACK * wanted + BESIDE_BYTES * case["world_size"] ** 2 * exchanges:
        return None
    return Finding(f"{show_bytes(seen)} sent in all steps", f"about {show_bytes(wanted)}", each.words)


def in_every_step(each: Observed) -> bool:
    """Whether an all-reduce of the weights was sent in each step."""
    case = each.case
    full = oracle.FLOAT_BYTES * np.prod(case["shape"])
    return bool(each.seen.total_bytes >= 0.99 * case["steps"] * 2 * (case["world_size"] - 1) * full)


TRAFFIC: Wrong = {"gathered": GATHERED, "something in every step": every(in_every_step)}

EXERCISE = Exercise(
    id="asynchrony.2", function="local_sgd", title="Steps alone", harness="asynchrony.steps_alone",
    draw=inputs.in_order(KINDS, drawn), handed_out=handed_out,
    checks=(
        own_work("local_sgd"),
        heard("local_sgd", lambda case: needed(case) / 4),
        values(6, "weights", "the weights of each rank after each step", RIGHT, of="weights", rtol=RTOL, atol=ATOL,
               wrong=WEIGHTS, names=lambda case: [f"weights, step {step + 1}," for step in range(case["steps"])]),
        order(3, "traffic", "about one all-reduce of the weights after every `local_steps` steps", find_more,
              wrong=TRAFFIC, kind="traffic", where="some ranks"),
    ),
)  # fmt: skip
