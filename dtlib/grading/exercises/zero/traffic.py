"""zero.2: what each stage sends in a step, on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

PAIR = "gradient_bytes, weight_bytes"


def draw(rng: Rng) -> Cases:
    """Every stage with one micro-batch and with several, a power of two of ranks and none, wider gradients and wider
    weights; two ranks, and one."""
    cases = [case(10**9, 8, stage, 1, 2, 2) for stage in (1, 0, 3)]
    for stage in (0, 1, 2, 3):
        for micro_batches in (1, int(rng.integers(4, 9))):
            n = int(rng.choice([4, 8, 16, 64] if micro_batches == 1 else [3, 6, 12, 24]))
            widths = (4, 2) if (micro_batches == 1) == (stage % 2 == 0) else (2, 4)
            cases.append(case(int(rng.integers(10, 900)) * 10**6, n, stage, micro_batches, *widths))
    return [*cases, case(10**6, 2, 3, 5, 2, 4), case(10**6, 1, 3, 4, 2, 2)]


def case(*arguments: int) -> dict[str, Any]:
    words = "{:,} parameters, {} ranks, stage {}, {} micro-batches, gradients of {} B, weights of {} B"
    return call(words.format(*arguments), arguments)


def right(case: Case) -> list[float]:
    """Bytes of gradients and of weights: so many collectives, each of which sends (N−1)/N of a buffer."""
    num_params, n, stage, micro_batches, *widths = case["arguments"]
    reduces = (2, 1, micro_batches, micro_batches)[stage]
    gathers = (0, 1, 1, 2 * micro_batches)[stage]
    return [(n - 1) / n * times * num_params * width for times, width in zip((reduces, gathers), widths, strict=True)]


part = partial(values, right=right, parts=PAIR, kind="traffic", rtol=1e-4)  # remainders do not matter

EXERCISE = on_paper(
    "zero.2", "sent_bytes", "What a stage sends", draw,
    part(3, "gradients", "bytes of gradients that a rank sends", part=0),
    part(3, "weights", "bytes of weights that a rank sends", part=1),
)  # fmt: skip
