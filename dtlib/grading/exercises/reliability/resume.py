"""reliability.2: what must be saved so that a run which is killed goes on to the bit.

One half of the ranks trains until the desk kills it. The other half has other random states, and the bytes of the last
save: from these alone it goes on. What its weights should be is computed here, dice and all.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, oracle
from dtlib.grading.exercises.compare import close, show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import heard, order, own_work, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import NOTHING_ELSE, Theory, Wrong, every

from ._run import State, begun, data, every_so_many, size, went

ATOL = 5e-6
ROUNDED = 2e-3  # what formats of two bytes are off by, and no part that is left out
ROOM_BYTES = 30_000  # for random states, and what stands around tensors in a file

#: Ranks of a half, widths, samples, a batch; after which steps it is saved, killed and at its end: within an epoch that
#: is not the first, and not right after the save.
KINDS = (
    (1, (12, 20), 24, 6, (3, 6), 9, 13), (2, (16, 24), 32, 8, (2, 5), 7, 11), (2, (64, 256), 24, 8, (2, 4), 6, 9),
    (1, (30, 50), 20, 4, (2, 7), 8, 12),
)  # fmt: skip


def drawn(
    rng: inputs.Rng, n: int, widths: tuple[int, int], samples: int, batch: int, saves: tuple[int, int], kill: int,
    steps: int,
) -> dict[str, Any]:  # fmt: skip
    words = f"{n} rank(s), saved after steps {saves[0]} and {saves[1]}, killed after step {kill}"
    return {
        "world_size": 2 * n, "ranks": n, "widths": list(widths), "samples": samples, "batch": batch,
        "saves": list(saves), "kill": kill, "steps": steps, "lr": 0.02, "eps": 1e-3, "warm": 5,
        "order": int(rng.integers(2**20)), "weights_seed": int(rng.integers(2**31)), "seed": int(rng.integers(2**31)),
        "own_seeds": [int(each) for each in rng.integers(1, 2**31, 2 * n)], "words": words, "is": {},
    }  # fmt: skip


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    names = ("ranks", "widths", "samples", "batch", "steps", "lr", "eps", "warm", "order", "weights_seed")
    told = {name: case[name] for name in names}
    told |= {"data": data(case), "own_seed": case["own_seeds"][rank], "every": every_so_many(case)}
    orders = {case["kill"]: "kill", **dict.fromkeys(case["saves"], "save")}
    last = case["kill"] if rank < case["ranks"] else 0
    return [("start", told), *(("then", orders.get(step, "go")) for step in range(1, last + 1))]


def named(case: Case, rank: int) -> dict[str, Any]:
    return {"step": None}


@oracle.remembered
def saved(case: Case) -> State:
    """What there is to save the last time."""
    state = begun(case, 0)
    went(case, state, case["saves"][1])
    return state


def without(*names: str) -> Theory:
    """The weights of the ranks that go on, with these parts as they are when a run begins."""

    def told(case: Case) -> list[inputs.Array]:
        state = copy.deepcopy(saved(case))
        state |= {name: value for name, value in begun(case, 1).items() if name in names}
        return [np.stack(went(case, state, due(case)))] * case["ranks"]

    return oracle.remembered(told)


def from_zero(case: Case) -> list[inputs.Array]:
    return [np.stack(went(case, begun(case, 1), case["steps"]))] * case["ranks"]


ADAM = ("first", "second", "adam", "rate")
LOST: dict[str, tuple[tuple[str, ...], ...]] = {
    "the weights": (("weights",),),
    "the moments": (ADAM, ("first", "second"), (*ADAM, "scheduler")),
    "Adam's count of steps": (("adam",),),
    "the scheduler": (("scheduler",),),
    "the sampler": (("epoch", "position"),),
    "the place in the epoch": (("position",),),
    "the dice of dropout": (("torch",),),
    "the dice of what is turned round": (("python",),),
    "all dice": (("python", "torch"),),
}


def gone_on(each: Observed) -> list[Any]:
    """The weights of the ranks that went on, after each of their steps."""
    return [said["weights"] for said in each.said[each.case["ranks"] :]]


def counts(each: Observed) -> list[int]:
    """How many steps each of them made."""
    ranks = range(each.case["ranks"], each.case["world_size"])
    return [len(each.seen.asked(rank, "step")) for rank in ranks]


def is_near(told: list[Any], wanted: list[Any], atol: float = ATOL) -> bool:
    """That as many of the weights as are wanted are these."""
    return all(one is not None and close(one[: len(two)], two, 0, atol) for one, two in zip(told, wanted, strict=True))


IS_ROUNDED = every(lambda each: is_near(gone_on(each), without()(each.case), ROUNDED))


def goes_through(each: Observed) -> bool:
    """Whether so many steps are made as from the beginning."""
    return set(counts(each)) == {each.case["steps"]}


STEPS: Wrong = {
    "from zero": every(lambda each: goes_through(each) and is_near(gone_on(each), from_zero(each.case))),
    "the step": every(goes_through),
    "an older save": every(lambda each: set(counts(each)) == {each.case["steps"] - each.case["saves"][0]}),
    "one step off": every(lambda each: {abs(steps - due(each.case)) for steps in counts(each)} == {1}),
}
WEIGHTS: dict[str, Any] = {name: tuple(without(*parts) for parts in several) for name, several in LOST.items()}
WEIGHTS |= {**STEPS, "rounded": IS_ROUNDED, "something else": NOTHING_ELSE}


def due(case: Case) -> int:
    return int(case["steps"] - case["saves"][1])


def find_other_steps(each: Observed) -> Finding | None:
    """That they do not go on after the last save."""
    wanted, told = due(each.case), counts(each)
    if set(told) == {wanted}:
        return None
    return Finding(f"{max(told)} steps after the kill", f"{wanted}", each.words)


def find_rounded(each: Observed) -> Finding | None:
    """That steps which are made once more end elsewhere, by however little."""
    n, last, kill = each.case["ranks"], each.case["saves"][1], each.case["kill"]
    for rank in range(n):
        before, again = each.said[rank]["weights"][last:kill], each.said[rank + n]["weights"][: kill - last]
        if not np.array_equal(before, again):
            seen = f"weights that differ by up to {float(np.abs(before - again).max()):.2g}"
            return Finding(seen, "those of the steps that are made once more", each.words)
    return None


def moved(each: Observed) -> int:
    """The most that a rank gave to the one that goes on for it."""
    n = each.case["ranks"]
    data = each.seen.data()
    return max(sum(one.num_bytes for one in data if (one.rank, one.peer) == (rank, rank + n)) for rank in range(n))


def find_more(each: Observed) -> Finding | None:
    limit = 1.01 * 3 * oracle.FLOAT_BYTES * size(each.case) + ROOM_BYTES
    if moved(each) <= limit:
        return None
    return Finding(f"{show_bytes(moved(each))} saved by a rank", f"at most {show_bytes(limit)}", each.words)


def needed(case: Case) -> float:
    """What the gradients of two ranks take until the kill and after it."""
    return float((case["ranks"] - 1) * oracle.FLOAT_BYTES * size(case) * (case["kill"] + due(case)))


EXERCISE = Exercise(
    id="reliability.2", function="resumable", title="What must be saved?", harness="reliability.resumed",
    draw=inputs.in_order(KINDS, drawn), handed_out=handed_out, named=named,
    checks=(
        own_work("resumable"),
        heard("resumable", needed),
        order(2, "steps", "it goes on after the last save", find_other_steps, wrong=STEPS),
        values(4, "weights", "the weights after each step, as if nothing had happened", without(), of=gone_on, rtol=0,
               atol=ATOL, wrong=WEIGHTS),
        order(1, "bits", "and to the bit", find_rounded, kind="value", wrong={"rounded a little": IS_ROUNDED}),
        order(2, "bytes", "little more than weights and moments is saved", find_more, kind="memory",
              wrong={"more than is needed": NOTHING_ELSE}),
    ),
)  # fmt: skip
