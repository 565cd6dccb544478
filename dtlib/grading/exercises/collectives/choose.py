"""collectives.3: the all-reduce that is fastest on a cluster, and its seconds; on paper."""

from functools import cache, partial
from math import lcm
from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.theory import collectives, units

RING, DOUBLING, HALVING, TWO_LEVEL = NAMES = ("ring", "recursive_doubling", "halving_doubling", "two_level")
Job = tuple[Any, ...]
Shapes = tuple[tuple[int, int], ...]

POWERS: Shapes = ((2, 2), (4, 4), (8, 4), (2, 8), (4, 8), (8, 8))
FLAT: Shapes = ((1, 3), (1, 6), (1, 7), (1, 12), (5, 1), (12, 1))
OTHERS: Shapes = ((3, 2), (2, 6), (6, 4), (5, 8), (12, 2), (3, 3))

#: Nodes and ranks a node, and the algorithms that are to be fastest on some job each.
KINDS: tuple[tuple[Shapes, tuple[str, ...]], ...] = (
    (((1, 4), (1, 8), (1, 16), (4, 1), (16, 1)), (DOUBLING, HALVING)),
    (FLAT, (RING,)),
    (POWERS, (DOUBLING, HALVING, TWO_LEVEL)),
    (((2, 6), (4, 6), (8, 3)), (TWO_LEVEL,)),
    (((3, 2), (6, 4), (5, 8)), (TWO_LEVEL,)),
)

#: Wrong theories, told from the right one by two jobs each: keywords of `possible`.
WRONG: dict[str, dict[str, Any]] = {
    "no latency": {"latency": False}, "slow link everywhere": {"doublings": (1, 1)},
    "fast link everywhere": {"doublings": (0, 0)}, "quarters far away": {"half_far": False},
    "any number of ranks": {"power_of": (0, 0)}, "a power of nodes": {"power_of": (1, 0)},
    "a power of places": {"power_of": (0, 1)}, "the whole buffer across": {"whole": True},
}  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The task's cluster; jobs on one level and two for which each algorithm is the fastest; and jobs that tell each
    wrong theory from the right one. The fastest is so by a hundredth at least."""
    cases = [case((64 * units.MiB, 8, 8, [5e-6, 450e9], [1e-5, 50e9]))]
    for shapes, fastest in KINDS:
        for wanted in fastest:
            one = job(rng, shapes)
            while choice.fastest(possible(one)) != (wanted, 0):
                one = job(rng, shapes)
            cases.append(case(one))
    for theory in WRONG.values():
        for shapes in (FLAT, OTHERS) if "power_of" in theory else (POWERS, OTHERS if "whole" in theory else POWERS):
            told = choice.told_apart(rng, partial(job, shapes=shapes), possible, partial(possible, **theory))
            cases.append(case(told))
    return cases


def job(rng: Rng, shapes: Shapes) -> Job:
    """A buffer of a few KiB to a GiB, which all ranks divide; links across are slower, and their messages later."""
    nodes, node = shapes[int(rng.integers(len(shapes)))]
    size = nodes * node * int(2 ** rng.uniform(8, 27))
    inside = [float(rng.integers(2, 10)) * units.us, float(rng.integers(20, 900)) * units.GB]
    across = [inside[0] * float(rng.uniform(1.2, 5)), inside[1] / float(rng.uniform(1.5, 20))]
    return size, nodes, node, inside, [float(f"{each:.3g}") for each in across]  # as words tell them


def possible(
    job: Job, latency: bool = True, doublings: tuple[int, int] = (0, 1), half_far: bool = True,
    power_of: tuple[int, int] = (1, 1), whole: bool = False,
) -> choice.Possible:  # fmt: skip
    """(Seconds, algorithm, 0) of all that are possible; by the keywords, as others see it."""
    size, nodes, node, *links = job
    found = []
    for name in NAMES:
        is_power = (n := nodes ** power_of[0] * node ** power_of[1]) & (n - 1) == 0
        if (name in (DOUBLING, HALVING) and not is_power) or (name == TWO_LEVEL and 1 in (nodes, node)):
            continue
        inside, across = (links[each] for each in (doublings if name in (DOUBLING, HALVING) else (0, 1)))
        seconds = 0.0
        for near, far in rounds(name, nodes, node, half_far):
            here = ((near, inside), (far * (node if whole and name == TWO_LEVEL else 1), across))
            times = [
                latency * alpha + share * size / rate for share, (alpha, rate) in here if share
            ]  # fmt: skip
            seconds += max(times)
        found.append((seconds, name, 0))
    return found


@cache
def rounds(name: str, nodes: int, node: int, half_far: bool) -> list[tuple[float, float]]:
    """The longest messages of each round inside a node and across, as shares of the buffer, from the schedule."""
    n = nodes * node
    elements = lcm(n, 2 ** (n.bit_length() - 1))
    options = {"ranks_per_node": node} if name == TWO_LEVEL else {}
    found = []
    for transfers in collectives.schedule(f"{name}_all_reduce", elements, n, **options):
        longest = [0.0, 0.0]
        for each in transfers:
            far = each.source // node != each.target // node
            longest[far] = max(longest[far], (each.stop - each.start) / elements)
        found.append((longest[0], longest[1]))
    if name == HALVING and not half_far:  # the links of each journey in the other order
        half = len(found) // 2
        turned = [*reversed(found[:half]), *reversed(found[half:])]
        found = [(max(a) * (b[0] > 0), max(a) * (b[1] > 0)) for a, b in zip(found, turned, strict=True)]
    return found


def case(job: Job) -> dict[str, Any]:
    size, nodes, node, *links = job
    told = [f"{units.format_seconds(alpha)} and {units.format_rate(rate)}" for alpha, rate in links]
    words = f"{size:,} B, {nodes} × {node} ranks, inside {told[0]}, across {told[1]}"
    seconds, name, _ = min(possible(job))
    return call(words, job, **{"two levels": min(nodes, node) > 1}) | {"fastest": [name, seconds]}


def right(case: Case) -> Any:
    return case["fastest"]


of = partial(values, right=right, parts="algorithm, seconds")
EXERCISE = on_paper(
    "collectives.3", "fastest_all_reduce", "Which all-reduce for this cluster?", draw,
    of(1, "one level", "the fastest where all links are alike", part=0, where="not two levels"),
    of(2, "two levels", "the fastest on nodes of several ranks", part=0, where="two levels"),
    of(2, "seconds", "its seconds", part=1),
)  # fmt: skip
