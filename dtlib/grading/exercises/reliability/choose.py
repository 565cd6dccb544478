"""reliability.4: where to save, how often, and how many spare nodes to keep, for what it costs; on paper."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper

Job = dict[str, Any]
Plan = tuple[str, int, int]
WAYS = ("stop", "background", "neighbour")
HOUR, GB, MORE = 3600.0, 1e9, 18
MINUTES = (2, 5, 10, 20, 40, 80, 160, 320, 640)
TAKEN: tuple[Job, ...] = ({"spares": 0}, {"spare_price": 1.0}, {"spare_price": 4.0}, {"link": 7e9}, {"link": 2.5e10})
below: Callable[[float, int], float] = lru_cache(4096)(  # a draw asks for the same a thousand times
    lambda mean, k: k and below(mean, k - 1) + math.exp(-mean + (k - 1) * math.log(mean) - math.lgamma(k))
)

#: Nodes, hours between failures of one, hours of a restart and of a repair, GB of a node, GB/s of the store, of a copy,
#: of a link, the part of the best goodput that will do.
KINDS = {
    "a small cluster": (16, 8000, 0.3, 24, 100, 20, 10, 12, 0.97),
    "a slow store": (256, 20000, 0.2, 48, 200, 10, 20, 25, 0.98),
    "thousands of nodes": (3000, 30000, 0.15, 72, 60, 200, 20, 25, 0.98),
    "repairs take weeks": (500, 20000, 0.2, 400, 80, 100, 20, 25, 0.95),
    "anything will do": (64, 10000, 0.5, 24, 100, 50, 10, 12, 0.6),
    "nothing but the best": (128, 15000, 0.3, 12, 150, 40, 20, 12, 0.9999),
    "nothing will do": (256, 20000, 0.2, 48, 200, 10, 20, 25, 1.01),
}


def draw(rng: Rng) -> Cases:
    """Each kind, for each wrong theory a job in which its plan will not do or costs more, and more."""
    cases = [case(kind, job_of(rng, *sizes)) for kind, sizes in KINDS.items()]
    cases += [case("told apart", choice.led_astray(rng, drawn, possible, wrong, 1.001)) for wrong in WRONG]
    return cases + [case("drawn", drawn(rng)) for _ in range(MORE)]


def drawn(rng: Rng) -> Job:
    """One that gets some work done."""
    while True:
        job = job_of(
            rng, int(rng.choice([16, 64, 256, 1024, 3000])), float(rng.choice([5000, 10000, 30000])),
            float(rng.choice([0.1, 0.3, 1])), float(rng.choice([12, 48, 200])), float(rng.choice([20, 80, 300])),
            float(rng.choice([10, 50, 300])), float(rng.choice([5, 20])), float(rng.choice([6, 25])),
            float(rng.choice([0.9, 0.97, 0.99, 0.999])),
        )  # fmt: skip
        if job["goal"] > 0.3:
            return job


def job_of(
    rng: Rng, nodes: int, mtbf: float, restart: float, repair: float, size: float, store: float, copy: float,
    link: float, share: float,
) -> Job:  # fmt: skip
    def about(number: float) -> float:
        return float(f"{number * rng.uniform(0.9, 1.1):.3g}")

    *prices, spare = (float(f"{each:.3g}") for each in np.exp(rng.uniform(-1.5, 2, 4)))
    job: Job = {
        "nodes": nodes, "node_mtbf": about(mtbf), "restart": about(restart), "repair": about(repair),
        "node_bytes": about(size) * GB, "store": about(store) * GB, "copy": about(copy) * GB, "link": about(link) * GB,
        "minutes": sorted(int(each) for each in rng.choice(MINUTES, 5, replace=False)),
        "prices": dict(zip(WAYS, prices, strict=True)), "spare_price": spare,
    }  # fmt: skip
    job["spares"] = int(out(job) + 3 * math.sqrt(out(job))) + int(rng.integers(1, 4))
    best = max(possible({**job, "goal": 0.0}, cost=goodput).values(), default=0.0)
    return job | {"goal": math.floor(share * best * 1e4) / 1e4}


def case(kind: str, job: Job) -> Job:
    plans = [[*plan, cost] for plan, cost in possible(job).items()]
    return call(f"{kind}: {in_words(job)}", [job], some=bool(plans)) | {"plans": plans}


def written(job: Job, way: str, *, nodes: bool = True) -> float:
    """Hours until what a node has to save is where it is safe; it is read back as fast."""
    rate = job["link"] if way == "neighbour" else job["store"] / (job["nodes"] if nodes else 1)
    return float(job["node_bytes"] / rate / HOUR)


def stops(job: Job, way: str) -> float:
    """Hours for which a save holds everybody up."""
    return written(job, way) if way == "stop" else float(job["node_bytes"] / job["copy"] / HOUR)


def out(job: Job) -> float:
    """The nodes that are out in the mean."""
    return float(job["nodes"] * job["repair"] / job["node_mtbf"])


def missing(job: Job, spares: int) -> float:
    """The chance that so many nodes or more are out, of a Poisson number of them."""
    return 1 - below(out(job), spares)


def goodput(
    job: Job, way: str, spares: int, minutes: int, *, written: Any = written, stops: Any = stops, reads: Any = None,
    missing: Any = missing, late: bool = True, restart: float = 1.0, nodes: bool = True, rare: bool = False,
    within: bool = False,
) -> float:  # fmt: skip
    """The part of the time that is work and not lost."""
    mtbf = job["node_mtbf"] / (job["nodes"] if nodes else 1)
    again = restart * job["restart"] + missing(job, spares) * job["repair"]
    again += (reads or written)(job, way) + (late and way != "stop") * written(job, way)
    whole = (work := max(0.0, minutes / 60 - within * stops(job, way))) + stops(job, way)
    if rare:
        return work / whole * (1 - (again + whole / 2) / mtbf)
    return work / mtbf * math.exp(-min(again / mtbf, 700.0)) / math.expm1(min(whole / mtbf, 700.0))


def price(job: Job, way: str, spares: int, minutes: int) -> float:
    return float(job["prices"][way] + spares * job["spare_price"])


def possible(
    job: Job, *, goal: Callable[[Job, dict[Plan, float]], float] = lambda job, found: float(job["goal"]),
    in_time: bool = True, cost: Callable[..., float] = price, **how: Any,
) -> dict[Plan, float]:  # fmt: skip
    """What each plan costs whose goodput is the goal at least."""
    found = {
        (way, spares, minutes): goodput(job, way, spares, minutes, **how)
        for way in WAYS for spares in range(job["spares"] + 1) for minutes in job["minutes"]
        if way == "stop" or not in_time or how.get("written", written)(job, way) <= minutes / 60
    }  # fmt: skip
    least = goal(job, found)
    return {plan: cost(job, *plan) for plan, part in found.items() if part >= least}


def only(job: Job, number: int, value: Any) -> dict[Plan, float]:
    return {plan: cost for plan, cost in possible(job).items() if plan[number] == value}


alone = partial(written, nodes=False)

WRONG: tuple[Callable[[Job], dict[Plan, float]], ...] = (
    partial(possible, goal=lambda job, found: max(found.values())),
    partial(possible, goal=lambda job, found: job["goal"] * max(found.values())),
    partial(possible, goal=lambda job, found: 0.0),
    partial(possible, in_time=False),
    partial(possible, missing=lambda job, spares: 0.0),
    partial(possible, missing=lambda job, spares: missing(job, spares + 1)),
    partial(possible, missing=lambda job, spares: missing({**job, "nodes": 1}, spares)),
    partial(possible, missing=lambda job, spares: max(0.0, 1 - spares / out(job))),
    partial(possible, written=alone, stops=lambda job, way: alone(job, way) if way == "stop" else stops(job, way)),
    partial(possible, stops=lambda job, way: stops(job, way) if way == "stop" else 0.0),
    partial(possible, stops=written),
    partial(possible, late=False),
    partial(possible, reads=lambda job, way: 0.0),
    partial(possible, reads=lambda job, way: written(job, way) if way != "neighbour" else stops(job, way)),
    partial(possible, within=True),
    partial(possible, restart=0.0),
    partial(possible, nodes=False),
    partial(possible, rare=True),
    lambda job: possible({**job, "minutes": job["minutes"][:1]}),
    *(lambda job, taken=taken: possible({**job, **taken}) for taken in TAKEN),
    lambda job: possible({**job, "spare_price": job["spare_price"] / job["nodes"]}),
    *(lambda job, way=way: possible({**job, "prices": {**job["prices"], way: 1.8}}) for way in WAYS),
    lambda job: only(job, 1, job["spares"]),
    *(partial(only, number=0, value=way) for way in WAYS),
)  # fmt: skip
"""The best goodput alone, a share of it, none; a save before the last is written; no spare
ever missing, one more at hand, of one node, by the mean; the store to each alone; nothing held up, or until all is
written; nothing lost meanwhile, nothing read back, from a neighbour a copy; saves in the interval; no restart; one
node's MTBF; rare failures; the shortest interval; what `TAKEN` says; other prices; all spares; one way for all."""

EXERCISE = on_paper(
    "reliability.4", "choose_saving", "Where to save, how often, and how many spares?", draw,
    *choice.plans(
        "way, spares, minutes", "of the price", names=WAYS, checks=("possible", "cheapest"),
        words=("the plan loses little enough", "no other that does costs less"),
    ),
)  # fmt: skip
