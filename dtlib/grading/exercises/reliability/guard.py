"""reliability.7: replicas that are watched: who has other bits, told by checksums, and only when it is due."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dtlib.grading.exercises import oracle
from dtlib.grading.exercises.compare import show_bytes
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.kinds import by, heard, order, own_work
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import NOTHING_ELSE, Sign, Theory, Wrong, every

from ._replicas import Words, draw, handed_out, played

MOST_BYTES, MOST_MESSAGES = 256, 16  # to each other rank at a check
Vote = Callable[[Sequence[Hashable]], list[int]]


def bits_of(held: Words) -> Hashable:
    return b"".join(each.tobytes() for each in held)


def outvoted(sums: Sequence[Hashable]) -> list[int]:
    most, votes = Counter(sums).most_common(1)[0]
    return [rank for rank, each in enumerate(sums) if each != most or 2 * votes <= len(sums)]


def said(vote: Vote = outvoted, *, own: bool = False, places: bool = False) -> Theory:
    """Of each rank what it says after each step; `own`: whoever differs from itself; `places`: by places."""

    def theory(case: Case) -> list[list[list[int]]]:
        each, steps = case["every"], range(1, case["steps"] + 1)
        sums = [[bits_of(held) for held in replicas] for replicas in played(case)[1]]
        found: list[list[list[int]]] = [[[] for _ in steps] for _ in range(case["world_size"])]
        for number, rank in enumerate(case["groups"][case["watched"]]):
            told = [[i for i, one in enumerate(row) if one != row[number]] if own else vote(row) for row in sums]
            if not places:
                told = [[case["groups"][case["watched"]][i] for i in row] for row in told]
            found[rank] = [told[step // each - 1] if step % each == 0 else [] for step in steps]
        return found

    return oracle.remembered(theory)


right = said()


def off(holds: Callable[[Any, list[int], bool], bool]) -> Sign:
    """``holds(said, wanted, is_due)`` for all that a rank said after a step and should not have said."""

    def fits(each: Observed) -> bool:
        return all(
            holds(one, two, step % each.case["every"] == 0)
            for rank, wanted in zip(each.said, right(each.case), strict=True)
            for step, (one, two) in enumerate(zip(rank["found"], wanted, strict=True), 1)
            if one != two
        )

    return every(fits)


WRONG: Wrong = {
    "says nothing": off(lambda one, two, is_due: one is None),
    "says it at other steps": off(lambda one, two, is_due: not is_due or one == []),
    "nobody is named": said(lambda sums: [] if len(outvoted(sums)) == len(sums) else outvoted(sums)),
    "a change is not seen": off(lambda one, two, is_due: one == [] and is_due),
    "equal replicas are accused": off(lambda one, two, is_due: set(two) < set(one)),
    "places for ranks": said(places=True),
    "no majority": said(
        lambda sums: [rank for rank, each in enumerate(sums) if each != Counter(sums).most_common(1)[0][0]]
    ),
    "rank 0 is right": said(lambda sums: [rank for rank, each in enumerate(sums) if each != sums[0]]),
    "who differs from itself": said(own=True),
    "all are named": said(lambda sums: list(range(len(sums))) if len(set(sums)) > 1 else []),
}


# What it sends


def find_more(each: Observed) -> Finding | None:
    most = MOST_BYTES * each.case["world_size"] * (each.case["world_size"] - 1) * len(each.case["events"])
    if each.seen.total_bytes <= most:
        return None
    return Finding(f"{show_bytes(each.seen.total_bytes)} sent in all", f"at most {show_bytes(most)}", each.words)


def find_busy(each: Observed) -> Finding | None:
    """That a rank sent more messages than its comparisons can need: objects take two gatherings, gloo cuts a sum in
    four, and both may be asked for twice. (When a packet leaves is up to the system, also where it was in time.)"""
    case, sent = each.case, Counter(one.rank for one in each.seen.data())
    rank, found = max(sent.items(), key=lambda one: one[1], default=(0, 0))
    if found <= MOST_MESSAGES * (case["world_size"] - 1) * len(case["events"]):
        return None
    calls = f"{case['steps']} calls, of which {len(case['events'])} compare"
    return Finding(f"rank {rank} sent {found} messages in {calls}", "nothing in the others", each.words)


of = by("about", right, of="found", wrong=WRONG, names=lambda case: [f"call {n + 1}" for n in range(case["steps"])])
EXERCISE = Exercise(
    id="reliability.7", function="guard", title="Replicas that drift", harness="replicas.guarded",
    draw=draw, handed_out=handed_out,
    checks=(
        own_work("guard"),
        heard("guard", lambda case: case["world_size"] * len(case["events"])),
        of("bits")(2, "bits", "any bit of any element"),
        of("places")(2, "places", "elements that have changed places, changes that cancel"),
        of("equal")(2, "equal", "equal bits are equal, NaN too; 0.0 and -0.0 are not"),
        of("who")(2, "who", "who differs, also among slices, and where nobody can tell"),
        of("steps")(1, "steps", "what changed between two checks, at the next and not before"),
        order(1, "quiet", "nothing is sent after other steps", find_busy, where=lambda case: case["about"] == "quiet",
              wrong={"sends after each step": NOTHING_ELSE}),
        order(2, "traffic", "a checksum to each other rank, and no more", find_more, kind="traffic",
              wrong={"more than a checksum": NOTHING_ELSE}),
    ),
)  # fmt: skip
