"""reliability.4: where to save, how often, and how many spare nodes to keep, for what it costs; on paper."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper

from ._saving import HOUR, WAYS, Job, Plan, missing, out, parts, possible, price, stops, written

GB, MORE = 1e9, 18
MINUTES = (2, 5, 10, 20, 40, 80, 160, 320, 640)
TAKEN: tuple[Job, ...] = ({"spares": 0}, {"spare_price": 1.0}, {"spare_price": 4.0}, {"link": 7e9}, {"link": 2.5e10})

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
    for name, jobs, wrongs in (("told apart", drawn, WRONG), ("often at a stand", frail, OFTEN)):
        cases += [case(name, choice.led_astray(rng, jobs, possible, wrong, 1.001)) for wrong in wrongs]
    return cases + [case("drawn", drawn(rng)) for _ in range(MORE)]


def drawn(rng: Rng) -> Job:
    """One that gets some work done, with so few nodes out that their number's chance is computed in any way."""
    while True:
        job = job_of(
            rng, int(rng.choice([16, 64, 256, 1024, 3000])), float(rng.choice([5000, 10000, 30000])),
            float(rng.choice([0.1, 0.3, 1])), float(rng.choice([12, 48, 200])), float(rng.choice([20, 80, 300])),
            float(rng.choice([10, 50, 300])), float(rng.choice([5, 20])), float(rng.choice([6, 25])),
            float(rng.choice([0.9, 0.97, 0.99, 0.999])),
        )  # fmt: skip
        if job["goal"] > 0.3 and out(job) < 80:
            return job


def frail(rng: Rng) -> Job:
    """One that fails each few hours, of which a save takes minutes, and so does its way to a neighbour."""
    least, most = np.log([[50, 2, 0.04, 0.004, 0.04], [200, 9, 0.5, 0.08, 0.5]])
    each, hours, store, copy, link = np.exp(rng.uniform(least, most))
    job = job_of(
        rng, 1024, 1024 * hours, 0.2, 8, each, 1024 * each / store / HOUR, each / copy / HOUR, each / link / HOUR,
        float(rng.uniform(0.4, 1)), intervals=int(rng.choice([2, 5])),
    )  # fmt: skip
    if len(job["minutes"]) == 2:
        job["prices"]["stop"] /= 10
    return job


def job_of(
    rng: Rng, nodes: int, mtbf: float, restart: float, repair: float, size: float, store: float, copy: float,
    link: float, share: float, intervals: int = 5,
) -> Job:  # fmt: skip
    def about(number: float) -> float:
        return float(f"{number * rng.uniform(0.9, 1.1):.3g}")

    *prices, spare = (float(f"{each:.3g}") for each in np.exp(rng.uniform(-1.5, 2, 4)))
    job: Job = {
        "nodes": nodes, "node_mtbf": about(mtbf), "restart": about(restart), "repair": about(repair),
        "node_bytes": about(size) * GB, "store": about(store) * GB, "copy": about(copy) * GB, "link": about(link) * GB,
        "minutes": sorted(int(each) for each in rng.choice(MINUTES, intervals, replace=False)),
        "prices": dict(zip(WAYS, prices, strict=True)), "spare_price": spare,
    }  # fmt: skip
    job["spares"] = int(out(job) + 3 * math.sqrt(out(job))) + int(rng.integers(1, 4))
    best = max(parts(job).values(), default=0.0)
    job["goal"] = math.floor(share * best * 1e4) / 1e4
    near = any(math.isclose(60 * written(job, way), each) for way in WAYS for each in job["minutes"])
    if near or any(math.isclose(each, job["goal"]) for each in parts(job).values()):
        return job_of(rng, nodes, mtbf, restart, repair, size, store, copy, link, share, intervals)  # else by rounding
    return job


def case(kind: str, job: Job) -> Job:
    plans = [[*plan, cost] for plan, cost in possible(job).items()]
    return call(f"{kind}: {in_words(job)}", [job], some=bool(plans)) | {"plans": plans}


def only(job: Job, number: int, value: object) -> dict[Plan, float]:
    return {plan: cost for plan, cost in possible(job).items() if plan[number] == value}


alone = partial(written, nodes=False)

WRONG: tuple[Callable[[Job], dict[Plan, float]], ...] = (
    partial(possible, goal=lambda job, found: max(found.values())),
    partial(possible, goal=lambda job, found: job["goal"] * max(found.values())),
    partial(possible, goal=lambda job, found: 0.0),
    partial(possible, bound=()),
    partial(possible, missing=lambda job, spares: 0.0 * spares),
    partial(possible, missing=lambda job, spares: missing(job, spares + 1)),
    partial(possible, missing=lambda job, spares: missing({**job, "nodes": 1}, spares)),
    partial(possible, missing=lambda job, spares: np.maximum(0.0, 1 - spares / out(job))),
    partial(possible, written=alone, stops=lambda job, way: alone(job, way) if way == "stop" else stops(job, way)),
    partial(possible, stops=lambda job, way: stops(job, way) if way == "stop" else 0.0),
    partial(possible, stops=written),
    partial(possible, late=()),
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
    partial(possible, cost=lambda job, way, spares, minutes: 1e6 * job["prices"][way] + spares),
    partial(possible, cost=lambda job, way, spares, minutes: 1e6 * spares + job["prices"][way]),
    partial(possible, cost=lambda job, way, spares, minutes: price(job, way, spares, 0) + spares * job["prices"][way]),
    lambda job: {plan: cost for plan, cost in possible(job).items() if plan[1]},
)  # fmt: skip
"""The best goodput alone, a share of it, none; a save before the last is written; no spare
ever missing, one more at hand, of one node, by the mean; the store to each alone; nothing held up, or until all is
written; nothing lost meanwhile, nothing read back, from a neighbour a copy; saves in the interval; no restart; one
node's MTBF; rare failures; the shortest interval; what `TAKEN` says; other prices; all spares; one way for all; the
cheapest way, the fewest spares; the price of a way for each spare; one spare at least."""

OFTEN = (
    *(partial(possible, late=ways) for ways in (WAYS, WAYS[1:2], WAYS[2:])),
    *(partial(possible, bound=ways) for ways in (WAYS, WAYS[1:2], WAYS[2:])),
    *(partial(possible, slack=slack) for slack in (1.0, -1.0)),
    partial(possible, calm=True),
)
"""What is on its way lost with all, one or the other; for these bound to the interval, of which a copy is a part, or
not; nothing fails while a repair is waited for."""

EXERCISE = on_paper(
    "reliability.4", "choose_saving", "Where to save, how often, and how many spares?", draw,
    *choice.plans(
        "way, spares, minutes", "of the price", names=WAYS, checks=("possible", "cheapest"),
        words=("the plan loses little enough", "no other that does costs less"),
        tells=lambda job, plan: f", which leaves {parts(job)[plan]:.7g} of the time",  # type: ignore[index]
    ),
)  # fmt: skip
