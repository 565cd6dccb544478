"""collectives.2: what a ring sends, on paper."""

from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import every
from dtlib.theory import collectives as theory
from dtlib.theory import units

PAIR = "sent_bytes, seconds"


def draw(rng: Rng) -> Cases:
    """The documents' sizes, one of them on two links; a few bytes that the ranks do not divide; 2 ranks, some that no
    power of two is, and 512."""
    drawn: list[tuple[int, int, float]] = [
        (64 * units.MiB, 8, 50 * units.GB),
        (64 * units.MiB, 8, 900 * units.GB),
        (200 * units.MB, 16, 100 * units.GB),
        (10, 4, 50 * units.GB),
    ]
    for n in (2, int(rng.choice([3, 5, 6, 7])), int(rng.choice([24, 64, 96])), 512):
        size = int(rng.integers(3, 900)) * int(rng.choice([units.MB, units.MiB]))
        drawn.append((size, n, float(rng.integers(10, 99)) * units.GB))
    words = "{:,} B, {} ranks, {}"
    return [
        call(words.format(size, n, units.format_rate(rate)), [size, n, rate], **{"two ranks": n == 2})
        for size, n, rate in drawn
    ]


def right(case: Case) -> list[float]:
    full_bytes, n, rate = case["arguments"]
    sent_bytes = theory.ring_all_reduce_bytes(full_bytes, n)
    return [sent_bytes, sent_bytes / rate]


def carried(observed: Observed) -> bool:
    """Whether the seconds follow from the bytes beside them."""
    sent_bytes, seconds = observed.said[0]["answer"]
    return bool(abs(seconds * observed.case["arguments"][2] / sent_bytes - 1) < 1e-6)


EXERCISE = on_paper(
    "collectives.2", "ring_on_paper", "What a ring sends, and how long that takes", draw,
    values(3, "bytes", "bytes sent by each rank", right, part=0, parts=PAIR, kind="traffic"),
    values(2, "seconds", "seconds on the link", right, part=1, parts=PAIR, wrong={"carried error": every(carried)}),
)  # fmt: skip
