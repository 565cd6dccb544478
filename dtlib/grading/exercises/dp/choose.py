"""dp.7: ranks, micro-batch and accumulation that fit, are in time, and take the fewest rank-seconds; on paper."""

import math
from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import collectives, dp

Plan = tuple[int, int, int]

#: Ranks a node, nodes, global batch, samples for which a rank has room, and those that take as much as its states;
#: how long a pass and sending a gradient inside a node take, both in times of a sample; how many times faster a node is
#: inside; and the ranks and micro-batch whose seconds, so many times, are the deadline.
KINDS = (
    (8, 8, 240, 5, 2, 1, 5, 9, (24, 2), 1), (4, 4, 144, 4, 2, 3, 1, 20, (12, 1), 1),
    (4, 4, 192, 7, 20, 0.1, 50, 1, (16, 3), 1.02), (1, 6, 100, 4, 2, 10, 1, 4, (2, 2), 1.02),
    (4, 4, 240, 8, 2, 3, 0.2, 4, (12, 5), 1), (6, 2, 180, 12, 20, 0.5, 20, 20, (2, 10), 1.05),
    (8, 4, 48, 2, 2, 3, 1, 9, (16, 1), 1.02), (1, 6, 90, 8, 2, 0.1, 1, 2, (1, 6), 1.02),
    (1, 6, 60, 12, 5, 10, 5, 4, (3, 10), 1.02), (6, 3, 180, 7, 5, 10, 0.2, 4, (18, 2), 1.2),
    (1, 6, 60, 4, 20, 0.1, 0.2, 1, (2, 2), 1.2), (5, 4, 240, 16, 20, 1, 50, 2, (10, 4), 1),
    (4, 4, 128, 5, 2, 0.1, 20, 2, (16, 4), 1.02), (8, 4, 128, 12, 20, 10, 20, 1, (8, 2), 1.2),
    (8, 2, 96, 6, 20, 0, 1, 4, (8, 2), 1.2), (6, 2, 72, 4, 5, 0, 5, 9, (6, 3), 1.02),  # passes for free
    (8, 1, 48, 12, 5, 0.1, 0.2, 9, (8, 6), 1.45),  # six ranks of a node of eight would do, and be cheaper
    # nothing in time, the whole batch at once, no room for a sample
    (4, 4, 96, 6, 5, 1, 1, 9, (16, 6), 0.9), (4, 4, 7, 7, 5, 1, 1, 4, (1, 7), 1.2), (8, 1, 8, 0, 5, 1, 1, 9, (8, 1), 2),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind with a model and seconds of its own, in any order."""
    return [case(rng, *KINDS[kind]) for kind in rng.permutation(len(KINDS))]


def case(
    rng: Rng, node: int, nodes: int, batch: int, room: int, states: int, a_pass: float, sync: float, faster: float,
    plan: tuple[int, int], times: float,
) -> dict[str, Any]:  # fmt: skip
    sample, sample_bytes = float(rng.uniform(0.05, 0.5)), int(rng.integers(10, 2000)) * 10**6
    job = {
        "global_batch": batch, "ranks_per_node": node, "num_nodes": nodes, "room": (states + room) * sample_bytes,
        "state_bytes": states * sample_bytes, "sample_bytes": sample_bytes, "pass_seconds": a_pass * sample,
        "sample_seconds": sample, "gradient_bytes": int(rng.integers(1000, 30_000)) * 10**6,
    }  # fmt: skip
    job["inside"] = job["gradient_bytes"] / (sync * sample)
    job["across"] = job["inside"] / faster
    job["deadline"] = seconds(job, (*plan, batch // plan[0] // plan[1])) * times * (1 + 1e-9)
    found = possible(job)
    return call(in_words(job), [job], some=bool(found)) | {"plans": [[*each, cost] for each, cost in found.items()]}


def seconds(job: dict[str, Any], plan: Plan) -> float:
    """The passes of an update, one after the other, and one all-reduce."""
    n, micro_batch, accumulation = plan
    sync = collectives.two_level_all_reduce_seconds(
        job["gradient_bytes"], n, 0.0, job["inside"],
        ranks_per_node=min(n, job["ranks_per_node"]), slow_link_bytes_per_s=job["across"],
    )  # fmt: skip
    return accumulation * float(job["pass_seconds"] + micro_batch * job["sample_seconds"]) + sync


def possible(job: dict[str, Any]) -> dict[Plan, float]:
    """The rank-seconds of every plan that is exact, fits and is in time."""
    node, batch, found = job["ranks_per_node"], job["global_batch"], {}
    for n in (k for k in range(1, node * job["num_nodes"] + 1) if node % k == 0 or k % node == 0):
        for micro_batch in range(1, (job["room"] - job["state_bytes"]) // job["sample_bytes"] + 1):
            plan = n, micro_batch, max(1, batch // n // micro_batch)
            if dp.effective_batch(micro_batch, n, plan[2]) == batch and seconds(job, plan) <= job["deadline"]:
                found[plan] = n * seconds(job, plan)
    return found


def tells(job: dict[str, Any], plan: Plan) -> str:
    if plan[0] > (most := job["ranks_per_node"] * job["num_nodes"]):
        return f", {plan[0]} of {most} ranks"
    needed = job["state_bytes"] + plan[1] * job["sample_bytes"]
    return f", {math.prod(plan)} samples in {seconds(job, plan):.4g} s, of {needed:.4g} bytes a rank"


EXERCISE = on_paper(
    "dp.7", "cheapest_plan", "How many ranks, and how large a micro-batch?", draw,
    *choice.plans(
        "ranks, micro-batch, accumulation", "rank-seconds", checks=("possible", "cheapest"),
        words=(
            "the plan is exact, fits and is in time, and is None where none is",
            "no other takes fewer rank-seconds",
        ), tells=tells,
    ),
)  # fmt: skip
