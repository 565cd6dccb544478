"""planner.1: the bytes of a rank under a plan, part by part; on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

PARTS = "states, activations, logits, gathered"

#: dp, tp, pp, the stage that is asked about, the stage of ZeRO, micro-batches.
KINDS = (
    (8, 1, 1, 0, 0, 1), (8, 1, 1, 0, 3, 4), (4, 2, 1, 0, 1, 2), (1, 8, 1, 0, 0, 3), (3, 4, 1, 0, 2, 5),
    (4, 2, 4, 0, 1, 8), (4, 2, 4, 1, 2, 8), (4, 2, 4, 3, 1, 8), (6, 2, 4, 2, 3, 8), (2, 4, 4, 3, 3, 8),
    (4, 2, 4, 0, 1, 2), (4, 2, 4, 1, 1, 3), (1, 1, 8, 0, 0, 16), (1, 1, 8, 7, 0, 16), (5, 8, 2, 1, 2, 1),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Each kind with sizes of its own: both ends and the middle of a pipeline, fewer micro-batches than stages."""
    return [case(rng, *kind) for kind in rng.permutation(KINDS).tolist()]


def case(rng: Rng, dp: int, tp: int, pp: int, stage: int, zero: int, m: int) -> dict[str, Any]:
    hidden, layers = 1024 * int(rng.integers(2, 9)), pp * int(rng.integers(2, 9))
    job = {
        "dp": dp, "tp": tp, "pp": pp, "stage": stage, "zero": zero, "micro_batches": m,
        "micro_batch": int(rng.integers(1, 5)), "seq": 1024 * int(rng.integers(1, 9)), "hidden": hidden,
        "layers": layers, "layer_params": int(rng.integers(9, 17)) * hidden**2,
        "vocab": 1000 * int(rng.integers(30, 130)),
    }  # fmt: skip
    words = (
        f"dp {dp}, tp {tp}, pp {pp}, stage {stage}, ZeRO {zero}, {m} micro-batches of {{micro_batch}} × {{seq}}, "
        "{layers} layers of {layer_params:,} parameters, hidden {hidden}, vocab {vocab}"
    ).format(**job)
    return call(words, [job])


def right(case: Case) -> list[float]:
    """The bytes of each of `PARTS`."""
    (job,) = case["arguments"]
    dp, tp, pp, stage, zero, m = (job[name] for name in ("dp", "tp", "pp", "stage", "zero", "micro_batches"))
    layers, h, v = job["layers"] // pp, job["hidden"], job["vocab"]
    table = v * h * ((stage == 0) + (stage == pp - 1))
    own = (layers * job["layer_params"] + table) / tp
    per_param = sum(size / (dp if zero >= since else 1) for size, since in ((2, 3), (4, 2), (12, 1)))
    tokens = job["micro_batch"] * job["seq"]
    kept = 34 * tokens * h / tp * layers * min(pp - stage, m)
    logits = 8 * tokens * v / tp if stage == pp - 1 else 0.0
    return [own * per_param, kept, logits, 2 * 2 * job["layer_params"] / tp if zero == 3 else 0.0]


of = partial(values, right=right, parts=PARTS, kind="memory")
EXERCISE = on_paper(
    "planner.1", "plan_bytes", "What does a plan keep on a rank?", draw,
    of(3, "states", "bytes of the states", part=0), of(2, "activations", "bytes of what layers keep", part=1),
    of(2, "logits", "bytes of the logits and their gradient", part=2),
    of(1, "gathered", "bytes of gathered weights", part=3),
)  # fmt: skip
