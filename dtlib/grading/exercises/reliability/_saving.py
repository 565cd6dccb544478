"""What a plan of saving costs, and which part of the time it leaves for work; with what is wrong said by options."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array

Job = dict[str, Any]
Plan = tuple[str, int, int]
WAYS = ("stop", "background", "neighbour")
HOUR = 3600.0


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


def missing(job: Job, spares: Array) -> Array:
    """The chance that so many nodes or more are out, of a Poisson number of them."""
    mean, k = out(job), np.arange(max(1, spares.max()))
    each = np.exp(-mean + k * math.log(mean) - np.cumsum(np.log(np.maximum(k, 1))))
    return np.asarray(1 - np.concatenate([[0.0], np.cumsum(each)])[spares])


def goodput(
    job: Job, way: str, chance: Array, minutes: Array, *, written: Any = written, stops: Any = stops,
    reads: Any = None, late: Sequence[str] = WAYS[1:], restart: float = 1.0, nodes: bool = True, rare: bool = False,
    within: bool = False, calm: bool = False,
) -> Array:  # fmt: skip
    """The part of the time that is work and not lost, by the chance that a repair is waited for and by minutes."""
    mtbf, wait = job["node_mtbf"] / (job["nodes"] if nodes else 1), chance[:, None] * job["repair"]
    again = restart * job["restart"] + (reads or written)(job, way) + (way in late) * written(job, way)
    again, stands = again + (not calm) * wait, calm * wait
    work = np.maximum(0.0, minutes / 60 - within * stops(job, way))
    whole = work + stops(job, way)
    if rare:
        return np.asarray(work / whole * (1 - (again + whole / 2) / mtbf))
    often = mtbf * np.exp(np.minimum(again / mtbf, 700.0)) + stands
    return np.asarray(work / often / np.expm1(np.minimum(whole / mtbf, 300.0)))


def price(job: Job, way: str, spares: int, minutes: int) -> float:
    return float(job["prices"][way] + spares * job["spare_price"])


def parts(
    job: Job, *, bound: Sequence[str] = WAYS[1:], slack: float = 0.0, missing: Any = missing, **how: Any
) -> dict[Plan, float]:
    """The goodput of each plan; one of a way in `bound` writes a save before the next."""
    chance, found = missing(job, np.arange(job["spares"] + 1)), dict[Plan, float]()
    for way in WAYS:
        least = how.get("written", written)(job, way) - slack * stops(job, way) if way in bound else 0.0
        minutes = [each for each in job["minutes"] if least <= each / 60]
        rows = goodput(job, way, chance, np.array(minutes, int), **how).tolist()
        found |= {(way, n, each): part for n, row in enumerate(rows) for each, part in zip(minutes, row, strict=True)}
    return found


def possible(
    job: Job, *, goal: Callable[[Job, dict[Plan, float]], float] = lambda job, found: float(job["goal"]),
    cost: Callable[..., float] = price, **how: Any,
) -> dict[Plan, float]:  # fmt: skip
    """What each plan costs whose goodput is the goal at least."""
    found = parts(job, **how)
    least = goal(job, found)
    return {plan: cost(job, *plan) for plan, part in found.items() if part >= least}
