"""compression.7: which scheme for which model and cluster, and where: the fastest that keeps enough; on paper."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper

Job = dict[str, Any]
Plan = tuple[str, int]
NAMES = ("dense", "bf16", "top-k", "low rank")
GB = 1e9
NUMBERS = (
    "nodes", "cards", "inside, 0", "inside, 1", "across, 0", "across, 1", "layers", "rows", "columns", "kept", "rank",
    "hidden", "room", "least", "low_rank_delta", "work, bf16", "work, top-k", "work, low rank",
)  # fmt: skip

#: Nodes, cards of a node, rates inside and across in GB/s, layers, rows and columns of a matrix, the share that top-k
#: keeps, the rank, milliseconds of backward, GB that are free, and the least contraction.
KINDS = {
    "one node": (1, 8, 300, 25, 24, 4096, 4096, 0.01, 4, 200, 40, 0.0),
    "a fast network": (8, 8, 300, 50, 32, 4096, 11008, 0.01, 4, 400, 40, 0.0),
    "a slow network": (4, 8, 300, 0.5, 24, 2048, 8192, 0.01, 4, 60, 40, 0.0),
    "a wire between two": (2, 1, 300, 0.1, 12, 1024, 4096, 0.001, 32, 40, 40, 0.0),
    "no room for residuals": (4, 8, 300, 0.5, 24, 2048, 8192, 0.01, 4, 60, 0.9, 0.0),
    "no room at all": (4, 8, 300, 0.5, 24, 2048, 8192, 0.01, 4, 60, 0.01, 0.0),
    "little may be lost": (4, 8, 300, 0.5, 24, 2048, 8192, 0.01, 4, 60, 40, 0.05),
    "many cards": (64, 8, 300, 1, 24, 2048, 2048, 0.001, 16, 60, 40, 0.0),
}


def draw(rng: Rng) -> Cases:
    """Each kind, for each wrong theory a job in which what it chooses is not possible or clearly slower, for each
    number of a job two that differ there, and more."""
    cases = [case(kind, job_of(rng, *sizes)) for kind, sizes in KINDS.items()]
    cases += [case("told apart", choice.led_astray(rng, drawn, possible, wrong)) for wrong in WRONG]
    cases += [case("all but one alike", job) for job in choice.pairs(rng, drawn, possible, NUMBERS, is_share)]
    return cases + [case("drawn", drawn(rng)) for _ in range(30)]


def drawn(rng: Rng) -> Job:
    (rows, columns), rank = (256 * int(each) for each in rng.integers(2, 30, 2)), int(rng.choice([1, 2, 4, 16]))
    share = min(0.2, rank * (rows + columns) / rows / columns * float(np.exp(rng.uniform(-3, 0.5))))
    return job_of(
        rng, int(rng.choice([1, 2, 3, 4, 8, 32])), int(rng.choice([1, 2, 4, 8])), int(rng.integers(50, 450)),
        float(rng.choice([0.1, 0.5, 2, 5, 12, 25, 50])), int(rng.integers(4, 40)), rows, columns, share, rank,
        float(rng.choice([1, 20, 100, 400])), float(rng.choice([0.05, 0.2, 1, 5, 30])),
        float(rng.choice([0, 0.01, *2 * [round(rng.uniform(0.1, 0.4), 3)]])),
    )  # fmt: skip


def job_of(
    rng: Rng, nodes: int, cards: int, inside: float, across: float, layers: int, rows: int, columns: int, share: float,
    rank: int, milliseconds: float, room: float, least: float,
) -> Job:  # fmt: skip
    near = [float(rng.uniform(0.97, 1.03)) for _ in range(4)]
    slow = rng.choice([1, 1, 1, 30, 900], 2).tolist()  # to start a message
    usual = (8e-12, 5e-11, 5e-12 * (1 + rank))
    work = [float(f"{each * np.exp(rng.uniform(-2, 2)):.3g}") for each in usual]
    return {
        "nodes": nodes, "cards": cards, "inside": [5e-6 * slow[0], inside * GB * near[0]],
        "across": [5e-5 * slow[1], across * GB * near[1]],
        "layers": layers, "rows": rows, "columns": columns, "kept": int(share * layers * rows * columns), "rank": rank,
        "hidden": milliseconds / 1e3 * near[2], "room": room * GB * near[3], "least": least,
        "low_rank_delta": float(f"{rng.uniform(0.1, 0.4):.3g}"),
        "work": dict(zip(NAMES[1:], work, strict=True)),
    }  # fmt: skip


def case(kind: str, job: Job) -> Job:
    plans = [[*plan, cost] for plan, cost in possible(job).items()]
    return call(f"{kind}: {in_words(job)}", [job], some=True) | {"plans": plans}


def is_share(job: Job) -> bool:
    """Whether top-k keeps a fifth at most."""
    return bool(job["kept"] <= 0.2 * job["layers"] * job["rows"] * job["columns"])


def payload(job: Job, name: str, *, indices: bool = True) -> float:
    """Bytes of what a rank has to tell of the whole gradient."""
    rank, rows, columns = job["rank"], job["rows"], job["columns"]
    low_rank = job["layers"] * rank * (rows + columns)
    num_elements = job["layers"] * rows * columns
    sizes = {"dense": 4 * num_elements, "bf16": 2 * num_elements, "top-k": (4 + 4 * indices) * job["kept"]}
    return float(sizes.get(name, 4 * low_rank))


def seconds(
    job: Job, name: str, across: int, *, rides: bool = False, indices: bool = True, cut: bool = True,
    overlap: bool = True, works: bool = True, late: tuple[int, int] = (1, 1), hides_work: bool = False,
    all_of_it: bool = False,
) -> float:  # fmt: skip
    """Seconds that a step waits; `rides` adds up what does not, with `cut` a card compresses its part alone."""
    nodes, cards, full = job["nodes"], job["cards"], payload(job, "dense")
    inside, between, (gathers, rings) = job["inside"], job["across"], late

    def exchange(n: int, num_bytes: float, link: list[float]) -> float:
        if name == "top-k" and not rides:
            return (n - 1) * (gathers * link[0] + num_bytes / link[1])
        return 2 * (n - 1) * (rings * link[0] + num_bytes / n / link[1])

    num_bytes = payload(job, name, indices=indices)
    if across:
        transfer = 2 * (cards - 1) * (rings * inside[0] + full / cards / inside[1])
        transfer += exchange(nodes, num_bytes / (1 if all_of_it else cards), between)
    else:
        transfer = exchange(nodes * cards, num_bytes, between if nodes > 1 else inside)
    work = works * job["work"].get(name, 0) * full / 4 / (cards if across and cut else 1)
    hidden = job["hidden"] * overlap
    return max(0, work + transfer - hidden) if hides_work else work + max(0, transfer - hidden)


def fits(job: Job, name: str, across: int, *, cut: bool = True, always: bool = False) -> bool:
    """Whether what is left over has room, and whether enough is kept."""
    part = job["cards"] if (across or always) and cut else 1
    room = payload(job, "dense") / part if name in ("top-k", "low rank") else 0
    return room <= job["room"] and contraction(job, name) >= job["least"]


def contraction(job: Job, name: str) -> float:
    share = job["kept"] / (job["layers"] * job["rows"] * job["columns"])
    return float({"top-k": share, "low rank": job["low_rank_delta"]}.get(name, 1.0))


def possible(job: Job, seconds: Callable[..., float] = seconds, fits: Callable[..., bool] = fits) -> dict[Plan, float]:
    """The seconds of every scheme and place that fits; the place is 1 where it compresses between nodes alone."""
    plans = [(name, across) for name in NAMES for across in (0, 1) if fits(job, name, across)]
    return {plan: seconds(job, *plan) for plan in plans}


def worked(job: Job, name: str) -> dict[Plan, float]:
    """The same where compressing by one scheme takes no time."""
    return possible({**job, "work": {**job["work"], name: 0.0}})


FALSE: tuple[dict[str, Any], ...] = (
    {"rides": True}, {"indices": False}, {"cut": False}, {"overlap": False}, {"works": False}, {"late": (0, 0)},
    {"late": (0, 1)}, {"late": (1, 0)}, {"hides_work": True}, {"all_of_it": True},
)  # fmt: skip
WRONG: tuple[Callable[[Job], dict[Plan, float]], ...] = (
    *(partial(possible, seconds=partial(seconds, **each)) for each in FALSE),
    partial(possible, seconds=lambda job, *plan: seconds({**job, "rank": job["rank"] / job["layers"]}, *plan)),
    partial(possible, fits=lambda job, name, across: True),
    partial(possible, fits=partial(fits, cut=False)),
    partial(possible, fits=partial(fits, always=True)),
    partial(possible, fits=lambda job, *plan: fits({**job, "least": 0.0}, *plan)),
    partial(possible, fits=lambda job, *plan: fits({**job, "room": math.inf}, *plan)),
    partial(possible, fits=lambda job, name, across: not across and fits(job, name, across)),
    partial(possible, fits=lambda job, name, across: bool(across) and fits(job, name, across)),
    partial(possible, fits=lambda job, *plan: fits({**job, "least": job["least"] * (plan[0] != "top-k")}, *plan)),
    *(partial(worked, name=name) for name in NAMES[1:]),
)
"""Top-k added up on a ring, or without its indices; every card compresses all of it; nothing overlapped, no time for
compressing, no latency at all, of gathering or of rings, or compressing behind backward too; a card tells all of it;
factors of one layer; anything fits; residuals are not cut, all is kept, there is room; one place for all; top-k keeps
all; free work of one scheme."""

EXERCISE = on_paper(
    "compression.7", "choose_scheme", "Which scheme, and where?", draw,
    *choice.plans(
        "scheme, across", "s", names=NAMES, checks=("fits", "fastest"),
        words=("the scheme keeps enough, and has room", "no other that fits waits less"),
    ),
)  # fmt: skip
