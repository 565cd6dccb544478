"""cp.2: the fastest way to split a long sequence, and over how many ranks; on paper."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import cp

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
    """Seconds of what a rank computes in a round if all compute as much: half of the pairs of two blocks."""
    return cp.forward_flops(1, (job.seq / c) ** 2 / 2, job.num_heads, job.head_width) / job.flops_per_s


def send(job: Job, c: int) -> float:
    """Seconds of a block of keys and values, which c − 1 rounds send."""
    elements = cp.ring_elements(1, job.seq, job.num_kv_heads, job.head_width, c, backward=False)
    return WIDTH * elements / max(c - 1, 1) / job.link_bytes_per_s


def contiguous(w: float, x: float, c: int) -> float:
    """The last rank computes half a block, then whole ones; the others wait for it, and all for the link."""
    return max(w, x) + (c - 2) * max(2 * w, x) + 2 * w


def zigzag(w: float, x: float, c: int) -> float:
    return cp.ring_step_seconds(c, w, x)


def exchanged(job: Job, c: int) -> float:
    """Elements that a rank sends in Ulysses' two all-to-alls."""
    return cp.ulysses_elements(1, job.seq, job.num_heads, job.num_kv_heads, job.head_width, c, backward=False)


def can(job: Job, way: str, c: int) -> bool:
    """Whether tokens, chunks and heads can be cut so, and a rank has room for its tokens."""
    shared = job.num_heads % c == 0 and job.num_kv_heads % c * (c % job.num_kv_heads) == 0
    whole = {"zigzag": job.seq % (2 * c) == 0, "ulysses": shared}.get(way, True)
    return whole and (way == "none") == (c == 1) and job.seq % c == 0 and job.seq // c <= job.most_tokens


class Theory(NamedTuple):
    """Of a job: seconds of work and of a block, of c rounds of them, elements exchanged, and what can be done."""

    work: Callable[[Job, int], float] = work
    send: Callable[[Job, int], float] = send
    contiguous: Callable[[float, float, int], float] = contiguous
    zigzag: Callable[[float, float, int], float] = zigzag
    exchanged: Callable[[Job, int], float] = exchanged
    can: Callable[[Job, str, int], bool] = can


def same_heads(job: Job) -> Job:
    return job._replace(num_kv_heads=job.num_heads)


def traded(job: Job, c: int, num_kv_heads: float, times: int = 2) -> float:
    """`exchanged` of so many heads of keys, whether they go round or not, and `times` those of queries."""
    return (c - 1) / c * job.seq / c * (times * job.num_heads + 2 * num_kv_heads) * job.head_width


def ulysses_where(rule: Callable[[Job, int], bool]) -> Theory:
    """With another rule for the ranks of Ulysses."""

    def possible(job: Job, way: str, c: int) -> bool:
        return can(job, "contiguous", c) and rule(job, c) if way == "ulysses" else can(job, way, c)

    return Theory(exchanged=lambda job, c: traded(job, c, max(job.num_kv_heads, c)), can=possible)


RIGHT = Theory()
WRONG = {
    "zig-zag no better": Theory(zigzag=contiguous),
    "all ranks alike": Theory(contiguous=zigzag),
    "nothing hidden": Theory(
        contiguous=lambda w, x, c: (2 * c - 1) * w + (c - 1) * x, zigzag=lambda w, x, c: c * w + (c - 1) * x
    ),
    "everything hidden": Theory(send=lambda job, c: 0.0),
    "keys as wide as queries": Theory(
        send=lambda job, c: send(same_heads(job), c), exchanged=lambda job, c: exchanged(same_heads(job), c)
    ),
    "keys alone": Theory(send=lambda job, c: send(job, c) / 2),
    "not causal": Theory(work=lambda job, c: 2 * work(job, c)),
    "one product": Theory(work=lambda job, c: work(job, c) / 2),
    "way back of Ulysses forgotten": Theory(exchanged=lambda job, c: traded(job, c, max(job.num_kv_heads, c), times=1)),
    "heads of keys not sent twice": Theory(exchanged=lambda job, c: traded(job, c, job.num_kv_heads)),
    "heads of keys cut": ulysses_where(lambda job, c: job.num_heads % c == 0),
    "heads of queries cut": ulysses_where(lambda job, c: job.num_kv_heads % c * (c % job.num_kv_heads) == 0),
    "no more ranks than heads of keys": ulysses_where(lambda job, c: job.num_kv_heads % c == 0),
    "no fewer ranks than heads of keys": ulysses_where(lambda job, c: job.num_heads % c + c % job.num_kv_heads == 0),
    "Ulysses hidden": Theory(exchanged=lambda job, c: 0.0),
    "whole sequence exchanged": Theory(exchanged=lambda job, c: c * exchanged(job, c)),
    "one rank left out": Theory(can=lambda job, way, c: way != "none" and can(job, way, c)),
    "chunks cut": Theory(can=lambda job, way, c: can(job, "contiguous" if way == "zigzag" else way, c)),
    "room forgotten": Theory(can=lambda job, way, c: can(job._replace(most_tokens=job.seq), way, c)),
    "room not used up": Theory(can=lambda job, way, c: can(job._replace(most_tokens=job.most_tokens - 1), way, c)),
    "first round whole": Theory(contiguous=lambda w, x, c: (c - 1) * max(2 * w, x) + 2 * w),
    "chunks computed as a whole": Theory(zigzag=lambda w, x, c: zigzag(w, x, c) - max(w, x) + max(1.5 * w, x)),
    "rounds not told apart": Theory(zigzag=lambda w, x, c: max(c * w, (c - 1) * x)),
    "keys without values": Theory(exchanged=lambda job, c: traded(job, c, max(job.num_kv_heads, c) / 2)),
    "first round sent": Theory(contiguous=lambda w, x, c: x + (c - 2) * max(2 * w, x) + 2 * w),
    "last round sent": Theory(contiguous=lambda w, x, c: max(w, x) + (c - 1) * max(2 * w, x)),
    "one head of keys a rank": Theory(exchanged=lambda job, c: traded(job, c, c)),
    "own part exchanged": Theory(exchanged=lambda job, c: c / (c - 1) * exchanged(job, c)),
}
ALIKE = (
    ("not causal", "keys alone"), ("nothing hidden", "one product"), ("nothing hidden", "keys as wide as queries"),
    ("nothing hidden", "Ulysses hidden"), ("nothing hidden", "zig-zag no better"),
    ("first round sent", "own part exchanged"), ("heads of keys not sent twice", "keys without values"),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The task's; of each wrong theory one that it gets wrong, and of two that are alike one that tells them apart; and
    one where nothing is possible."""
    cases = [case("the task", Job(2**15, 32, 8, 128, [4, 8, 16], 2**14, 400e12, 12.5e9))]
    taken = [("flops_per_s", rate) for rate in (1.2e14, 4e14, 9e14)]
    cases += [case("drawn", job) for job in choice.each_apart(rng, drawn, possible, WRONG, taken, ALIKE)]
    nothing = drawn(rng)
    return [*cases, case("no room", nothing._replace(most_tokens=nothing.seq // nothing.degrees[-1] - 1))]


def drawn(rng: Rng) -> Job:
    """Any job whose blocks take about as long to send as to work on; one rank may be enough, or too few."""
    degrees = [[1, 2, 4], [2, 4, 8], [4, 8, 16], [1, 3, 6], [2, 3, 6, 12], [4, 5, 10]][rng.integers(6)]
    num_heads, num_kv_heads = [(32, 8), (64, 8), (16, 16), (12, 6), (12, 4), (32, 2), (24, 2)][rng.integers(7)]
    seq = int(rng.integers(1000, 9000)) * int(rng.choice([1, 4, 6, 12, 48]))
    rate, width = 1e12 * float(rng.integers(60, 2000)), int(rng.choice([64, 80, 128]))
    job = Job(seq, num_heads, num_kv_heads, width, degrees, seq, rate, 1.0)
    link = send(job, degrees[-1]) / work(job, degrees[-1]) / np.exp(rng.uniform(-1.5, 2.8))
    room = rng.uniform(1.01, 1.5) if rng.integers(4) else 1  # or all of it is needed
    most_tokens = int(seq / rng.choice(degrees) * room)
    return job._replace(most_tokens=most_tokens, link_bytes_per_s=float(f"{link:.3g}"))


def case(kind: str, job: Job) -> dict[str, Any]:
    return call(f"{kind}: {in_words(job._asdict())}", list(job), some=bool(possible(job)))


def possible(job: Job, by: Theory = RIGHT) -> choice.Possible:
    """What can be done: seconds, the way, the ranks."""
    found = []
    for c in job.degrees:
        w, x = by.work(job, c), by.send(job, c)
        seconds = {"none": w, "contiguous": by.contiguous(w, x, c), "zigzag": by.zigzag(w, x, c)}
        if c > 1 and by.can(job, "ulysses", c):
            seconds["ulysses"] = c * w + WIDTH * by.exchanged(job, c) / job.link_bytes_per_s
        found += [(each, way, c) for way, each in seconds.items() if by.can(job, way, c)]
    return found


EXERCISE = on_paper(
    "cp.2", "fastest_split", "How to split a long sequence?", draw,
    *choice.checks(lambda case: possible(Job(*case["arguments"])), WAYS, "a way where there is none"),
)  # fmt: skip
