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
    (SLOW, 2, 2, 2, 4), (SLOW, 4, 1, 4, 8), (SLOW, 8, 1, 1, 2), (SLOW, 1, 2, 2, 6),
    (ACROSS, 2, 2, 2, 4), (ACROSS, 1, 8, 1, 3), (ACROSS, 2, 4, 4, 8),
    (EACH, 2, 2, 2, 4), (EACH, 8, 1, 1, 2), (EACH, 3, 2, 4, 12),
    (AGAIN, 2, 2, 2, 4), (AGAIN, 4, 1, 1, 2), (AGAIN, 1, 2, 4, 8),
    (FEW, 2, 2, 2, 4), (FEW, 1, 1, 4, 8), (FEW, 4, 2, 8, 16),
)  # fmt: skip
#: Rates inside and across and seconds of a micro-batch, so far apart that no other run's number will do: a slow machine
#: with nothing wrong, and a fast one with tp across; many bytes with nothing wrong, and few across. And the bytes of
#: dp, so few that all of them sent each time are less than another run's, and so many that once is more.
FAR: tuple[tuple[str, int, dict[str, float]], ...] = (
    (NOTHING, 4, {"inside": 100e9, "across": 12e9, "micro_seconds": 0.5}),
    (ACROSS, 4, {"inside": 900e9, "across": 115e9, "micro_seconds": 0.5}),
    (NOTHING, 64, {"inside": 900e9, "across": 100e9, "micro_seconds": 0.9}),
    (ACROSS, 2, {"inside": 200e9, "across": 20e9, "micro_seconds": 0.2}),
    (EACH, 4, {"dp_bytes": 10**6}), (NOTHING, 4, {"dp_bytes": 10**11}),
)  # fmt: skip
#: The slow rank on some dp, tp and pp, the first one and the last, and by which part of its work it is late: by little
#: among many, by much among few.
SLOWEST = {(2, 2, 2): (0, 0.6), (8, 1, 1): (-1, 0.3), (4, 1, 4): (-1, 0.5), (1, 2, 2): (2, 0.9)}


def draw(rng: Rng) -> Cases:
    """Each kind once, and each fault on a mesh that is drawn, in any order, with sizes of its own."""
    drawn = [(fault, *map(int, (*rng.integers(2, 5, 3), 2 * rng.integers(2, 9)))) for fault in FAULTS]
    rows = [(*kind, {}) for kind in (*KINDS, *drawn)] + [(fault, 2, 2, 2, m, fixed) for fault, m, fixed in FAR]
    return [case(rng, number, *rows[place]) for number, place in enumerate(rng.permutation(len(rows)), 1)]


def case(
    rng: Rng, number: int, kind: str, dp: int, tp: int, pp: int, m: int, fixed: dict[str, float]
) -> dict[str, Any]:
    run: dict[str, Any] = {
        "dp": dp, "tp": tp, "pp": pp, "micro_batches": m, "micro_seconds": float(rng.uniform(0.2, 0.9)),
        "inside": float(rng.uniform(200, 450)) * 1e9, "across": float(rng.uniform(20, 50)) * 1e9,
        "dp_bytes": int(rng.integers(1, 9)) * 10**8 if dp > 1 else 0,
    } | fixed  # fmt: skip
    waits = float(rng.uniform(0.4, 0.8)) * m * run["micro_seconds"] if tp > 1 else 0.0
    run["tp_bytes"] = round(waits * run["inside"])
    n = dp * tp * pp
    slow, late = SLOWEST.get((dp, tp, pp), (int(rng.integers(n)), float(rng.uniform(0.3, 0.9))))
    given = run | measured(rng, run, kind, slow % n, late, n)
    return call(told(number, given), [given]) | {"wrong": kind, "rank": slow % n if kind == SLOW else None}


def told(number: int, run: dict[str, Any]) -> str:
    """A run in numbers: its plan, and what the slowest rank and all others have measured."""
    plan = (
        "run {number}, on dp {dp}, tp {tp}, pp {pp}, {micro_batches} micro-batches of {micro_seconds:.3g} s, planned "
        "{tp_bytes:.3g} B of tp and {dp_bytes:.3g} B of dp at {inside:.3g} and {across:.3g} B/s; "
    ).format(number=number, **run)
    seconds = ", ".join(
        f"{name} {each.min():.3g} to {each.max():.3g} s" + f" (most on rank {each.argmax()})" * bool(each.any())
        for name, each in run["seconds"].items()
    )
    return plan + seconds + "".join(f", sent {axis} {each.max():.3g} B" for axis, each in run["sent"].items())


def measured(rng: Rng, run: dict[str, Any], kind: str, slow: int, late: float, n: int) -> dict[str, Any]:
    """Seconds and bytes of every rank in a step, within two per cent of what the fault makes of them."""
    m, c, pp = run["micro_batches"], run["micro_seconds"], run["pp"]
    computes = np.full(n, m * c * (4 / 3 if kind == AGAIN else 1))
    sent = {"tp": run["tp_bytes"] * (1.5 if kind == AGAIN else 1), "dp": run["dp_bytes"] * (m if kind == EACH else 1)}
    waits = sent["tp"] / run["across" if kind == ACROSS else "inside"]
    least = 1.001 if (kind, m) == (NOTHING, 64) else 0.99  # one run with nothing wrong is above its plan everywhere
    idle = np.full(n, (pp - 1) * (computes[0] + waits) / m * (2 if kind == FEW else 1))
    if kind == SLOW:
        idle[np.arange(n) != slow] += late * computes[0]
        computes[slow] *= 1 + late

    def near(values: Any) -> Array:
        return np.asarray(values * rng.uniform(least, 1.01, n))

    seconds = {"compute": near(computes), "tp": near(waits), "dp": near(sent["dp"] / run["across"]), "idle": near(idle)}
    return {"seconds": seconds, "sent": {axis: near(each) for axis, each in sent.items()}}


def right(case: Case) -> list[Any]:
    return [case["wrong"], case["rank"]]


of = by("wrong", right, parts=PARTS, kind="overlap")

EXERCISE = on_paper(
    "planner.4", "diagnose_run", "What slows this run?", draw,
    of(SLOW, NOTHING)(3, "slow", "a rank that computes for longer, and runs with nothing wrong", part=0),
    of(*FAULTS)(1, "rank", "which rank it is, if any", part=1),
    of(ACROSS, EACH, AGAIN, FEW)(4, "all", "what slows all ranks", part=0),
)  # fmt: skip
