"""planner.2: the seconds of a step in which a rank waits for messages, on links inside a node and across; on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper, values

PARTS = "tp, pp, dp"

#: dp, tp, pp, ranks of a node, and how long a micro-batch is, in times that the gradients need.
KINDS = (
    (4, 2, 1, 8, 0.3), (4, 2, 1, 4, 0.3), (2, 8, 2, 8, 3.0), (2, 8, 2, 4, 0.1), (8, 1, 1, 8, 1.4), (8, 1, 1, 4, 1.4),
    (2, 4, 8, 8, 0.6), (2, 2, 2, 8, 0.6), (2, 2, 2, 4, 0.6), (1, 2, 4, 8, 1.0), (1, 2, 4, 4, 1.0), (6, 1, 2, 4, 2.2),
    (3, 4, 2, 4, 1.2), (1, 1, 1, 8, 1.0), (2, 1, 4, 8, 0.2), (4, 2, 2, 2, 1.7),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind: every axis inside a node and across, of one rank too; hidden wholly, in part and not at all."""
    return [case(rng, *kind) for kind in rng.permutation(KINDS).tolist()]


def case(rng: Rng, dp: float, tp: float, pp: float, node: float, length: float) -> dict[str, Any]:
    job: dict[str, Any] = dict(zip(("dp", "tp", "pp", "node"), map(int, (dp, tp, pp, node)), strict=True))
    job |= {
        "inside": [float(rng.uniform(2, 8)) * 1e-6, float(rng.uniform(200, 450)) * 1e9],
        "across": [float(rng.uniform(10, 30)) * 1e-6, float(rng.uniform(12, 50)) * 1e9],
        "micro_batches": int(rng.integers(2, 17)), "layers": int(rng.integers(2, 12)),
        "activation_bytes": int(rng.integers(1, 200)) * 10**6, "weight_bytes": int(rng.integers(100, 4000)) * 10**6,
    }  # fmt: skip
    job["gradient_bytes"] = (4 if length < 1.5 else 1) * job["weight_bytes"]  # one sticks out, the other does not
    job["micro_seconds"] = length * phase(job, "dp", job["gradient_bytes"]) if dp > 1 else 0.1
    return call(in_words(job), [job])


def link(job: dict[str, Any], axis: str) -> tuple[float, float]:
    """α and B of the links that a group along `axis` needs: its ranks lie `stride` apart."""
    stride = {"tp": 1, "dp": job["tp"], "pp": job["tp"] * job["dp"]}[axis]
    alpha, rate = job["inside"] if stride * job[axis] <= job["node"] else job["across"]
    return float(alpha), float(rate)


def phase(job: dict[str, Any], axis: str, full_bytes: float) -> float:
    """Seconds of an all-gather or a reduce-scatter around a ring: (n−1)(α + D/(nB))."""
    alpha, rate = link(job, axis)
    return (job[axis] - 1) * (alpha + full_bytes / job[axis] / rate)


def seen(job: dict[str, Any]) -> list[float]:
    """The seconds of tp, pp and dp."""
    m, c = job["micro_batches"], job["micro_seconds"]
    alpha, rate = link(job, "pp")
    message = alpha + job["activation_bytes"] / job["tp"] / rate if job["pp"] > 1 else 0.0
    sticks_out = max(0.0, phase(job, "dp", job["gradient_bytes"]) - 2 * c / 3)
    sticks_out += max(0.0, phase(job, "dp", job["weight_bytes"]) - c / 3)
    return [8 * m * job["layers"] * phase(job, "tp", job["activation_bytes"]), 2 * m * message, sticks_out]


def right(case: Case) -> list[float]:
    return seen(case["arguments"][0])


of = partial(values, right=right, parts=PARTS, kind="traffic", atol=1e-12)
EXERCISE = on_paper(
    "planner.2", "seen_seconds", "What does a step wait for?", draw,
    of(3, "tp", "seconds that tensor parallelism is waited for", part=0),
    of(2, "pp", "seconds that messages between stages are waited for", part=1),
    of(3, "dp", "seconds of data parallelism that stick out", part=2),
)  # fmt: skip
