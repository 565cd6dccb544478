"""reliability.6: whose card, link or input holds the others up, by the timelines of all ranks; on paper."""

from operator import itemgetter
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Rng, call, in_any_order
from dtlib.grading.exercises.kinds import by, on_paper

CARD, INPUT, LINK, NOBODY = "card", "input", "link", "nobody"
STEPS = 7
Span = list[Any]  # what, step, begin and end in seconds

#: Who is slow, ranks, and what else is to be seen: of another rank (or of one, where nobody is slow) a step that took
#: long, or two ("hiccup" of the card, "stutter" of link or input), input that is slow and ready in time ("hidden"), a
#: first step that took long ("cold"), steps that are longer on all ranks ("uneven"), on each in its turn ("turns"), a
#: card that is faster than the others ("apart"), or another slow rank that costs less ("card", "link"). Of two ranks,
#: times are short, and who costs something costs a seventh of a step; where nobody is slow, a fifteenth of one whose
#: half is a message, and of a cold run one step comes after it.
KINDS = (
    (CARD, 2, ""), (CARD, 3, "hiccup"), (CARD, 4, "hidden"), (CARD, 5, "card"), (CARD, 4, "uneven"), (CARD, 4, "link"),
    (CARD, 6, "cold"), (CARD, 3, "turns"), (INPUT, 2, ""), (INPUT, 3, "hiccup"), (INPUT, 4, "hidden"),
    (INPUT, 5, "uneven"), (INPUT, 4, "link"), (INPUT, 6, "cold"), (LINK, 2, ""), (LINK, 3, "stutter"),
    (LINK, 4, "card"), (LINK, 5, "hidden"), (LINK, 6, "uneven"), (LINK, 4, "hiccup"), (NOBODY, 2, ""),
    (NOBODY, 3, "hiccup"), (NOBODY, 4, "hiccup"), (NOBODY, 4, "stutter"), (NOBODY, 5, "hidden"), (NOBODY, 4, "uneven"),
    (NOBODY, 6, "cold"), (NOBODY, 3, "hidden"), (NOBODY, 4, "apart"),
)  # fmt: skip


def case(rng: Rng, number: int, cause: str, n: int, looks: str) -> dict[str, Any]:
    rank, other = (int(each) for each in rng.permutation(n)[:2])
    ranges, of = ((0.2, 0.4), (0.03, 0.08), (0.05, 0.1)), 0.1 if n == 2 else 1.0
    compute, transfer, load = (of * float(rng.uniform(*each)) for each in ranges)
    transfer *= 5 if (cause, n) == (NOBODY, 2) else 1
    step = compute + transfer
    seconds = {name: np.full((STEPS, n), each) for name, each in ((CARD, compute), (LINK, transfer), (INPUT, load))}
    if looks == "uneven":
        seconds[CARD] *= rng.permutation(np.linspace(0.7, 1.7, STEPS))[:, None]
    if looks == "turns":  # longer in two steps of three, and as long in the median
        seconds[CARD] *= 1 + 0.4 * (np.arange(STEPS)[:, None] % 3)
        seconds[CARD][1:, rank] = np.roll(seconds[CARD][1:, rank], -1)
    if looks in (CARD, LINK):
        other = (rank - 1) % n  # whose message waits for `rank`
        seconds[looks][:, other] += 0.2 * step
    if looks == "apart":
        seconds[CARD] += step * rng.permutation([0, 0.3, 0.3, 0.38])
    if looks == "hidden":
        seconds[INPUT][:, other] = 0.8 * step
    if looks == "cold":
        for each in seconds.values():
            each[0, other] += 5 * step
    if looks in ("hiccup", "stutter"):
        first, second = rng.permutation(np.arange(1, STEPS))[:2]
        seconds[CARD if looks == "hiccup" else LINK][first, other] += 6 * step
        seconds[CARD if looks == "hiccup" else INPUT][second, other] += 4 * step
    if cause in (CARD, LINK) and looks != "turns":
        seconds[cause][:, rank] += rng.uniform(*((0.16, 0.18) if n == 2 else (0.4, 0.6))) * step
    seconds[CARD][:, rank] += 0.075 * step * (cause == NOBODY and n == 2)
    if cause == INPUT:
        seconds[cause][:, rank] = rng.uniform(1.4, 1.6) * (step * (1.3 if looks == "uneven" else 1))
        seconds[cause][:, rank] += 0.2 * step * (looks in (CARD, LINK))
    steps = 2 if (cause, looks) == (NOBODY, "cold") else STEPS
    seconds = {name: each[:steps] * rng.uniform(0.985, 1.015, (steps, n)) for name, each in seconds.items()}
    timelines = measured(seconds, rng.uniform(0, 1000, n))
    told = (f"rank {each}: … {', '.join(map(in_short, spans[4:12]))} …" for each, spans in enumerate(timelines))
    found = {"right": [None if cause == NOBODY else rank, cause], "cause": cause}
    return call(f"run {number}: {'; '.join(told)}", [timelines]) | found


def measured(seconds: dict[str, Array], clocks: Array) -> list[list[Span]]:
    """The spans of each rank by its own clock. The next batch is loaded while one is computed; a message to the next
    rank goes when both have come; a collective ends on all ranks when the last message has arrived."""
    n = len(clocks)
    spans: list[list[Span]] = [[] for _ in range(n)]
    asked, over = np.zeros(n), 0.0
    for step in range(len(seconds[CARD])):
        ready = asked + seconds[INPUT][step]
        begins = np.maximum(ready, over) + 1e-4
        comes = begins + seconds[CARD][step]
        sent = np.maximum(comes, np.roll(comes, -1)) + seconds[LINK][step]
        over = float(max(sent.max(), comes.max() + seconds[LINK][step].max())) + 1e-4
        for rank in range(n):
            times: dict[str, tuple[float, float]] = {
                "input": (float(asked[rank]), float(ready[rank])), "compute": (float(begins[rank]), float(comes[rank])),
                "collective": (float(comes[rank]), over), "message": (float(comes[rank]) + 1e-5, float(sent[rank])),
            }  # fmt: skip
            for what, (begin, end) in times.items():
                clock = float(clocks[rank])
                spans[rank].append([what, step, round(begin + clock, 6), round(end + clock, 6)])
        asked = begins
    return spans


def in_short(span: Span) -> str:
    what, step, begin, end = span
    return f"{what} {step} from {begin:.3f} to {end:.3f}"


of = by("cause", itemgetter("right"), parts="rank, cause")

EXERCISE = on_paper(
    "reliability.6", "find_slow", "Who is slow, and why?", in_any_order(KINDS, case),
    of(CARD)(2, "card", "a card that is slow"),
    of(INPUT)(2, "input", "a rank whose batches come late"),
    of(LINK)(2, "link", "a link that is slow"),
    of(NOBODY)(2, "nobody", "nobody where nobody is slow"),
)  # fmt: skip
