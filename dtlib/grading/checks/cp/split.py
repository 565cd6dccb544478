"""cp.2: the fastest way to split a long sequence, and over how many ranks; on paper."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading import choice
from dtlib.grading.inputs import Cases, Rng, call
from dtlib.grading.kinds import on_paper

WAYS = ("none", "contiguous", "zigzag", "ulysses")
WIDTH = 2  # bytes of an element


class Job(NamedTuple):
    """What the function is called with."""

    seq: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    degrees: list[int]
    most_tokens: int
    flops_per_s: float
    link_bytes_per_s: float


def work(job: Job, c: int) -> float:
    """Seconds of a c-th of a rank's share: what it computes in a round if all compute as much."""
    return 2 * job.seq**2 * job.num_heads * job.head_width / c**2 / job.flops_per_s


def send(job: Job, c: int) -> float:
    """Seconds of a block of keys and values."""
    return 2 * WIDTH * job.seq / c * job.num_kv_heads * job.head_width / job.link_bytes_per_s


def contiguous(job: Job, w: float, x: float, c: int) -> float:
    """The last rank computes half a block, then whole ones; the others wait for it, and all for the link."""
    return max(w, x) + (c - 2) * max(2 * w, x) + 2 * w


def zigzag(job: Job, w: float, x: float, c: int) -> float:
    return (c - 1) * max(w, x) + w


def exchanged(job: Job, c: int) -> float:
    """Entries of a token that Ulysses sends: of its query, keys, values and output, all but what stays."""
    return (c - 1) / c * 2 * (job.num_heads + job.num_kv_heads) * job.head_width


def can(job: Job, way: str, c: int) -> bool:
    """Whether tokens, chunks and heads can be cut so, and a rank has room for its tokens."""
    whole = {"none": c == 1, "zigzag": job.seq % (2 * c) == 0, "ulysses": job.num_kv_heads % c == 0}.get(way, True)
    return whole and (way == "none") == (c == 1) and job.seq % c == 0 and job.seq // c <= job.most_tokens


class Theory(NamedTuple):
    """Of a job: seconds of work and of a block, of c rounds of them, entries exchanged, and what can be done."""

    work: Callable[[Job, int], float] = work
    send: Callable[[Job, int], float] = send
    contiguous: Callable[[Job, float, float, int], float] = contiguous
    zigzag: Callable[[Job, float, float, int], float] = zigzag
    exchanged: Callable[[Job, int], float] = exchanged
    can: Callable[[Job, str, int], bool] = can


RIGHT = Theory()
WRONG = {
    "zig-zag no better": Theory(zigzag=contiguous),
    "all ranks alike": Theory(contiguous=zigzag),
    "nothing hidden": Theory(
        contiguous=lambda job, w, x, c: 2 * c * w - w + (c - 1) * x, zigzag=lambda job, w, x, c: c * w + (c - 1) * x
    ),
    "everything hidden": Theory(send=lambda job, c: 0.0),
    "keys as wide as queries": Theory(
        send=lambda job, c: send(job, c) * job.num_heads / job.num_kv_heads,
        exchanged=lambda job, c: exchanged(job._replace(num_kv_heads=job.num_heads), c),
    ),
    "keys alone": Theory(send=lambda job, c: send(job, c) / 2),
    "not causal": Theory(work=lambda job, c: 2 * work(job, c)),
    "one product": Theory(work=lambda job, c: work(job, c) / 2),
    "own part sent too": Theory(exchanged=lambda job, c: exchanged(job, c) * c / (c - 1)),
    "way back of Ulysses forgotten": Theory(
        exchanged=lambda job, c: exchanged(job, c) - (c - 1) / c * job.num_heads * job.head_width
    ),
    "Ulysses hidden": Theory(exchanged=lambda job, c: 0.0),
    "whole sequence exchanged": Theory(exchanged=lambda job, c: c * exchanged(job, c)),
    "heads of keys cut": Theory(can=lambda job, way, c: can(job._replace(num_kv_heads=job.num_heads), way, c)),
    "one rank left out": Theory(can=lambda job, way, c: way != "none" and can(job, way, c)),
    "chunks cut": Theory(can=lambda job, way, c: can(job, "contiguous" if way == "zigzag" else way, c)),
    "room forgotten": Theory(can=lambda job, way, c: can(job._replace(most_tokens=job.seq), way, c)),
}
ALIKE = (
    ("not causal", "keys alone"), ("nothing hidden", "one product"), ("nothing hidden", "keys as wide as queries"),
    ("nothing hidden", "Ulysses hidden"), ("own part sent too", "whole sequence exchanged"),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The task's; of each wrong theory one that it gets wrong, and of two that are alike one that tells them apart; and
    one where nothing is possible."""
    cases = [case("the task", Job(2**15, 32, 8, 128, [4, 8, 16], 2**14, 400e12, 12.5e9))]
    for theories in [(each, RIGHT) for each in WRONG.values()] + [(WRONG[one], WRONG[two]) for one, two in ALIKE]:
        known = (partial(possible, by=each) for each in (*theories, RIGHT))
        cases.append(case("drawn", choice.told_apart(rng, drawn, *known)))
    nothing = drawn(rng)
    return [*cases, case("no room", nothing._replace(most_tokens=nothing.seq // nothing.degrees[-1] - 1))]


def drawn(rng: Rng) -> Job:
    """Any job whose blocks take about as long to send as to work on; one rank may be enough, or too few."""
    degrees = [[1, 2, 4], [2, 4, 8], [4, 8, 16], [1, 3, 6], [2, 3, 6, 12]][rng.integers(5)]
    num_heads, num_kv_heads = [(32, 8), (64, 8), (16, 16), (12, 6), (24, 12), (32, 4), (48, 24)][rng.integers(7)]
    seq = int(rng.integers(1000, 9000)) * int(rng.choice([1, 4, 6, 12, 48]))
    job = Job(seq, num_heads, num_kv_heads, int(rng.choice([64, 80, 128])), degrees, seq, 3e14, 1.0)
    link = send(job, degrees[-1]) / work(job, degrees[-1]) / np.exp(rng.uniform(-2.5, 2.5))
    most_tokens = int(seq / rng.choice(degrees) * rng.uniform(1.01, 1.5))
    return job._replace(most_tokens=most_tokens, link_bytes_per_s=float(f"{link:.3g}"))


def case(kind: str, job: Job) -> dict[str, Any]:
    words = "{}: s={}, {} heads, {} of keys, d={}, {} ranks with {} tokens at most, {:.3g} operations/s, {:.3g} B/s"
    return call(words.format(kind, *job), list(job), some=bool(possible(job)))


def possible(job: Job, by: Theory = RIGHT) -> choice.Possible:
    """What can be done: seconds, the way, the ranks."""
    found = []
    for c in job.degrees:
        w, x = by.work(job, c), by.send(job, c)
        exchange = by.exchanged(job, c) * job.seq / c * WIDTH / job.link_bytes_per_s if c > 1 else 0.0
        seconds = {
            "none": w, "contiguous": by.contiguous(job, w, x, c), "zigzag": by.zigzag(job, w, x, c),
            "ulysses": c * w + exchange,
        }  # fmt: skip
        found += [(seconds[way], way, c) for way in WAYS if by.can(job, way, c)]
    return found


EXERCISE = on_paper(
    "cp.2", "fastest_split", "How to split a long sequence?", draw,
    *choice.checks(lambda case: possible(Job(*case["arguments"])), WAYS, "a way where there is none"),
)  # fmt: skip
