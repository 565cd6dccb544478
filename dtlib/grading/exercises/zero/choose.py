"""zero.8: the stage, and the ranks that share, that fit and send for the shortest time; on paper."""

from collections.abc import Callable
from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import collectives, zero

Plan = tuple[int, int]

#: Ranks a node, nodes, micro-batches, bytes of an element of each part, elements of a unit in a thousand, how many
#: times faster a node is inside, and the plan that has just room, with the bytes to spare (below 0: it has not).
KINDS = {
    "everything fits": (8, 1, 4, (4, 2, 8), 30, 9, (0, 1), 0),
    "not quite everything": (4, 1, 4, (4, 2, 8), 30, 9, (0, 1), -1),
    "states shared by a node": (8, 4, 8, (2, 2, 12), 30, 9, (1, 8), 0),
    "not quite by a node": (8, 4, 8, (2, 2, 12), 30, 5, (1, 8), -1),
    "states shared by all": (8, 8, 8, (2, 4, 12), 10, 12, (1, 64), 0),
    "a node twice as fast": (8, 4, 8, (2, 2, 12), 30, 2, (2, 32), 0),
    "a node little faster": (8, 8, 8, (2, 4, 12), 10, 3, (1, 64), 0),
    "not quite by all": (8, 8, 1, (2, 4, 12), 10, 12, (1, 64), -1),
    "gradients shared": (4, 4, 6, (2, 2, 12), 20, 4, (2, 16), 0),
    "a slow network": (8, 4, 4, (2, 2, 12), 50, 40, (3, 8), 0),
    "a network as fast as a node": (8, 4, 8, (2, 2, 12), 50, 1, (3, 8), -1),
    "a large unit": (8, 2, 4, (2, 4, 8), 400, 9, (3, 16), 0),
    "a large unit, two kinds of it": (8, 2, 3, (4, 2, 8), 300, 9, (2, 8), 0),
    "nodes of six": (6, 5, 4, (2, 2, 12), 30, 9, (3, 6), 0),
    "five of six": (6, 5, 4, (2, 2, 12), 30, 1, (3, 5), 0),
    "two nodes of five": (6, 5, 1, (2, 2, 12), 30, 9, (3, 12), 0),
    "many micro-batches": (8, 8, 32, (2, 2, 12), 20, 9, (1, 64), 0),
    "one micro-batch": (8, 8, 1, (2, 2, 12), 20, 3, (1, 64), 0),
    "a node alone, wide gradients": (8, 1, 4, (2, 4, 8), 30, 9, (1, 2), 0),
    "wide weights": (8, 4, 8, (4, 2, 8), 30, 9, (1, 4), 0),
    "everything fits, but across": (8, 4, 4, (4, 2, 8), 30, 9, (0, 1), 0),
    "everything fits, wide gradients": (8, 4, 4, (2, 4, 8), 30, 9, (0, 1), 0),
    "two nodes of six": (6, 2, 4, (4, 2, 8), 30, 1, (1, 4), 0),
    "half of a node": (6, 2, 4, (4, 2, 8), 30, 1, (1, 3), 1),
    "a node half as fast again": (4, 2, 4, (4, 2, 8), 30, 1.6, (1, 2), 0),
    "two ranks, wide weights": (2, 1, 4, (4, 2, 8), 30, 1, (0, 1), 0),
    "wide states": (8, 8, 4, (2, 2, 24), 30, 7, (1, 64), 0),
    "hopeless": (8, 4, 4, (2, 2, 12), 40, 9, (3, 32), -1),
}

RATES = {"many micro-batches": 200e9, "one micro-batch": 5e9}  # across: no other rate gives both answers


def draw(rng: Rng) -> Cases:
    """The task's model, each kind with a size and links of its own, and of each wrong theory a job that it errs in."""
    cases = [case("the task", 7 * 10**9, 2 * 10**8, 2, 2, 12, 8, 4, 450e9, 50e9, 8, 40 * 10**9)]
    for kind, (node, nodes, batches, widths, unit, faster, plan, spare) in KINDS.items():
        num_params = 1000 * node * nodes * int(rng.integers(30_000, 200_000))
        sizes = (num_params, unit * num_params // 1000, *widths)
        across = RATES.get(kind, float(f"{10 ** rng.uniform(9.3, 11.3):.3g}"))
        room = int(held_bytes(plan, *sizes)) + spare
        cases.append(case(kind, *sizes, node, nodes, faster * across, across, batches, room))
    for wrong in WRONG:
        job = choice.led_astray(rng, drawn, lambda job: possible(*job), wrong)
        cases.append(case("drawn", *job))
    return cases


def drawn(rng: Rng) -> tuple[Any, ...]:
    """A job in which some plan has room, and perhaps a little more."""
    node, nodes, batches = int(rng.choice([4, 6, 8])), int(rng.integers(1, 9)), int(rng.integers(1, 17))
    num_params = 1000 * node * nodes * int(rng.integers(30_000, 200_000))
    widths = [(2, 4, 8), (2, 4, 12), (4, 2, 8), (4, 2, 12)][rng.integers(4)]
    sizes = (num_params, int(rng.integers(10, 60)) * num_params // 1000, *widths)
    shared = (int(rng.integers(1, 4)), int(rng.choice([2, node, node * nodes])))
    across = float(f"{10 ** rng.uniform(9.3, 11.3):.3g}")
    inside = float(f"{across * 10 ** rng.uniform(0, 1.6):.3g}")
    return (*sizes, node, nodes, inside, across, batches, int(held_bytes(shared, *sizes) * rng.uniform(1.01, 1.3)))


def case(kind: str, *arguments: Any) -> dict[str, Any]:
    words = (
        "{}: {:,} parameters, {:,} in a unit, {} + {} + {} B, {} ranks in each of {} nodes, {:.3g} and {:.3g} B/s, "
        "micro-batches: {}, room for {:,} B"
    ).format(kind, *arguments)
    found = possible(*arguments)
    return call(words, arguments, some=bool(found)) | {"plans": [[*plan, seconds] for plan, seconds in found.items()]}


def held_bytes(plan: Plan, num_params: int, unit_params: int, weight: int, gradient: int, optimizer: int) -> float:
    """Bytes of a rank: its states, and of one unit the whole gradients (stages 2, 3) and weights (3)."""
    stage, group = plan
    unit = unit_params * (gradient * (stage >= 2) + weight * (stage >= 3))
    return num_params * zero.bytes_per_param(group, stage, weight, gradient, optimizer) + unit


def possible(
    num_params: int, unit_params: int, weight: int, gradient: int, optimizer: int, node: int, nodes: int,
    inside: float, across: float, batches: int, room: int,
    *, reduced: int | None = None, gathered: int | None = None,
) -> dict[Plan, float]:  # fmt: skip
    """The seconds for which a rank sends in an update, of every plan (stage, ranks that share) that fits.

    What is `reduced` and `gathered` has so many bytes an element, by default its own.
    """
    n, found = node * nodes, {}
    groups = [s for s in range(2, n + 1) if node % s == 0 or (s % node == 0 and n % s == 0)]
    for stage, s in ((0, 1), *((stage, s) for stage in (1, 2, 3) for s in groups)):
        if held_bytes((stage, s), num_params, unit_params, weight, gradient, optimizer) > room * (1 + 1e-12):
            continue
        times = (0, 1, batches, batches)[stage] * (reduced or gradient)
        times += (0, 1, 1, 2 * batches)[stage] * (gathered or weight)
        shared = times * collectives.ring_all_gather_bytes(num_params, s) / (inside if s <= node else across)
        replicas = collectives.ring_all_reduce_bytes(num_params * gradient / s, n // s)
        found[stage, s] = float(shared + replicas / (inside if nodes == 1 else across))
    return found


#: Sums as wide as weights, or of elements and not bytes, and weights as wide as gradients.
WRONG: tuple[Callable[[tuple[Any, ...]], dict[Plan, float]], ...] = (
    lambda job: possible(*job, reduced=job[2]), lambda job: possible(*job, reduced=1),
    lambda job: possible(*job, gathered=job[3]),
)  # fmt: skip
EXERCISE = on_paper(
    "zero.8", "fastest_stage", "Which stage for this cluster?", draw,
    *choice.plans(
        "stage, ranks that share", "s of sending", checks=("fits", "shortest"),
        words=("the plan is possible and fits, and is None where none does",
               "no plan that fits sends for a shorter time"),
    ),
)  # fmt: skip
