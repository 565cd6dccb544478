"""asynchrony.6: in step, without waiting, or steps alone: what hands in most gradients a second; on paper."""

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
NAMES = ("in step", "no waiting", "local steps")
MB, MORE = 1e6, 12

#: Workers, how many times slower one of them is, MB of the weights, MB/s of a link, servers, the rate as a share of the
#: largest in step, how far optima lie apart, how far the end may be off.
KINDS = {
    "all alike, a fast link": (8, 1.0, 50, 5000, 2, 0.5, 1.0, 1.0),
    "one is slow": (4, 6.0, 5, 5000, 4, 0.1, 5.0, 0.01),
    "one is slow, and the rate is large": (8, 6.0, 5, 5000, 4, 0.9, 5.0, 0.01),
    "a thin link": (4, 1.2, 200, 20, 2, 0.3, 1.0, 0.4),
    "a thin link, and data that differ": (4, 1.2, 200, 20, 1, 0.3, 9.0, 0.01),
    "two workers, one is slow": (2, 3.0, 10, 1000, 1, 0.4, 2.0, 0.05),
    "many servers": (16, 4.0, 100, 400, 16, 0.05, 4.0, 0.02),
    "one server": (16, 4.0, 100, 400, 1, 0.05, 4.0, 0.02),
}


def draw(rng: Rng) -> Cases:
    """Each kind, for each wrong theory a job in which what it chooses is not possible or clearly slower, and more."""
    cases = [case(kind, job_of(rng, *sizes)) for kind, sizes in KINDS.items()]
    cases += [case("told apart", choice.led_astray(rng, drawn, possible, wrong)) for wrong in WRONG]
    return cases + [case("drawn", drawn(rng)) for _ in range(MORE)]


def drawn(rng: Rng) -> Job:
    return job_of(
        rng, int(rng.choice([2, 3, 4, 8, 16])), float(rng.choice([1, 1.3, 2, 4, 8])),
        float(rng.choice([2, 10, 50, 200])), float(np.exp(rng.uniform(2.5, 8.5))), int(rng.choice([1, 1, 2, 4, 8])),
        float(np.exp(rng.uniform(-3.5, -0.1))), float(rng.choice([0.3, 2, 8])), float(np.exp(rng.uniform(-5, 1))),
    )  # fmt: skip


def job_of(
    rng: Rng, n: int, slower: float, size: float, link: float, servers: int, share: float, apart: float, off: float
) -> Job:
    times, curvatures = 0.1 * rng.uniform(0.9, 1.1, n), rng.uniform(0.2, 2.0, n)
    times[int(rng.integers(n))] *= slower
    rate = share * 2 / float(curvatures.max())
    return {
        "times": [float(f"{each:.3g}") for each in times], "full_bytes": size * MB * float(rng.uniform(0.97, 1.03)),
        "link": link * MB * float(rng.uniform(0.97, 1.03)), "servers": servers,
        "rate": float(f"{rate:.3g}"), "curvatures": [float(f"{each:.3g}") for each in curvatures],
        "optima": [float(f"{each:.3g}") for each in rng.normal(0, apart, n)], "off": float(f"{off:.2g}"),
        "local_steps": sorted(int(each) for each in rng.choice([2, 3, 5, 8, 16, 32, 64], 3, replace=False)),
    }  # fmt: skip


def case(kind: str, job: Job) -> Job:
    plans = [[*plan, 1000 * cost] for plan, cost in possible(job).items()]
    return call(f"{kind}: {in_words(job)}", [job], some=True) | {"plans": plans}


def ring(job: Job) -> float:
    n = len(job["times"])
    return 2 * (n - 1) / n * float(job["full_bytes"]) / float(job["link"])


def free(job: Job, servers: float, *, both_ways: bool = True, limit: bool = True, travel: bool = True) -> float:
    once = job["full_bytes"] / job["link"]
    rate = sum(1 / (t + travel * (1 + both_ways) * once) for t in job["times"])
    return float(1 / min(rate, servers / once if limit else math.inf))


def together(job: Job, steps: int = 1, *, slowest: bool = True, ring: Callable[[Job], float] = ring) -> float:
    """Seconds a gradient: the slowest, and its part of the ring after so many steps, over N."""
    times = np.array(job["times"])
    return float((times.max() if slowest else times.mean()) + ring(job) / steps) / len(times)


def is_stable(job: Job, *, delay: Callable[[int], int] = lambda n: n - 1) -> bool:
    """Whether the rate is below the largest that a delay of N − 1 updates bears, for the steepest worker."""
    tau = delay(len(job["times"]))
    return bool(job["rate"] < 2 * math.sin(math.pi / (4 * tau + 2)) / max(job["curvatures"]))


def by(factor: Callable[[Any], Any]) -> Callable[[Job, int], bool]:
    """Whether local steps end near the optimum where a step leaves this factor of ηλ."""

    def near(job: Job, steps: int) -> bool:
        steep, goals = np.array(job["curvatures"]), np.array(job["optima"])
        pulls = 1 - factor(job["rate"] * steep) ** steps
        end = (pulls * goals).sum() / pulls.sum()
        return bool(abs(end - (steep * goals).sum() / steep.sum()) <= job["off"])

    return near


is_near = by(lambda a: 1 - a)


def possible(
    job: Job, *, in_step: Any = together, free: Any = free, alone: Any = together, stable: Any = is_stable,
    near: Any = is_near,
) -> dict[Plan, float]:  # fmt: skip
    """Seconds a gradient of each way that will do; its number is the servers, or the steps alone, or 1."""
    plans: dict[Plan, float] = {("in step", 1): in_step(job)}
    if stable(job):
        plans["no waiting", job["servers"]] = free(job, job["servers"])
    return plans | {("local steps", h): alone(job, h) for h in job["local_steps"] if near(job, h)}


def once_around(job: Job, times: int = 1) -> float:
    return float(times * job["full_bytes"] / job["link"])


def mean(each: list[float]) -> list[float]:
    return [float(np.mean(each))] * len(each)


def to_the_mean(job: Job, steps: int) -> bool:
    """How far the mean of the optima is off, whatever the steps."""
    steep, goals = np.array(job["curvatures"]), np.array(job["optima"])
    return bool(abs(goals.mean() - (steep * goals).sum() / steep.sum()) <= job["off"])


twice_around = partial(once_around, times=2)
DELAYS: tuple[Callable[[int], int], ...] = (lambda n: 0, lambda n: 1, lambda n: n - 2, lambda n: n)

WRONG: tuple[Callable[[Job], dict[Plan, float]], ...] = (
    partial(possible, stable=lambda job: True),
    *(partial(possible, stable=partial(is_stable, delay=each)) for each in DELAYS),
    partial(possible, stable=lambda job: job["rate"] < 2 / max(job["curvatures"]) / len(job["times"])),
    partial(possible, stable=lambda job: is_stable({**job, "curvatures": mean(job["curvatures"])})),
    partial(possible, stable=lambda job: False),
    partial(possible, near=lambda job, steps: True),
    partial(possible, near=lambda job, steps: False),
    partial(possible, near=to_the_mean),
    partial(possible, near=by(lambda a: abs(1 - a))),
    partial(possible, near=by(lambda a: np.exp(-a))),
    partial(possible, free=partial(free, limit=False)),
    partial(possible, free=partial(free, both_ways=False)),
    partial(possible, free=partial(free, travel=False)),
    partial(possible, free=lambda job, servers: free({**job, "times": mean(job["times"])}, servers)),
    partial(possible, alone=lambda job, steps: together(job)),
    partial(possible, in_step=partial(together, ring=twice_around), alone=partial(together, ring=twice_around)),
    partial(possible, in_step=partial(together, slowest=False), alone=partial(together, slowest=False)),
    partial(possible, in_step=partial(together, ring=lambda job: 0.0)),
    partial(possible, in_step=partial(together, ring=once_around), alone=partial(together, ring=once_around)),
    lambda job: possible({**job, "optima": [0.0] * len(job["times"])}),
    partial(possible, free=lambda job, servers: free(job, 1)),
    *(partial(possible, free=lambda job, servers, some=some: free(job, some * servers)) for some in (0.5, 2)),
    partial(possible, free=lambda job, servers: free({**job, "link": servers * job["link"]}, 1)),
    partial(possible, near=lambda job, steps: all(is_near(job, h) for h in job["local_steps"] if h <= steps)),
    lambda job: {plan: cost for plan, cost in possible(job).items() if plan[1] != max(job["local_steps"])},
)
"""Any rate, that of no delay, of one update, N − 2, N, an N-th, of the mean curvature, none; any end, none, one for all
steps, with a factor of |1 − ηλ| or e^(−ηλ) a step; servers without a limit, one way, no way at all, the mean time;
a ring after each step, all of it there and back; the mean time in step; nothing sent, half a ring; one optimum; one
server's link, half of all, twice, all for each worker; no steps after some that end too far; few steps alone."""

EXERCISE = on_paper(
    "asynchrony.6", "choose_way", "In step, without waiting, or alone?", draw,
    *choice.plans(
        "way, number", "ms a gradient", names=NAMES, checks=("possible", "fastest"),
        words=("the way converges, and ends near enough", "no other that does hands in more gradients a second"),
    ),
)  # fmt: skip
