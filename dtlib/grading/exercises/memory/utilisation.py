"""memory.3: MFU and HFU, on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.grading.exercises.signs import instead

PAIR = "mfu, hfu"


def draw(rng: Rng) -> Cases:
    """A published run, and one for each kind of recompute, no two with the same sequence or the same card."""
    lengths, peaks = rng.permutation([2, 8, 32]), rng.permutation([312e12, 989e12, 2250e12])

    def job(recompute: str, length: int, peak: float) -> tuple[Any, ...]:
        num_layers, hidden = int(rng.integers(12, 100)), 128 * int(rng.integers(8, 96))
        num_params, seq = 12 * num_layers * hidden**2 + 50_000 * hidden, 1024 * length
        num_gpus = 8 * int(rng.integers(1, 65))
        needed = 6 * num_params + 12 * num_layers * hidden * seq
        tokens_per_s = round(float(rng.uniform(0.2, 0.6)) * num_gpus * peak / needed)
        return num_params, num_layers, hidden, seq, recompute, tokens_per_s, num_gpus, peak

    drawn = [
        (64862437376, 80, 8192, 2048, "full", 410 * 64, 64, 312e12),  # llm-foundry's MPT 70B
        *map(job, ("none", "selective", "full"), lengths.tolist(), peaks.tolist()),
    ]
    words = "{:,} parameters, {} layers of width {}, {} tokens a sequence, recompute {}, {:,} tokens/s on {} GPUs"
    return [call(words.format(*each), each) for each in drawn]


def right(case: Case) -> list[float]:
    """MFU and HFU: each product runs forward once and backward twice, and forward once more where it is recomputed."""
    num_params, num_layers, hidden, seq, recompute, tokens_per_s, num_gpus, peak = case["arguments"]
    forward = np.array([2.0 * num_params, 4.0 * num_layers * hidden * seq])  # products with parameters, of attention
    again = {"none": [0, 0], "selective": [0, 1], "full": [1, 1]}[recompute]
    passes = np.array([[3, 3], np.add(3, again)])
    return [float(each) for each in passes @ forward * tokens_per_s / (num_gpus * peak)]


TURNED = {"pair turned round": instead(lambda each: list(each.said[0]["answer"])[::-1], right)}

EXERCISE = on_paper(
    "memory.3", "utilisations", "Two utilisations", draw,
    values(2, "mfu", "the model FLOPs utilisation", right, part=0, parts=PAIR, wrong=TURNED),
    values(3, "hfu", "the hardware FLOPs utilisation", right, part=1, parts=PAIR, wrong=TURNED),
)  # fmt: skip
