"""sp.1: the fastest plan, and for how many ranks, that fits; on paper."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.compare import show
from dtlib.grading.exercise import Finding, FormError
from dtlib.grading.inputs import Cases, Rng, call
from dtlib.grading.kinds import on_paper, order
from dtlib.grading.seen import Observed
from dtlib.grading.signs import only_if
from dtlib.theory import sp, units

BETWEEN = 22 + 34  # bytes of bsh that a layer's norms, dropout and sums move through memory, forward and backward


class Job(NamedTuple):
    """What the function is called with."""

    seq: int
    micro_batch: int
    hidden: int
    num_layers: int
    degrees: list[int]
    free_gib: list[float]
    flops_per_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float


def elements(job: Job) -> int:
    return job.micro_batch * job.seq * job.hidden


def kept(job: Job, t: int, plan: str) -> float:
    return job.num_layers * sp.kept_bytes(job.seq, job.micro_batch, job.hidden, 1, t, plan, core=False)


def sent(job: Job, t: int, plan: str) -> float:
    return 2 * sp.sent_elements(job.micro_batch, job.seq, job.hidden, t, plan)


def moved(job: Job, t: int, plan: str) -> float:
    return BETWEEN * elements(job) / (1 if plan == "none" else t)


def computed(job: Job, t: int) -> float:
    return (72 * job.hidden + 12 * job.seq) * elements(job) / t


def is_cut(job: Job, t: int, plan: str) -> bool:
    """Whether its tokens can be."""
    return plan == "none" or job.seq % t == 0


class Theory(NamedTuple):
    """Of a job on t ranks with a plan: bytes kept, sent and moved, operations, the unit of what is free, and whether
    its tokens can be cut."""

    kept: Callable[[Job, int, str], float] = kept
    sent: Callable[[Job, int, str], float] = sent
    moved: Callable[[Job, int, str], float] = moved
    computed: Callable[[Job, int], float] = computed
    unit: float = units.GiB
    is_cut: Callable[[Job, int, str], bool] = is_cut


RIGHT = Theory()
WRONG = {
    "eight phases for again": Theory(sent=lambda job, t, plan: sent(job, t, "keep")),
    "norms split in every plan": Theory(kept=lambda job, t, plan: kept(job, t, {"none": "again"}.get(plan, plan))),
    "gathered inputs forgotten": Theory(kept=lambda job, t, plan: kept(job, t, {"keep": "again"}.get(plan, plan))),
    "share of a ring forgotten": Theory(sent=lambda job, t, plan: 2 * sp.phases(plan) * elements(job)),
    "half of what is sent": Theory(sent=lambda job, t, plan: sent(job, t, plan) / 2),
    "an all-reduce for each phase": Theory(sent=lambda job, t, plan: 2 * sent(job, t, plan)),
    "work between split in every plan": Theory(moved=lambda job, t, plan: moved(job, t, "keep")),
    "work between split by no plan": Theory(moved=lambda job, t, plan: moved(job, t, "none")),
    "most ranks": Theory(computed=lambda job, t: 1e30 * computed(job, t)),
    "forward alone": Theory(computed=lambda job, t: computed(job, t) / 3),
    "one layer": Theory(kept=lambda job, t, plan: kept(job, t, plan) / job.num_layers),
    "GB for GiB": Theory(unit=units.GB),
    "tokens cut in pieces": Theory(is_cut=lambda job, t, plan: True),
}
ALIKE = (
    ("forward alone", "an all-reduce for each phase"), ("share of a ring forgotten", "half of what is sent"),
    ("share of a ring forgotten", "most ranks"), ("work between split in every plan", "work between split by no plan"),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The task's; of each wrong theory one that it gets wrong, and of two that are alike one that tells them apart; one
    where nothing fits, and one where something just does."""
    cases = [case("22 billion", Job(2048, 4, 6144, 48, [2, 4, 8], [20.0, 28.0, 12.0], 140e12, 300e9, 2e12))]
    cases += [case("drawn", told_apart(rng, wrong, RIGHT)) for wrong in WRONG.values()]
    cases += [case("drawn", told_apart(rng, *(WRONG[name] for name in names))) for names in ALIKE]
    size, layers = int(rng.choice([1024, 2048, 4096])), int(rng.choice([16, 32]))
    exact = Job(size, 1, size, layers, [2, 4], [0.0, layers * 11.5 * size**2 / units.GiB], 2.0**47, 2.0**38, 2.0**41)
    return [*cases, case("nothing fits", drawn(rng, room=False)), case("just fits", exact)]


def told_apart(rng: Rng, one: Theory, other: Theory) -> Job:
    """A job that is clear by both theories, and by the right one, and of which they say different things."""
    while True:
        job = drawn(rng)
        told = [best(job, theory) for theory in (one, other, RIGHT)]
        if told[0] != told[1] and told[2] and all(each is None or each[0] for each in told):
            return job


def drawn(rng: Rng, *, room: bool = True) -> Job:
    """Any job whose layers send about as long as they work, with room for all plans, for some or for none."""
    degrees = [[1, 2, 4, 8], [2, 4, 8, 16], [1, 3, 6, 12], [2, 3, 4, 6]][rng.integers(4)]
    seq, hidden = int(rng.integers(200, 900)) * int(rng.choice([1, 2, 4, 24])), 128 * int(rng.integers(8, 64))
    work = (72 * hidden + 12 * seq) / 3e14  # seconds an element
    link, memory = 16 / work / np.exp(rng.uniform(-1, 1.5)), BETWEEN / work / rng.uniform(0.05, 0.5)
    rates = [3e14, float(f"{link:.3g}"), float(f"{memory:.3g}")]
    job = Job(seq, int(rng.integers(1, 5)), hidden, int(rng.integers(2, 100)), degrees, [], *rates)
    for t in degrees:
        fits = ("none", "keep", "again", "")[int(rng.integers(4)) if room else 3]
        free = 1.03 * kept(job, t, fits) if fits else 0.97 * kept(job, t, "again")
        job.free_gib.append(float(f"{free / units.GiB:.5g}"))
    return job


def case(kind: str, job: Job) -> dict[str, Any]:
    words = "{}: s={}, b={}, h={}, {} layers, {} ranks with {} GiB, {:.3g} operations/s, {:.3g} and {:.3g} B/s"
    return call(words.format(kind, *job), list(job), some=best(job) is not None)


def fitting(job: Job, by: Theory = RIGHT) -> Iterator[tuple[float, str, int]]:
    """What fits: seconds a layer, the plan, the ranks."""
    for t, gib in zip(job.degrees, job.free_gib, strict=True):
        for plan in sp.PLANS:
            if by.is_cut(job, t, plan) and by.kept(job, t, plan) <= gib * by.unit * (1 + 1e-12):
                seconds = by.computed(job, t) / job.flops_per_s + by.sent(job, t, plan) / job.link_bytes_per_s
                yield seconds + by.moved(job, t, plan) / job.memory_bytes_per_s, plan, t


def best(job: Job, by: Theory = RIGHT) -> tuple[str, int] | None:
    """The fastest that fits; None if none does, "" if others are about as fast. On one rank all plans are one."""
    found = sorted(fitting(job, by))
    if not found:
        return None
    seconds, plan, t = found[0]
    is_clear = all(each > 1.01 * seconds or other == t == 1 for each, _, other in found[1:])
    return ("none" if t == 1 else plan) if is_clear else "", t


def answered(observed: Observed) -> tuple[Job, tuple[str, int] | None]:
    """The job, and the answer: a plan and ranks, or None."""
    answer, job = observed.said[0]["answer"], Job(*observed.case["arguments"])
    if answer is None:
        return job, None
    if isinstance(answer, list) and len(answer) == 2 and answer[0] in sp.PLANS and answer[1] in job.degrees:
        return job, (str(answer[0]), int(answer[1]))
    raise FormError(show(answer), f"one of {', '.join(sp.PLANS)} and one of the numbers of ranks, or None")


def find_room(observed: Observed) -> Finding | None:
    """That the plan fits, and is None where none does."""
    job, answer = answered(observed)
    possible = [each[1:] for each in fitting(job)]
    if answer in possible or (answer is None and not possible):
        return None
    return Finding(show(answer), "a plan that has room" if possible else "None", observed.words)


def find_fastest(observed: Observed) -> Finding | None:
    """That no other that fits is faster."""
    job, answer = answered(observed)
    wanted = best(job)
    if answer == wanted or (answer and wanted and answer[1] == wanted[1] == 1):
        return None
    return Finding(show(answer), show(wanted), observed.words)


def agrees(observed: Observed, other: Any) -> bool:
    return answered(observed)[1] == (tuple(other) if isinstance(other, list) else other)


ROOM, FASTEST = "the plan has room, and None where none has", "no other that has room is faster"
NONE = {"a plan where none fits": only_if("some")}
EXERCISE = on_paper(
    "sp.1", "fastest_plan", "Which plan, and how many ranks?", draw,
    order(3, "fits", ROOM, find_room, wrong=NONE, kind="value", agrees=agrees),
    order(4, "fastest", FASTEST, find_fastest, where="some", kind="value", agrees=agrees),
)  # fmt: skip
