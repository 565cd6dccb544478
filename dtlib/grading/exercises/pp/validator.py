"""pp.3: what is wrong with a schedule: something is missing, or twice, or ranks wait for ever; on paper."""

from collections import Counter
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import pp

Actions = list[list[tuple[str, int]]]

MISSING, TWICE, STUCK, FINE = "missing", "twice", "stuck", "fine"
KINDS = (FINE, "fine, both orders", "fine, in turn", MISSING, "missing everywhere", TWICE, "three times",
         "twice and missing", STUCK, "stuck, all", "stuck, own", "stuck, late", *["random"] * 4)  # fmt: skip


def draw(rng: Rng) -> Cases:
    """Schedules of GPipe and 1F1B with each fault, with none, and with two actions exchanged at random."""
    cases = []
    for number, kind in enumerate(rng.permutation(KINDS), 1):
        p, m = int(rng.integers(2 + (kind == "stuck, all"), 5)), int(rng.integers(3, 6))
        make = pp.gpipe if rng.integers(2) else pp.one_f_one_b
        actions: Actions = [[(kind, i) for kind, _, i, _ in own] for own in make(p, m).actions]
        damage(rng, str(kind), actions, m)
        found = fault(m, actions)
        told = [[list(each) for each in own] for own in actions]
        text = " | ".join(" ".join(f"{of}{i}" for of, i in own) for own in actions)
        cases.append(call(f"schedule {number}, m = {m}: {text}", [m, told]) | {"fault": found})
    return cases


def damage(rng: Rng, kind: str, actions: Actions, m: int) -> None:
    """Do to a schedule what `kind` says."""
    p = len(actions)
    rank, i = int(rng.integers(p)), int(rng.integers(m))
    own = actions[rank]
    if kind == "fine, both orders":  # another order of micro-batches, on all ranks
        places = [*range(i or 1, m), *range(i or 1)]
        actions[:] = [[(of, places[i]) for of, i in each] for each in actions]
    elif kind == "fine, in turn":  # one comes back before the next: to look around 2p times is not enough
        actions[:] = [[(of, i) for i in range(m) for of in "FB"]] * 6
    elif kind == MISSING:
        own.remove(("FB"[int(rng.integers(2))], i))
    elif kind == "missing everywhere":
        actions[:] = [[each for each in own if each[1] < m - 2] for own in actions]
    elif kind == TWICE:
        own.insert(int(rng.integers(len(own))), own[int(rng.integers(len(own)))])
    elif kind == "three times":  # and another one twice, which comes later and is sorted before it
        own += [("F", i), ("F", i), ("B", i)]
    elif kind == "twice and missing":
        own[own.index(("B", i))] = ("F", i)
    elif kind == STUCK:  # two neighbours wait for each other: one goes back before it sends forward
        own = actions[rank := int(rng.integers(p - 1))]
        own.remove(("F", m - 1))
        own.insert(own.index(("B", m - 1)) + 1, ("F", m - 1))
    elif kind == "stuck, all":  # by rank B, F and B, and the first has the last micro-batch: no other order is this one
        for own, i in ((actions[0], m - 1), (actions[-1], 0)):
            own.insert(0, own.pop(own.index(("B", i))))
    elif kind == "stuck, own":
        own = actions[-1]
        first, second = own.index(("F", i)), own.index(("B", i))
        own[first], own[second] = own[second], own[first]
    elif kind == "stuck, late":  # it begins well, and the last rank takes the last two the other way round
        own = actions[-1]
        for of in "FB":
            first, second = own.index((of, m - 2)), own.index((of, m - 1))
            own[first], own[second] = own[second], own[first]
        ahead = actions[0]
        first, second = ahead.index(("B", m - 2)), ahead.index(("F", m - 1))
        if first > second:
            ahead.insert(first + 1, ahead.pop(second))
    elif kind == "random":
        one, two = rng.integers(len(own), size=2)
        own[one], own[two] = own[two], own[one]


def fault(m: int, actions: Actions) -> list[Any]:
    """The name of the first fault, and where it is."""
    wanted = [(rank, of, i) for rank in range(len(actions)) for of in "BF" for i in range(m)]
    counts = Counter((rank, of, i) for rank, own in enumerate(actions) for of, i in own)
    if missing := [list(each) for each in wanted if not counts[each]]:
        return [MISSING, missing]
    if twice := [list(each) for each in wanted if counts[each] > 1]:
        return [TWICE, twice]
    stuck = [[rank, *own[at]] for rank, (own, at) in enumerate(zip(actions, ends(actions), strict=True)) if at < 2 * m]
    return [STUCK if stuck else FINE, stuck]


def ends(actions: Actions) -> list[int]:
    """How many actions each rank comes to do, if it waits for what it needs."""
    done: set[tuple[int, str, int] | None] = set()
    at, last, went = [0] * len(actions), len(actions) - 1, True
    while went:
        went = False
        for rank, own in enumerate(actions):
            while at[rank] < len(own):
                of, i = own[at[rank]]
                forward = (rank - 1, "F", i) if rank else None
                back = (rank + 1, "B", i) if rank < last else (rank, "F", i)
                needs = {forward} - {None} if of == "F" else {back, (rank, "F", i)}
                if not needs <= done:
                    break
                done.add((rank, of, i))
                at[rank] += 1
                went = True
    return at


def right(case: Case) -> list[Any]:
    return list(case["fault"])


of = by("fault", right, kind="schedule")

EXERCISE = on_paper(
    "pp.3", "check_schedule", "What is wrong with this schedule?", draw,
    of(MISSING, TWICE)(3, "complete", "what is missing, and what is done twice"),
    of(STUCK)(4, "stuck", "ranks that wait for ever, and before what"),
    of(FINE)(2, "fine", "nothing is found where nothing is wrong"),
)  # fmt: skip
