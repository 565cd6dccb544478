"""planner.4: what is wrong with a slow run, by its bytes, its timeline and its plan; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import by, on_paper

PARTS = "what, rank"
FAULTS = NOTHING, SLOW, ACROSS, EACH, AGAIN, FEW = (
    "nothing wrong", "slow rank", "tp across nodes", "each micro-batch", "computed again", "few micro-batches",
)  # fmt: skip

#: What is wrong, dp, tp, pp, micro-batches.
KINDS = (
    (NOTHING, 2, 2, 2, 4), (NOTHING, 4, 1, 4, 8), (NOTHING, 1, 4, 1, 2), (NOTHING, 3, 2, 1, 5),
    (SLOW, 2, 2, 2, 4), (SLOW, 4, 1, 4, 8), (SLOW, 8, 1, 1, 2), (SLOW, 1, 4, 2, 6),
    (ACROSS, 2, 2, 2, 4), (ACROSS, 1, 8, 1, 3), (ACROSS, 2, 4, 4, 8),
    (EACH, 2, 2, 2, 4), (EACH, 8, 1, 1, 2), (EACH, 3, 2, 4, 12),
    (AGAIN, 2, 2, 2, 4), (AGAIN, 4, 1, 1, 2), (AGAIN, 1, 2, 4, 8),
    (FEW, 2, 2, 2, 4), (FEW, 1, 1, 4, 8), (FEW, 4, 2, 8, 16),
)  # fmt: skip
#: Rates inside and across, micro-batches and seconds of one, so far apart that no other run's number will do: a slow
#: machine with nothing wrong, and a fast one with tp across; many bytes with nothing wrong, and few across.
FAR = (
    (NOTHING, 100e9, 12e9, 4, 0.5),
    (ACROSS, 900e9, 115e9, 4, 0.5),
    (NOTHING, 900e9, 100e9, 64, 0.9),
    (ACROSS, 200e9, 20e9, 2, 0.2),
)
#: The bytes of dp, so few that all of them sent each time are less than another run's, and so many that once is more.
FAR_BYTES = ((EACH, 10**6), (NOTHING, 10**11))
#: The slow rank on some dp, tp and pp: the first one, and the last.
ENDS = {(2, 2, 2): 0, (8, 1, 1): -1}


def draw(rng: Rng) -> Cases:
    """Each kind once, and each fault on a mesh that is drawn, in any order, with sizes of its own."""
    drawn = [(fault, *map(int, (*rng.integers(2, 5, 3), 2 * rng.integers(2, 9)))) for fault in FAULTS]
    kinds = [*KINDS, *drawn]
    rows: list[tuple[Any, dict[str, float]]] = [(kind, {}) for kind in kinds]
    rows += [
        ((fault, 2, 2, 2, m), {"inside": near, "across": far, "micro_seconds": c}) for fault, near, far, m, c in FAR
    ]
    rows += [((fault, 2, 2, 2, 4), {"dp_bytes": few_or_many}) for fault, few_or_many in FAR_BYTES]
    return [case(rng, number, *rows[place][0], **rows[place][1]) for number, place in
            enumerate(rng.permutation(len(rows)), 1)]  # fmt: skip


def case(rng: Rng, number: int, kind: str, dp: int, tp: int, pp: int, m: int, **fixed: float) -> dict[str, Any]:
    run: dict[str, Any] = {
        "dp": dp, "tp": tp, "pp": pp, "micro_batches": m, "micro_seconds": float(rng.uniform(0.2, 0.9)),
        "inside": float(rng.uniform(200, 450)) * 1e9, "across": float(rng.uniform(20, 50)) * 1e9,
        "dp_bytes": int(rng.integers(1, 9)) * 10**8 if dp > 1 else 0,
    } | fixed  # fmt: skip
    waits = float(rng.uniform(0.4, 0.8)) * m * run["micro_seconds"] if tp > 1 else 0.0
    run["tp_bytes"] = round(waits * run["inside"])
    n = dp * tp * pp
    slow = ENDS.get((dp, tp, pp), int(rng.integers(n))) % n if kind == SLOW else None
    given = run | measured(rng, run, kind, slow, n)
    return call(told(number, given), [given]) | {"wrong": kind, "rank": slow}


def told(number: int, run: dict[str, Any]) -> str:
    """A run in numbers: its plan, and what the slowest rank and all others have measured."""
    plan = (
        "run {number}, on dp {dp}, tp {tp}, pp {pp}, {micro_batches} micro-batches of {micro_seconds:.3g} s, planned "
        "{tp_bytes:.3g} B of tp and {dp_bytes:.3g} B of dp at {inside:.3g} and {across:.3g} B/s; "
    ).format(number=number, **run)
    seconds = ", ".join(f"{name} {each.min():.3g} to {each.max():.3g} s" for name, each in run["seconds"].items())
    return plan + seconds + "".join(f", sent {axis} {each.max():.3g} B" for axis, each in run["sent"].items())


def measured(rng: Rng, run: dict[str, Any], kind: str, slow: int | None, n: int) -> dict[str, Any]:
    """Seconds and bytes of every rank in a step, within two per cent of what the fault makes of them."""
    m, c, pp = run["micro_batches"], run["micro_seconds"], run["pp"]
    computes = np.full(n, m * c * (4 / 3 if kind == AGAIN else 1))
    sent = {"tp": run["tp_bytes"] * (1.5 if kind == AGAIN else 1), "dp": run["dp_bytes"] * (m if kind == EACH else 1)}
    waits = sent["tp"] / run["across" if kind == ACROSS else "inside"]
    idle = np.full(n, (pp - 1) * (computes[0] + waits) / m * (2 if kind == FEW else 1))
    if slow is not None:
        late = float(rng.uniform(0.3, 0.9)) * computes[0]
        computes[slow] += late
        idle[np.arange(n) != slow] += late

    def near(values: Any) -> Array:
        return np.asarray(values * rng.uniform(0.99, 1.01, n))

    seconds = {"compute": near(computes), "tp": near(waits), "dp": near(sent["dp"] / run["across"]), "idle": near(idle)}
    return {"seconds": seconds, "sent": {axis: near(each) for axis, each in sent.items()}}


def right(case: Case) -> list[Any]:
    return [case["wrong"], case["rank"]]


of = by("wrong", right, parts=PARTS, kind="overlap")

EXERCISE = on_paper(
    "planner.4", "diagnose_run", "What slows this run?", draw,
    of(SLOW, NOTHING)(3, "slow", "a rank that computes for longer, and runs with nothing wrong", part=0),
    of(SLOW)(1, "rank", "which rank it is", part=1),
    of(ACROSS, EACH, AGAIN, FEW)(4, "all", "what slows all ranks", part=0),
)  # fmt: skip
