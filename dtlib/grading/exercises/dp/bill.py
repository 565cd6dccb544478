"""dp.2: the bill of a step, on paper."""

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.theory import collectives as theory

PAIR = "effective_batch, sync_seconds"
GBIT = 10**9


def draw(rng: Rng) -> Cases:
    """The sources' numbers; 1 rank, 2, others and many; gradients of 1, 2 and 4 bytes; one micro-batch, many; few
    parameters, which the ranks do not divide."""
    params = [int(each) * 10**8 for each in rng.integers(1, 700, 3)]
    micro = [int(each) for each in rng.integers(2, 33, 3)]
    drawn = [
        (GBIT, 2, 8, 100 * GBIT, 32, 4),
        (GBIT, 2, 64, 100 * GBIT, 8, 2),
        (params[0], 4, 2, 25.0 * GBIT, micro[0], 1),
        (params[1], 2, int(rng.choice([3, 5, 6, 7])), int(rng.choice([200, 400])) * GBIT, micro[1], 3),
        (params[2], int(rng.choice([1, 4])), int(rng.choice([16, 96, 128])), 800 * GBIT, 1, int(rng.integers(5, 17))),
        (params[0], 1, 4, 10 * GBIT, micro[2], 2),
        (1001, 2, 4, 100 * GBIT, 5, 3),
        (params[1], 4, 2, 50 * GBIT, micro[0], 7),
        (params[0], 2, 1, 100 * GBIT, micro[1], 4),
    ]
    words = "{:,} parameters of {} B, {} ranks, {:,.0f} bit/s, {} samples a micro-batch, {} of them"
    return [call(words.format(*each), each, **{"two ranks": each[2] == 2}) for each in drawn]


def right(case: Case) -> list[float]:
    num_params, bytes_per_param, n, bits_per_s, micro_batch, accumulation = case["arguments"]
    seconds = theory.ring_all_reduce_seconds(num_params * bytes_per_param, n, 0.0, bits_per_s / 8)
    return [micro_batch * n * accumulation, seconds]


EXERCISE = on_paper(
    "dp.2", "bill_of_a_step", "The bill of a step", draw,
    values(2, "effective batch", "samples in one update", right, part=0, parts=PAIR),
    values(3, "sync time", "seconds for the sync", right, part=1, parts=PAIR, kind="traffic"),
)  # fmt: skip
