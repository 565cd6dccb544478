"""mtp.3: which draft, and how long, on paper."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import mtp

NAMES = ("heads", "modules", "a small model")
Job = tuple[dict[str, Any], int, float]
Plans = dict[tuple[str, int], float]


def check_cost(k: int, batch: int, ridge: float) -> float:
    """The pass over k + 1 tokens of each of `batch` sequences, in passes over one."""
    return max(1.0, batch * (k + 1) / ridge) / max(1.0, batch / ridge)


def times(
    job: Job, *, check: Callable[..., float] = check_cost, chain: Any = None, paid: Any = None, most: int = 9
) -> Plans:
    """Passes that a token takes with each draft, by another theory of the check, the chain, or the guesses paid for."""
    drafts, batch, ridge = job
    chain = chain or (lambda shares: 1 + float(np.cumprod(shares).sum()))
    return {
        (name, k): (c + (paid(k, c) if paid else k) * of["cost"]) / chain(of["shares"][:k])
        for name, of in drafts.items() for k in range(1, min(most, len(of["shares"])) + 1)
        for c in [check(k, batch, ridge)]
    }  # fmt: skip


WRONG: tuple[dict[str, Any], ...] = (
    {"check": lambda *_: 1.0}, {"chain": lambda shares: mtp.accepted_tokens(shares[0], len(shares))},
    {"chain": lambda shares: mtp.accepted_tokens(float(np.mean(shares)), len(shares))}, {"paid": lambda k, _: 0},
    {"paid": lambda k, _: k + 1}, {"paid": lambda k, c: k * c}, {"chain": lambda shares: 1 + sum(shares)}, {"most": 5},
    {"check": lambda k, batch, ridge: 1.0 if batch * (k + 1) <= ridge else 99.0},
    {"check": lambda k, batch, _: check_cost(k, batch, 300)},
)  # fmt: skip
"""Mistakes that a job must tell apart: a check that costs one pass, the first share or the mean for all, guesses that
cost nothing, are one more or cost a check each, shares added, five at most, none beyond the ridge, 300 for it."""


def best(plans: Plans) -> tuple[str, int] | None:
    plan = min(plans, key=plans.__getitem__)
    return plan if plans[plan] < 1 else None


def drawn(rng: Rng) -> Job:
    found = {}
    for name, low, high in (("heads", 0.01, 0.15), ("modules", 0.02, 0.2), ("a small model", 0.02, 0.3)):
        first, falls = float(rng.uniform(0.4, 0.95)), float(rng.uniform(0.75, 1.02))
        most = int(rng.integers(2, 7))
        shares = [round(min(0.97, first * falls**j), 3) for j in range(most)]
        found[name] = {"shares": shares, "cost": round(float(rng.uniform(low, high)), 3)}
    return found, int(rng.choice([1, 8, 32, 64, 128])), float(rng.choice([100, 200, 300]))


def is_clear(plans: Plans) -> bool:
    """Whether the best is ahead of the next one, and of decoding without a draft, or behind it, by two parts in 100."""
    first, second = sorted(plans.values())[:2]
    return second > 1.02 * first and not 0.98 < first < 1.02


def draw(rng: Rng) -> Cases:
    """The task's example; for each mistake two jobs that it gets wrong; a batch for which no draft pays."""
    small = {"heads": {"shares": [0.7, 0.6, 0.5], "cost": 0.02}, "modules": {"shares": [0.85, 0.8], "cost": 0.05}}
    cases = [case("the example", (small, 1, 300.0))]
    for mistake in (*WRONG, *WRONG):
        while True:
            job = drawn(rng)
            plans = times(job)
            if is_clear(plans) and best(plans) and best(times(job, **mistake)) not in (best(plans), None):
                break
        cases.append(case("a cluster", job))
    for name, is_cheap in product(NAMES, (True, False)):  # its cost decides: another would be chosen at 0.06
        while True:
            drafts, batch, ridge = job = drawn(rng)
            plan, other = best(times(job)), drafts | {name: drafts[name] | {"cost": 0.06}}
            decides = is_clear(times(job)) and plan != best(times((other, batch, ridge)))
            if decides and (drafts[name]["cost"] < 0.06) == is_cheap:
                break
        cases.append(case("a cluster", job))
    drafts, _, _ = drawn(rng)
    return [*cases, case("a full card", (drafts, 800, 200.0)), case("a fuller card", (drafts, 999, 100.0))]


def case(name: str, job: Job) -> dict[str, Any]:
    plans = [[*plan, cost] for plan, cost in times(job).items() if cost < 1]
    drafts, batch, ridge = job
    words = f"{name}: {drafts}, {batch} sequences, {ridge:g} tokens"
    return call(words, [drafts, batch, ridge], some=bool(plans)) | {"plans": plans}


EXERCISE = on_paper(
    "mtp.3", "choose_draft", "Which draft, and how long?", draw,
    *choice.plans(
        "name, k", "passes a token", names=NAMES, checks=("faster", "fastest"),
        words=("the draft is faster than none, and None where no draft is", "no other draft is faster"),
    ),
)  # fmt: skip
