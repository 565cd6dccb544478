"""batch.7: ranks and their batch under a critical batch and a budget: the fewest days; on paper."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words, rounded
from dtlib.grading.exercises.kinds import on_paper

Job = dict[str, Any]
Plan = tuple[int, int]
Hours = Callable[[float], float]
MORE, NONE = 25, 3
NUMBERS = (
    "min_steps", "critical_batch", "largest", "ranks", "batches", "room", "pass_seconds", "sample_seconds",
    "gradient_bytes", "link", "price", "budget",
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """For each wrong theory a job in which what it chooses is not possible or clearly slower; for each number of a job
    two that differ there; some without a plan, and more."""
    cases = [case("told apart", choice.led_astray(rng, drawn, possible, wrong)) for wrong in WRONG]
    cases += [case("all but one alike", job) for job in choice.pairs(rng, drawn, possible, NUMBERS, is_clear)]
    cases += [case("nothing possible", without(rng)) for _ in range(NONE)]
    return cases + [case("drawn", drawn(rng)) for _ in range(MORE)]


def without(rng: Rng) -> Job:
    """A job whose budget buys no plan, though it nearly does."""
    job = drawn(rng)
    least = min(costs(job, *plan) for plan in possible({**job, "budget": math.inf}))
    return {**job, "budget": rounded(least * rng.uniform(0.8, 0.95))}


def drawn(rng: Rng) -> Job:
    """The budget is between what the cheapest plan costs and what the dearest does, or more; none hangs on rounding."""
    while True:
        first, times = int(rng.choice([1, 2, 3, 8])), int(rng.choice([2, 4]))
        ranks = [first * times**power for power in range(int(rng.integers(3, 6)))]
        batches = [2**power for power in range(int(rng.integers(4, 8)))]
        sample = rounded(np.exp(rng.uniform(-5, -1)))
        job: Job = {
            "min_steps": int(rng.integers(20, 900)) * 100, "critical_batch": rounded(np.exp(rng.uniform(2, 8))),
            "largest": int(rng.choice([ranks[-1] * batches[-1], ranks[-1] * batches[-3], ranks[1] * batches[-1]])),
            "ranks": [int(each) for each in rng.permutation(ranks)], "batches": batches,
            "room": int(rng.choice([batches[1], batches[2], batches[2] + 1, batches[-1]])),
            "pass_seconds": rounded(sample * rng.choice([0.2, 2, 6])), "sample_seconds": sample,
            "gradient_bytes": rounded(np.exp(rng.uniform(18, 24))),
            "link": [rounded(np.exp(rng.uniform(-12, -5))), rounded(np.exp(rng.uniform(21, 25)))],
            "price": rounded(rng.uniform(0.5, 6)),
        }  # fmt: skip
        plans = possible({**job, "budget": math.inf})
        prices = sorted(costs(job, *plan) for plan in plans)
        job["budget"] = rounded(prices[0] * (prices[-1] / prices[0]) ** rng.choice([0.2, 0.5, 0.8, 1.1]))
        if is_clear(job):
            return job


def is_clear(job: Job) -> bool:
    """Whether no plan costs nearly the budget."""
    prices = [costs(job, n, batch) for n in job["ranks"] for batch in job["batches"]]
    return all(abs(each / job["budget"] - 1) > 1e-3 for each in prices)


def case(kind: str, job: Job) -> Job:
    plans = possible(job)
    told = call(f"{kind}: {in_words(job)}", [job], some=bool(plans))
    return told | {"plans": [[*plan, days] for plan, days in plans.items()]}


def seconds(
    job: Job, n: int, batch: int, *, steps_by: str = "both", waits: bool = True, passes_by: str = "whole",
    passes_free: bool = False, each_pass: bool = False, latency: bool = True, once: bool = False,
    gathered: bool = False, own: bool = False, upside_down: bool = False, full_passes: bool = False,
) -> float:  # fmt: skip
    """Seconds of the run; what is named has another sync, other passes, or other steps."""
    (alpha, rate), full, room = job["link"], job["gradient_bytes"], job["room"]
    sync = (1 if once else 2) * (n - 1) * (alpha * latency + full / (1 if gathered else n) / rate) * waits
    passes = {"whole": -(-batch // room), "one": 1, "even": batch / room, "full": max(1, batch // room)}[passes_by]
    samples = passes * min(batch, room) if full_passes else batch
    work = passes * job["pass_seconds"] * (not passes_free) + samples * job["sample_seconds"]
    ratio = job["critical_batch"] / (batch if own else n * batch)
    steps = {"both": 1 + (1 / ratio if upside_down else ratio), "least": 1.0, "samples": ratio}[steps_by]
    return float(job["min_steps"] * steps * (work + sync * (passes if each_pass else 1)))


def costs(job: Job, n: int, batch: int, time: Callable[..., float] = seconds, hours: Hours = float) -> float:
    return float(hours(time(job, n, batch) / 3600) * n * job["price"])


def possible(job: Job, time: Callable[..., float] = seconds, fits: Callable[..., bool] | None = None,
             goal: Callable[..., float] | None = None) -> dict[Plan, float]:  # fmt: skip
    """The days of each plan that is possible; `fits` has another rule, `goal` something else that is to be least."""
    plans = [(n, batch) for n in job["ranks"] for batch in job["batches"]]
    fits = fits or (lambda job, n, batch: allowed(job, n, batch) and costs(job, n, batch, time) <= job["budget"])
    return {plan: (goal or time)(job, *plan) / 86400 for plan in plans if fits(job, *plan)}


def within(job: Job, n: int, batch: int, hours: Hours = float) -> bool:
    return costs(job, n, batch, hours=hours) <= job["budget"]


def allowed(job: Job, n: int, batch: int) -> bool:
    return bool(n * batch <= job["largest"])


FALSE: tuple[dict[str, Any], ...] = (
    {"steps_by": "least"}, {"steps_by": "samples"}, {"waits": False}, {"passes_by": "one"}, {"passes_free": True},
    {"each_pass": True}, {"latency": False}, {"once": True}, {"gathered": True}, {"own": True}, {"upside_down": True},
    {"passes_by": "even"}, {"passes_by": "full"}, {"full_passes": True},
)  # fmt: skip
WRONG: tuple[Callable[[Job], dict[Plan, float]], ...] = (
    *(partial(possible, time=partial(seconds, **each)) for each in FALSE),
    partial(possible, fits=allowed),
    partial(possible, fits=within),
    partial(possible, goal=costs),
    partial(possible, goal=lambda job, n, batch: -n * batch),
    partial(possible, goal=lambda job, n, batch: -n),
    partial(possible, goal=lambda job, n, batch: abs(math.log(n * batch / job["critical_batch"]))),
    partial(
        possible, fits=lambda job, n, batch: within(job, n, batch) and batch <= min(job["room"], job["largest"] / n)
    ),
    partial(possible, fits=lambda job, n, batch: allowed(job, n, batch) and costs(job, n, batch) <= n * job["budget"]),
    partial(possible, fits=lambda job, n, batch: within(job, n, batch) and n * batch < job["largest"]),
    partial(possible, fits=lambda job, n, batch: allowed(job, n, batch) and within(job, n, batch, math.ceil)),
    partial(possible, fits=lambda job, n, batch: allowed(job, n, batch) and within(job, n, batch, math.floor)),
)
"""Wrong steps, passes and syncs; no budget, no largest batch; the cheapest, the largest batch, the most ranks, the
batch nearest to the critical one; one pass alone, the price of one rank, a batch below the largest; whole hours."""

EXERCISE = on_paper(
    "batch.7", "choose_batch", "How many ranks, and how many days?", draw,
    *choice.plans(
        "ranks, samples of a rank", "days", checks=("possible", "fastest"),
        words=("the plan is possible, and None where none is", "no other that is possible takes fewer days"),
        tells=lambda job, plan: f", {plan[0] * plan[1]} samples in a step, at a cost of {costs(job, *plan):.5g}",
    ),
)  # fmt: skip
