"""pp.8: the fastest pipeline that fits, on paper."""

from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import pp

SCHEDULES = ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2")
Plan = tuple[str, int, int]

#: Cards, sequences, layers, seconds of a layer and sequence, seconds of a message over those, bytes of a layer,
#: bytes that it keeps, room, and whether there is a barrier.
GB = 1e9
KINDS = {
    "much room": (64, 512, 48, 0.03, 0.02, 4 * GB, 0.3 * GB, 300 * GB, False),
    "much room, a barrier": (64, 512, 48, 0.03, 0.02, 4 * GB, 0.3 * GB, 300 * GB, True),
    "little room": (64, 512, 48, 0.03, 0.02, 4 * GB, 1.0 * GB, 60 * GB, False),
    "little room, a barrier": (64, 512, 48, 0.03, 0.02, 4 * GB, 1.0 * GB, 60 * GB, True),
    "less room": (32, 256, 32, 0.02, 0.3, 3 * GB, 1.2 * GB, 50 * GB, False),
    "slow links": (64, 256, 48, 0.01, 2.0, 4 * GB, 0.4 * GB, 70 * GB, True),
    "few sequences": (128, 64, 48, 0.02, 0.05, 4 * GB, 0.4 * GB, 80 * GB, True),
    "many sequences": (16, 2048, 32, 0.02, 0.5, 6 * GB, 0.5 * GB, 80 * GB, False),
    "no room": (8, 64, 80, 0.03, 0.1, 8 * GB, 1.0 * GB, 40 * GB, False),
    "no multiple": (24, 120, 30, 0.02, 0.05, 4 * GB, 0.4 * GB, 60 * GB, True),
    "layers that no card divides": (16, 128, 24, 0.03, 0.01, 5 * GB, 0.2 * GB, 26 * GB, True),
    "no even share": (6, 15, 30, 0.02, 0.02, 4 * GB, 0.3 * GB, 55 * GB, True),
    "two layers a rank": (5, 20, 10, 0.03, 0.001, 1 * GB, 1 * GB, 17.8 * GB, True),
    "more stages": (8, 64, 24, 0.03, 0.002, 2 * GB, 0.5 * GB, 38.9 * GB, False),
    "five layers a rank": (16, 16, 80, 0.03, 0.26, 4 * GB, 0.1 * GB, 31 * GB, True),
}


#: A prime number of cards, one pipeline then, each with five layers and so with one chunk or five: sequences, seconds
#: of a message over those of a layer, whether there is a barrier, and the plan that has just room, or just not.
ROOM = (
    (7, 28, 0.003, True, "interleaved"), (5, 5, 0.003, True, "interleaved"), (5, 20, 0.003, False, "ZB-H2"),
    (7, 13, 0.5, True, "ZB-H1"), (7, 12, 0.5, True, "1F1B"), (7, 4, 0.5, False, "1F1B"), (7, 9, 0.5, True, "GPipe"),
)  # fmt: skip
#: Seconds of a message over those of a layer, and of a layer: twelve chunks, four, and one, of layers far from others'.
CHUNKS = ((0.03, 2.0), (0.35, 0.02), (6.0, 0.0002))


def draw(rng: Rng) -> Cases:
    """The task's cluster, each kind with its times and bytes a little changed, plans that have just room and just not,
    messages of three prices, and some at random."""
    cases = [case("the task", 16, 64, 16, 0.01, 0.001, 2 * GB, 0.5 * GB, 24 * GB, True)]
    for kind, (cards, batch, layers, layer, message, held, kept, room, barrier) in KINDS.items():
        near = [float(rng.uniform(0.95, 1.05)) for _ in range(4)]
        times = layer * near[0], layer * message * near[1]
        cases.append(case(kind, cards, batch, layers, *times, held * near[2], kept * near[3], room, barrier))
    for p, m, message, barrier, schedule in ROOM:
        layer, held, kept = 0.02 * float(rng.uniform(0.5, 2)), float(rng.integers(10**9)) + 1e9, 5e8
        activations = pp.most_in_flight(schedule, p, m, 0, 5 if schedule == "interleaved" else 1)
        for kind, factor in (("just room", 1 + 1e-6), ("not quite", 1 - 1e-6)):
            room = 5 * (held + kept * activations) * factor
            times = layer, layer * message
            cases.append(case(f"{kind} for {schedule}", p, m, 5 * p, *times, held, kept, room, barrier))
    for message, layer in CHUNKS:
        layer *= float(rng.uniform(0.5, 2))
        cases.append(case("chunks", 17, 17, 204, layer, layer * message, 2 * GB, 0.1 * GB, 80 * GB, False))
    for number in range(4):
        cards, layers = int(rng.choice([8, 16, 32, 48])), int(rng.choice([24, 32, 40, 48, 60]))
        layer, batch = float(rng.uniform(0.01, 0.05)), cards * int(rng.choice([2, 4, 6, 12]))
        sizes = [float(each) * GB for each in (rng.uniform(1, 6), rng.uniform(0.1, 1), rng.uniform(30, 120))]
        times = layer, layer * float(rng.uniform(0, 1.5))
        cases.append(case(f"run {number + 1}", cards, batch, layers, *times, *sizes, bool(rng.integers(2))))
    return cases


def case(kind: str, *arguments: Any) -> dict[str, Any]:
    cards, batch, layers, layer, message, held, kept, room, barrier = arguments
    words = (
        f"{kind}: {cards} cards, {batch} sequences, {layers} layers, {1e3 * layer:.3g} ms each, {1e3 * message:.3g} ms "
        f"a message, {held / GB:.3g} and {kept / GB:.3g} GB, room for {room / GB:.3g}, "
        f"{'a' if barrier else 'no'} barrier"
    )
    found = possible(*arguments)
    plans = [[*plan, t] for plan, t in found.items()]
    return call(words, arguments, some=bool(found), barrier=barrier) | {"plans": plans}


def possible(
    cards: int, batch: int, layers: int, layer: float, message: float, held: float, kept: float, room: float,
    barrier: bool,
) -> dict[Plan, float]:  # fmt: skip
    """The seconds of every plan (schedule, p, v) that is possible and fits."""
    found = {}
    for p in (p for p in range(2, cards + 1) if cards % p == 0 and batch % (cards // p) == 0 and layers % p == 0):
        m = batch // (cards // p)
        for schedule in SCHEDULES:
            for v in range(2, layers // p + 1) if schedule == "interleaved" else (1,):
                if (v > 1 and (m % p or (layers // p) % v)) or (schedule.startswith("ZB") and m < 2 * p - 1):
                    continue
                activations = pp.most_in_flight(schedule, p, m, 0, v)
                if layers // p * (held + kept * activations) > room:
                    continue
                third = layer * layers / p / 3
                law = "ZB-H1" if schedule == "ZB-H2" and barrier else schedule
                idle = pp.idle_seconds(law, p, third, third, third, v)
                found[schedule, p, v] = 3 * m * third + idle + 2 * v * m * message
    return found


EXERCISE = on_paper(
    "pp.8", "fastest_pipeline", "Which pipeline for this cluster?", draw,
    *choice.plans(
        "schedule, p, v", "s", names=SCHEDULES, checks=("fits", "fastest"),
        words=("the plan is possible and fits, and None where none does", "no plan that fits is faster"),
    ),
)  # fmt: skip
