"""sp.1: the fastest plan, and for how many ranks, that fits; on paper."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import sp, units

LEAST = {"none": "none", "keep": "again", "again": "again"}  # the plan that keeps as much but for gathered inputs
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


def sends(factor: float, *plans: str) -> Theory:
    """That each of these plans sends `factor` times as much."""
    return Theory(sent=lambda job, t, plan: sent(job, t, plan) * (factor if plan in plans else 1))


RIGHT = Theory()
WRONG = {
    "eight phases for again": sends(0.8, "again"),
    "gathered again in one half": sends(0.9, "again"),
    "gathered again three times": sends(1.1, "again"),
    "norms split in every plan": Theory(kept=lambda job, t, plan: kept(job, t, {"none": "again"}.get(plan, plan))),
    "gathered inputs forgotten": Theory(kept=lambda job, t, plan: kept(job, t, LEAST[plan])),
    "input of one half": Theory(kept=lambda job, t, plan: (kept(job, t, plan) + kept(job, t, LEAST[plan])) / 2),
    "share of a ring forgotten": Theory(sent=lambda job, t, plan: 2 * sp.phases(plan) * elements(job)),
    "half of what is sent": sends(0.5, *sp.PLANS),
    "an all-reduce for each phase": sends(2, *sp.PLANS),
    "an all-reduce for each phase of none": sends(2, "none"),
    "gathered again in both passes": sends(1.2, "again"),
    "moved in each pass": Theory(moved=lambda job, t, plan: 2 * moved(job, t, plan)),
    "work between split in every plan": Theory(moved=lambda job, t, plan: moved(job, t, "keep")),
    "work between split by no plan": Theory(moved=lambda job, t, plan: moved(job, t, "none")),
    "most ranks": Theory(computed=lambda job, t: 1e30 * computed(job, t)),
    "forward alone": Theory(computed=lambda job, t: computed(job, t) / 3),
    "attention's core forgotten": Theory(computed=lambda job, t: 72 * job.hidden * elements(job) / t),
    "attention's core twice": Theory(computed=lambda job, t: (72 * job.hidden + 24 * job.seq) * elements(job) / t),
    "half of attention's core": Theory(computed=lambda job, t: (72 * job.hidden + 6 * job.seq) * elements(job) / t),
    "one layer": Theory(kept=lambda job, t, plan: kept(job, t, plan) / job.num_layers),
    "GB for GiB": Theory(unit=units.GB),
    "tokens cut in pieces": Theory(is_cut=lambda job, t, plan: True),
    "sequences counted together": Theory(is_cut=lambda job, t, plan: plan == "none" or job[0] * job[1] % t == 0),
    "tokens cut in every plan": Theory(is_cut=lambda job, t, plan: job.seq % t == 0),
}
#: Rates that may be taken for every job's own.
TAKEN = [("flops_per_s", rate) for rate in (1.4e14, 3e14, 9e14)]
TAKEN += [("memory_bytes_per_s", rate) for rate in (5e11, 2e12, 8e12)]
ALIKE = (
    ("forward alone", "an all-reduce for each phase"), ("share of a ring forgotten", "half of what is sent"),
    ("share of a ring forgotten", "most ranks"), ("work between split in every plan", "work between split by no plan"),
    *((each, "most ranks") for each in TAKEN),
)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """The task's; of each wrong theory one that it gets wrong, and of two that are alike one that tells them apart; one
    where nothing fits, and one where something just does."""
    cases = [case("22 billion", Job(2048, 4, 6144, 48, [2, 4, 8], [20.0, 28.0, 12.0], 140e12, 300e9, 2e12))]
    cases += [case("drawn", job) for job in choice.each_apart(rng, drawn, possible, WRONG, TAKEN, ALIKE)]
    size, layers = int(rng.choice([1024, 2048, 4096])), int(rng.choice([16, 32]))
    exact = Job(size, 1, size, layers, [2, 4], [0.0, layers * 11.5 * size**2 / units.GiB], 2.0**47, 2.0**38, 2.0**41)
    return [*cases, case("nothing fits", drawn(rng, room=False)), case("just fits", exact)]


def drawn(rng: Rng, *, room: bool = True) -> Job:
    """Any job whose layers send about as long as they work, with room for all plans, for some or for none."""
    degrees = [[1, 2, 4, 8], [2, 4, 8, 16], [1, 3, 6, 12], [2, 3, 4, 6]][rng.integers(4)]
    seq, hidden = int(rng.integers(200, 900)) * int(rng.choice([1, 2, 4, 24])), 128 * int(rng.integers(8, 64))
    rate = 1e12 * float(rng.integers(60, 2000))
    work = (72 * hidden + 12 * seq) / rate  # seconds an element
    link, memory = 16 / work / np.exp(rng.uniform(-1, 1.5)), BETWEEN / work / rng.uniform(0.05, 0.5)
    rates = [rate, float(f"{link:.3g}"), float(f"{memory:.3g}")]
    job = Job(seq, int(rng.integers(1, 5)), hidden, int(rng.integers(2, 100)), degrees, [], *rates)
    for t in degrees:
        fits = ("none", "keep", "again", "")[int(rng.integers(4)) if room else 3]
        free = rng.choice([0.97, 1.03]) * kept(job, t, fits) if fits else 0.97 * kept(job, t, "again")
        job.free_gib.append(float(f"{free / units.GiB:.5g}"))
    return job


def case(kind: str, job: Job) -> dict[str, Any]:
    words = "{}: s={}, b={}, h={}, {} layers, {} ranks with {} GiB, {:.4g} operations/s, {:.3g} and {:.3g} B/s"
    return call(words.format(kind, *job), list(job), some=bool(possible(job)))


def possible(job: Job, by: Theory = RIGHT) -> choice.Possible:
    """What has room: seconds a layer, the plan, the ranks. One rank has one plan."""
    found = []
    for t, gib in zip(job.degrees, job.free_gib, strict=True):
        for plan in sp.PLANS if t > 1 else ("none",):
            if by.is_cut(job, t, plan) and by.kept(job, t, plan) <= gib * by.unit * (1 + 1e-12):
                seconds = by.computed(job, t) / job.flops_per_s + by.sent(job, t, plan) / job.link_bytes_per_s
                found.append((seconds + by.moved(job, t, plan) / job.memory_bytes_per_s, plan, t))
    return found


EXERCISE = on_paper(
    "sp.1", "fastest_plan", "Which plan, and how many ranks?", draw,
    *choice.checks(lambda case: possible(Job(*case["arguments"])), tuple(sp.PLANS), "a plan where none fits"),
)  # fmt: skip
