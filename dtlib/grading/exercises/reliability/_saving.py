"""What a plan of saving costs, and which part of the time it leaves for work; with what is wrong said by options."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

Job = dict[str, Any]
Plan = tuple[str, int, int]
WAYS = ("stop", "background", "neighbour")
HOUR = 3600.0
below: Callable[[float, int], float] = lru_cache(4096)(  # a draw asks for the same a thousand times
    lambda mean, k: k and below(mean, k - 1) + math.exp(-mean + (k - 1) * math.log(mean) - math.lgamma(k))
)


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
    missing: Any = missing, late: Sequence[str] = WAYS[1:], restart: float = 1.0, nodes: bool = True,
    rare: bool = False, within: bool = False, calm: bool = False,
) -> float:  # fmt: skip
    """The part of the time that is work and not lost."""
    mtbf = job["node_mtbf"] / (job["nodes"] if nodes else 1)
    again = restart * job["restart"] + (reads or written)(job, way) + (way in late) * written(job, way)
    again, stands = again + (not calm) * (wait := missing(job, spares) * job["repair"]), calm * wait
    whole = (work := max(0.0, minutes / 60 - within * stops(job, way))) + stops(job, way)
    if rare:
        return work / whole * (1 - (again + whole / 2) / mtbf)
    return work / (mtbf * math.exp(min(again / mtbf, 700.0)) + stands) / math.expm1(min(whole / mtbf, 300.0))


def price(job: Job, way: str, spares: int, minutes: int) -> float:
    return float(job["prices"][way] + spares * job["spare_price"])


def possible(
    job: Job, *, goal: Callable[[Job, dict[Plan, float]], float] = lambda job, found: float(job["goal"]),
    bound: Sequence[str] = WAYS[1:], slack: float = 0.0, cost: Callable[..., float] = price, **how: Any,
) -> dict[Plan, float]:  # fmt: skip
    """What each plan costs whose goodput is the goal at least."""
    found = {
        (way, spares, minutes): goodput(job, way, spares, minutes, **how)
        for way in WAYS for spares in range(job["spares"] + 1) for minutes in job["minutes"]
        if way not in bound or how.get("written", written)(job, way) <= minutes / 60 + slack * stops(job, way)
    }  # fmt: skip
    least = goal(job, found)
    return {plan: cost(job, *plan) for plan, part in found.items() if part >= least}
