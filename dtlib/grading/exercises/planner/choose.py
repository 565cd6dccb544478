"""planner.3: the fastest degrees that fit, for three clusters; on paper."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call, in_words
from dtlib.grading.exercises.kinds import on_paper

from .exposed import phase, seen

Job = dict[str, Any]
Plan = tuple[int, int, int]
Cost = Callable[[Job, int, int, int], float]
Seconds = dict[Plan, float]
GB = 1e9

#: Cards, ranks of a node, GB of a card, rates inside and across in GB/s; layers, hidden, sequences, tokens of each.
KINDS = {
    "fast links": (64, 8, 80, 450, 50, 32, 4096, 256, 4096),
    "a slow network": (64, 8, 80, 300, 3, 32, 4096, 256, 4096),
    "one large node": (64, 64, 80, 450, 50, 48, 8192, 256, 4096),
    "nodes of four": (64, 4, 80, 300, 25, 48, 8192, 256, 4096),
    "little memory": (64, 8, 40, 300, 25, 40, 5120, 256, 4096),
    "long sequences": (64, 8, 80, 450, 50, 48, 8192, 128, 16384),
    "few sequences": (128, 8, 80, 450, 50, 48, 8192, 64, 4096),
    "many sequences": (16, 8, 80, 300, 25, 24, 4096, 2048, 2048),
    "no room": (8, 8, 24, 300, 25, 80, 8192, 64, 4096),
    "six layers a stage": (48, 8, 80, 300, 12, 36, 6144, 240, 4096),
    "a small model": (32, 8, 80, 300, 25, 16, 2048, 512, 2048),
    "seven cards": (7, 7, 80, 300, 25, 32, 4096, 256, 4096),
    "heads that three does not divide": (24, 24, 25, 450, 50, 32, 4096, 192, 4096),
    "Ethernet": (128, 8, 80, 300, 1.25, 48, 6144, 512, 4096),
    "nodes of six": (24, 6, 30, 450, 5, 24, 6144, 192, 4096),
    "nodes of two": (64, 2, 30, 300, 50, 12, 12288, 64, 4096),
    "one node and a half": (24, 4, 24, 300, 5, 36, 6144, 96, 4096),
    "an odd batch": (16, 8, 80, 300, 25, 24, 4096, 2040, 2048),
    "cities apart": (64, 8, 80, 450, 50, 32, 4096, 64, 4096),
    "just enough room": (64, 8, 80, 450, 50, 32, 4096, 256, 4096),
    "three that does not divide the heads": (6, 6, 60, 450, 50, 24, 4096, 192, 16384),
    "heads that three divides": (6, 6, 60, 450, 50, 24, 4608, 192, 16384),
    "slow cards": (64, 8, 80, 300, 50, 32, 4096, 256, 4096),
    "fast cards": (64, 8, 80, 300, 50, 32, 4096, 256, 4096),
    "slow links inside": (64, 8, 80, 30, 25, 48, 8192, 256, 4096),
    "slow to start inside": (64, 8, 80, 450, 50, 48, 8192, 256, 4096),
    "very fast links inside": (64, 8, 80, 3000, 25, 48, 8192, 256, 4096),
    "a wide table, just enough room": (16, 8, 80, 450, 50, 16, 2048, 256, 2048),
    "a wide table, not quite enough room": (16, 8, 80, 450, 50, 16, 2048, 256, 2048),
    "cities apart, a sequence for each card": (16, 8, 80, 450, 50, 24, 4096, 16, 4096),
}
#: Operations a second, and words of the vocabulary, where another number would choose others.
RATES = {"slow cards": 20e12, "fast cards": 4000e12, "cities apart, a sequence for each card": 150e12}
WIDE = 1_000_000


def draw(rng: Rng) -> Cases:
    """Each kind with its memory and rates a little changed, and clusters and models that nobody has seen before."""
    cases = [case(rng, *kind) for kind in KINDS.items()]
    cases += [case(rng, "drawn", drawn(rng, 96)) for _ in range(6)]
    return cases + [told_apart(rng, wrong) for wrong in WRONG]


def drawn(rng: Rng, sequences: int) -> tuple[int, ...]:
    """A cluster and a model like those of `KINDS`, with a multiple of so many sequences."""
    return (
        int(rng.choice([16, 24, 32, 40, 48, 64, 96])), int(rng.choice([4, 8])), int(rng.choice([24, 40, 64, 80])),
        int(rng.integers(100, 500)), int(rng.integers(2, 60)), int(rng.choice([12, 24, 36, 48])),
        1024 * int(rng.integers(2, 9)), sequences * int(rng.integers(1, 9)), 1024 * int(rng.integers(2, 9)),
    )  # fmt: skip


def told_apart(rng: Rng, wrong: Callable[[Job], Seconds]) -> Job:
    """A case with few sequences, where the best plan of a wrong theory is not possible or at least 1 % slower."""
    return choice.led_astray(
        rng, lambda rng: case(rng, "drawn", drawn(rng, int(rng.choice([4, 6, 96])))),
        lambda told: {tuple(plan): seconds for *plan, seconds in told["plans"]},
        lambda told: wrong(told["arguments"][0]), 1.01,
    )  # fmt: skip


def case(rng: Rng, kind: str, sizes: tuple[float, ...]) -> Job:
    cards, node, room, inside, across, layers, hidden, batch, seq = sizes
    near = [float(rng.uniform(0.97, 1.03)) for _ in range(3)]
    job: Job = {
        "cards": cards, "node": node, "room": room * GB * near[0], "layers": layers, "hidden": hidden,
        "rate": RATES.get(kind, 400e12) if kind in KINDS else float(rng.uniform(150, 900)) * 1e12,
        "inside": [5e-3 if kind == "slow to start inside" else 5e-6, inside * GB * near[1]],
        "across": [20e-3 if kind == "cities apart" else 20e-6, across * GB * near[2]],
        "heads": hidden // 128, "sequences": batch, "seq": seq,
        "vocab": 1000 * int(rng.integers(30, 130)) + (WIDE if kind.startswith("a wide table") else 0),
    }  # fmt: skip
    if kind.endswith("for each card"):  # of dp alone the gradients are just hidden, and the weights just not
        here, (_, rate) = of_rank(job, int(cards), 1, 1), job["across"]
        job["across"][0] = here["micro_seconds"] / 2 / (cards - 1) - 1.5 * here["weight_bytes"] / cards / rate
    found = possible(job)
    if kind.endswith("enough room"):  # of the fastest: a little more than it needs, or a little less
        job["room"] = (1.19 if "not quite" in kind else 1.22) * needed(job, *min(found, key=lambda plan: found[plan]))
        found = possible(job)
    words = f"{kind}: {in_words(job)}"
    return call(words, [job], some=bool(found)) | {"plans": [[*plan, t] for plan, t in found.items()]}


def stage_params(job: Job, tp: int, pp: int) -> float:
    """Parameters of a rank: a stage's layers, and the table of one end."""
    return float((job["layers"] // pp * 12 * job["hidden"] ** 2 + job["vocab"] * job["hidden"]) / tp)


def needed(job: Job, dp: int, tp: int, pp: int) -> float:
    """Bytes of the first stage: states of 18 bytes under ZeRO 1, and what its layers keep."""
    kept = 34 * job["seq"] * job["hidden"] / tp * (job["layers"] // pp) * min(pp, job["sequences"] // dp)
    return stage_params(job, tp, pp) * (6 + 12 / dp) + kept


def of_rank(job: Job, dp: int, tp: int, pp: int) -> Job:
    """What `seen` is called with: the job, and a rank's layers, micro-batches and bytes."""
    own = stage_params(job, tp, pp)
    return job | {
        "dp": dp, "tp": tp, "pp": pp, "micro_batches": job["sequences"] // dp, "layers": job["layers"] // pp,
        "micro_seconds": 6 * own * job["seq"] / job["rate"], "activation_bytes": 2 * job["seq"] * job["hidden"],
        "weight_bytes": 2 * own, "gradient_bytes": 4 * own,
    }  # fmt: skip


def seconds(job: Job, dp: int, tp: int, pp: int) -> float:
    """(m + p − 1) micro-batches with their messages of tp, then what pp and dp wait for."""
    here = of_rank(job, dp, tp, pp)
    waits = 8 * here["layers"] * phase(here, "tp", here["activation_bytes"])
    return (here["micro_batches"] + pp - 1) * (here["micro_seconds"] + waits) + sum(seen(here)[1:])


def possible(
    job: Job, needed: Cost = needed, seconds: Cost = seconds, spans: Callable[..., Any] = lambda tp, dp: (tp, tp * dp)
) -> Seconds:
    """The seconds of every (dp, tp, pp) that is possible and fits with a margin of a fifth; a group of tp and one of dp
    lie over `spans` ranks in a row."""
    found: Seconds = {}
    for tp in (t for t in range(1, job["heads"] + 1) if job["heads"] % t == 0):
        for pp in (p for p in range(1, job["layers"] + 1) if job["layers"] % p == 0):
            dp = job["cards"] // (tp * pp)
            if dp * tp * pp != job["cards"] or job["sequences"] % dp:
                continue
            if any(job["node"] % span and span % job["node"] for span in spans(tp, dp)):
                continue  # a group in one node, and another in two
            if 1.2 * needed(job, dp, tp, pp) <= job["room"]:
                found[dp, tp, pp] = seconds(job, dp, tp, pp)
    return found


def behind(gradients: float, weights: float, least: float, job: Job, dp: int, tp: int, pp: int) -> float:
    """Seconds with gradients and weights sent behind these parts of a micro-batch; `least` that each sticks out."""
    here = of_rank(job, dp, tp, pp)
    parts = zip((gradients, weights), ("gradient_bytes", "weight_bytes"), strict=True)
    out = [max(least, phase(here, "dp", here[sent]) - part * here["micro_seconds"]) for part, sent in parts]
    return seconds(job, dp, tp, pp) - seen(here)[2] + sum(out)


def bubble_without_tp(job: Job, dp: int, tp: int, pp: int) -> float:
    """Seconds with no messages of tp where the stages wait for each other."""
    here = of_rank(job, dp, tp, pp)
    return seconds(job, dp, tp, pp) - (pp - 1) * seen(here)[0] / here["micro_batches"]


def to_neighbours(in_bubble: int, stages: int, job: Job, dp: int, tp: int, pp: int) -> float:
    """Seconds with messages between stages in the bubble too, or over the link that so many stages lie on."""
    here = of_rank(job, dp, tp, pp)
    messages = seen(here | {"pp": min(pp, stages)})[1] * (1 + in_bubble * (pp - 1) / here["micro_batches"])
    return seconds(job, dp, tp, pp) - seen(here)[1] + messages


#: As many micro-batches in flight as there are stages, groups in one node and in two, and other seconds.
WRONG: tuple[Callable[[Job], Seconds], ...] = (
    partial(possible, needed=lambda job, dp, tp, pp: needed(job | {"sequences": dp * pp}, dp, tp, pp)),
    *(partial(possible, spans=each) for each in (lambda tp, dp: (), lambda tp, dp: (tp,), lambda tp, dp: (tp * dp,))),
    *(
        partial(possible, seconds=partial(behind, *each))
        for each in ((1, 1 / 3, 0), (1 / 3, 2 / 3, 0), (1 / 2, 1 / 2, 0))
    ),
    *(partial(possible, seconds=partial(to_neighbours, *each)) for each in ((1, 99), (0, 2))),
    *(partial(possible, seconds=each) for each in (partial(behind, 2 / 3, 1 / 3, -math.inf), bubble_without_tp)),
)


def tells(job: dict[str, Any], plan: Sequence[int]) -> str:
    """What a plan comes to: its cards, and its bytes where it has as many as there are."""
    if (cards := math.prod(plan)) != job["cards"]:
        return f", {cards} of {job['cards']} cards"
    return f", {1.2 * needed(job, *plan):.4g} bytes with the margin"


EXERCISE = on_paper(
    "planner.3", "choose_degrees", "Which degrees for this cluster?", draw,
    *choice.plans(
        "dp, tp, pp", "s", checks=("fits", "fastest"),
        words=("the degrees are possible and fit, and None where none do", "no others that fit are faster"),
        tells=tells,
    ),
)  # fmt: skip
