"""pp.7: which schedule ran, what was slow, and which limit was hit, from a timeline; on paper."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order
from dtlib.grading.exercises.kinds import on_paper, values
from dtlib.theory import pp

Actions = list[list[tuple[str, int]]]

#: Schedule, ranks, micro-batches, what is slow (a stage or a link, with or without its place), the limit, what hiccups.
KINDS = (
    ("1F1B", 4, 8, "", None, "last but one"), ("1F1B", 4, 8, "", None, "first"), ("1F1B", 4, 10, "stage", None, "any"),
    ("1F1B", 3, 7, "link", None, ""), ("1F1B", 2, 5, "link", None, "backward"), ("1F1B", 5, 8, "stage", 3, ""),
    ("1F1B", 4, 8, "", 2, "second"), ("1F1B", 6, 9, "link", 5, ""), ("1F1B", 4, 3, "stage 0", None, ""),
    ("1F1B", 2, 6, "stage", None, ""),
    ("GPipe", 4, 6, "", None, ""), ("GPipe", 4, 6, "stage 0", None, "any"), ("GPipe", 3, 10, "", 7, ""),
    ("GPipe", 4, 9, "link", 3, "last"), ("GPipe", 5, 6, "link 0", None, ""), ("GPipe", 3, 6, "stage 2", 2, ""),
    ("sequential", 3, 6, "", None, ""), ("sequential", 4, 6, "stage", None, ""),
    ("sequential", 3, 6, "link", None, "second"),
    ("ZB-H1", 4, 8, "", None, "last"), ("ZB-H1", 3, 8, "stage", None, ""), ("ZB-H1", 4, 9, "link", None, ""),
    ("ZB-H2", 3, 8, "", None, ""), ("ZB-H2", 4, 9, "stage", None, "any"), ("ZB-H2", 3, 7, "link", None, ""),
)  # fmt: skip
"""Each kind once, in any order."""


def case(
    rng: Rng, number: int, schedule: str, p: int, m: int, slow: str, limit: int | None, hiccup: str
) -> dict[str, Any]:
    slow, _, at = slow.partition(" ")
    # Slow links of quick ranks are quicker than healthy ones of slow ranks: what a message should take is told.
    unit = float({"link": rng.uniform(5, 15), "": rng.uniform(60, 150)}.get(slow, rng.uniform(5, 150)))  # milliseconds
    healthy = unit * float(
        {"link": rng.uniform(0.005, 0.01 if limit else 0.03), "": rng.uniform(0.1, 0.15)}.get(slow, 0.04)
    )
    factors, message = [1.0] * p, [healthy] * (p - 1)
    place = int(at or rng.integers(p if slow == "stage" else p - 1))
    if slow != "link":  # of two stages the slow one moves the median; what is a little slower is healthy
        factors[place] = 1.1 if not slow else 1.42 if p == 2 else float(rng.uniform(1.42, 1.8))
    if slow != "stage":
        message[place] = float(rng.uniform(11, 14) if slow else 2.2) * healthy
    actions = made(schedule, p, m, limit)
    rank = p - 2 if hiccup in ("second", "last but one") else int(rng.integers(p))  # a gradient waits meanwhile
    own, chance = "".join(kind for kind, _ in actions[rank]), int(rng.integers(2 * m))
    places = {"first": 0, "second": 1, "backward": own.index(own.lstrip("F")[0]), "last but one": len(own) - 2}
    held_up = rank, (places | {"last": len(own) - 1, "any": chance}).get(hiccup)

    def seconds(kind: str, rank: int, at: int) -> float:
        base = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 0.9}[kind] * unit * factors[rank]
        return base * float(rng.uniform(0.97, 1.03)) * (8 if (rank, at) == held_up else 1)

    rows = timeline(actions, seconds, message)
    told = f"{slow} {place}" if slow else "nothing"
    kinds = " | ".join("".join(kind for kind, _ in own) for own in actions)
    kinds += f"; {in_milliseconds(rows)}, planned {healthy:.3g}"
    return call(f"run {number}, m = {m}: {kinds}", [p, m, healthy, rows]) | {"right": [schedule, told, limit or 0]}


def in_milliseconds(rows: list[list[list[Any]]]) -> str:
    """What the stages and the messages take, so that a run can be judged by hand."""
    usual = [median(end - start for kind, _, start, end in own if kind == "F") for own in rows]
    first = [after[0][2] - before[0][3] for before, after in pairwise(rows)]
    stages, messages = (", ".join(f"{each:.3g}" for each in them) for them in (usual, first))
    return f"F usually takes {stages} ms by rank, the first message {messages} ms"


def made(schedule: str, p: int, m: int, limit: int | None) -> Actions:
    """A schedule's kinds and micro-batches by rank; under a limit GPipe goes in rounds, and 1F1B begins with fewer."""
    if limit is None:
        return [[(kind, i) for kind, _, i, _ in own] for own in pp.SCHEDULES[schedule](p, m).actions]
    if schedule == "GPipe":
        rounds = [range(start, min(start + limit, m)) for start in range(0, m, limit)]
        return [[(kind, i) for each in rounds for kind in "FB" for i in each]] * p
    found = []
    for rank in range(p):
        first = min(m, p - rank, limit) - 1
        own = [("F", i) for i in range(first)]
        for i in range(m):
            own += [("F", first + i)] * (first + i < m) + [("B", i)]
        found.append(own)
    return found


def timeline(
    actions: Actions, seconds: Callable[[str, int, int], float], message: list[float]
) -> list[list[list[Any]]]:
    """By rank [kind, micro-batch, start, end] if each works in its order as soon as what it needs has come."""
    last, free = len(actions) - 1, [0.0] * len(actions)
    ended: dict[tuple[str, int, int], float] = {}
    found: list[list[list[Any]]] = [[] for _ in actions]
    while any(len(done) < len(own) for done, own in zip(found, actions, strict=True)):
        for rank, own in enumerate(actions):
            while len(found[rank]) < len(own):
                kind, i = own[len(found[rank])]
                come = arrival(kind, rank, i, last, ended, message)
                if come is None:
                    break
                start = max(free[rank], come)
                free[rank] = start + seconds(kind, rank, len(found[rank]))
                ended["I" if kind == "B" else kind, rank, i] = free[rank]
                found[rank].append([kind, i, round(start, 3), round(free[rank], 3)])
    return found


def arrival(
    kind: str, rank: int, i: int, last: int, ended: dict[tuple[str, int, int], float], message: list[float]
) -> float | None:
    """When what an action needs has come; None where it has not been made yet."""
    if kind == "W" or (kind == "F" and rank == 0):
        return 0.0
    if kind != "F" and rank == last:
        return ended.get(("F", rank, i))
    of, other, link = ("F", rank - 1, rank - 1) if kind == "F" else ("I", rank + 1, rank)
    end = ended.get((of, other, i))
    return None if end is None else end + message[link]


def right(case: Case) -> list[Any]:
    return list(case["right"])


PARTS = "schedule, slow, limit"
EXERCISE = on_paper(
    "pp.7", "read_timeline", "What does this timeline show?", in_any_order(KINDS, case),
    values(3, "schedule", "the schedule", right, part=0, parts=PARTS, kind="schedule"),
    values(4, "slow", "the stage or the link that is slow", right, part=1, parts=PARTS, kind="schedule"),
    values(2, "limit", "the limit that was hit", right, part=2, parts=PARTS, kind="schedule"),
)  # fmt: skip
