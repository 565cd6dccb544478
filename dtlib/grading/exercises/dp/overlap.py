"""dp.6: buckets that travel while backward still computes.

Between two layers stands a gate (see `inputs`), at which a rank asks the desk for a key. One rank leads: the others get
a key only when it has asked for its next one, so whatever it has begun by then it has begun without waiting for them.
In the second step they stay at a gate in the middle until its backward has ended: so whoever waits before that is seen.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dtlib.grading.exercises import inputs, kinds, oracle, signs
from dtlib.grading.exercises.compare import close, show
from dtlib.grading.exercises.exercise import Exercise, Finding
from dtlib.grading.exercises.seen import Case, Observed

LAYERS, STEPS = 6, 2
LAST_GATE, FINISHED, A_STEP = LAYERS - 2, LAYERS, LAYERS + 1  # places of questions in a step, from the first gate on
HELD = (LAST_GATE, 2)  # the gate of each step at which the others wait for the leader's `finish` to end
UNDER_WAY = 2  # all-reduces that gloo begins before the first of them has ended
RTOL, ATOL = 1e-3, 1e-5
SLACK = 64  # bytes: gloo may round the pieces of an all-reduce up
#: Ranks, how long a bucket is (the first so many parameters together, less so many bytes), whether layers are shuffled.
SIZES = ((2, 7, 0, False), (3, 1, 1, False), (2, 5, 0, True), (3, 6, 100, True), (3, 2 * LAYERS, 0, False))


def draw(rng: inputs.Rng) -> inputs.Cases:
    """Buckets of several parameters, of one each (the first too long by itself), of some, of all: filled to the last
    byte, or a few bytes too short. Layers in the order of the list, and in another: there a parameter that is listed
    last in its bucket is not always ready last, and a bucket is complete before one that was cut earlier."""
    cases: inputs.Cases = []
    for n, parameters, less, shuffled in SIZES:
        width, use = int(rng.integers(40, 60)), list(range(LAYERS))
        own = {"steps": STEPS, "leader": int(rng.integers(0, n)), "use": use, "gated": True}
        words = f"layers of {width}×{width}{', used in another order' if shuffled else ''}, buckets of "
        widths = [*[width] * LAYERS, width**2 // 8 if parameters == 1 else 1]
        case = inputs.training(rng, n, widths, words, {"in order": not shuffled}, **own)
        case["bucket_bytes"] = oracle.FLOAT_BYTES * sum(oracle.sizes(case)[-parameters:]) - less
        while shuffled and (use.index(2) < min(use.index(3), use.index(4)) or moments(case) == sorted(moments(case))):
            use[:-1] = [int(each) for each in rng.permutation(use[:-1])]
        case["words"] += f"{case['bucket_bytes']} B"
        case["is"]["the first fits"] = parameters > 1
        case["is"]["one bucket"] = len(buckets(case)) == 1
        cases.append(case)
    return cases


def handed_out(case: Case, rank: int) -> inputs.Pieces:
    """The model; in each step a key at each gate, and nothing when backward and `finish` have ended."""
    pieces: inputs.Pieces = [("start", inputs.model(case, rank, STEPS) | {"bucket_bytes": case["bucket_bytes"]})]
    for step in range(STEPS):
        pieces += [*inputs.gates(case, rank, step), ("backward ended", None), ("finished", None)]
    return pieces


def holds(case: Case) -> list[tuple[int, int, int, int]]:
    """The leader is one gate ahead: the others wait at each gate for its next question, and it for them to follow; at
    the gate of `HELD` they wait for the end of its step."""
    leader, found = case["leader"], []
    for rank in set(range(case["world_size"])) - {leader}:
        for step, held in enumerate(HELD):
            first = 1 + step * A_STEP  # the piece of the first gate
            for gate in range(first, first + held):
                found += [(rank, gate, leader, gate + 1), (leader, gate + 1, rank, gate)]
            found += [(rank, first + held, leader, first + FINISHED), (leader, first + held + 1, rank, first + held)]
    return found


# Buckets


def buckets(case: Case, most: int | None = None, by: int = -1) -> list[list[int]]:
    """The parameters in each bucket: it closes before it would exceed `most` bytes. `by` is 1 from the first one on."""
    found: list[list[int]] = []
    room = -1
    for index, size in list(enumerate(oracle.sizes(case)))[::by]:
        if oracle.FLOAT_BYTES * size > room:
            found.append([])
            room = case["bucket_bytes"] if most is None else most
        found[-1].append(index)
        room -= oracle.FLOAT_BYTES * size
    return found


def lengths(case: Case, most: int | None = None, by: int = -1) -> list[int]:
    """The bytes of each bucket in all steps, the longest first."""
    sizes = oracle.sizes(case)
    found = [oracle.FLOAT_BYTES * sum(sizes[index] for index in bucket) for bucket in buckets(case, most, by)]
    return sorted(found * STEPS, reverse=True)


def sent(observed: Observed) -> list[int]:
    """The bytes of each all-reduce that the leader began, the longest first."""
    begun = observed.seen.collectives(observed.case["leader"])
    return sorted((round(size / 2 / (observed.case["world_size"] - 1)) for _, size in begun), reverse=True)


def cut(most: Callable[[Case], int] | None = None, by: int = -1) -> signs.Sign:
    return signs.instead(sent, lambda case: lengths(case, most and most(case), by), 0.0, SLACK)


def find_buckets(observed: Observed) -> Finding | None:
    found, wanted = sent(observed), lengths(observed.case)
    if close(found, wanted, 0.0, SLACK):
        return None
    pairs = list(zip(found, wanted, strict=False))
    alike = next((k for k, pair in enumerate(pairs) if not close(*pair, 0.0, SLACK)), len(pairs))
    behind = f"behind the {alike} longest, which are right; " if alike else ""
    told, right = (f"{show(each[alike:])} B" if each[alike:] else "none" for each in (found, wanted))
    return Finding(f"all-reduces of {told} in {STEPS} steps", right, behind + observed.words)


def overflows(observed: Observed) -> bool:
    """Whether buckets of several parameters are too long."""
    single, most = lengths(observed.case, 0), observed.case["bucket_bytes"] + SLACK
    return any(each > most and not any(close(each, one, 0.0, SLACK) for one in single) for each in sent(observed))


# Overlap


def begun(observed: Observed, step: int) -> list[int]:
    """How many all-reduces of a step the leader had begun by each of its questions in it."""
    leader, seen = observed.case["leader"], observed.seen
    asked = [each.position for each in seen.asks if each.rank == leader and each.number]
    counts = [len({each.which for each in seen.begun_by(leader, position)}) for position in asked]
    first = step * A_STEP
    return [count - (counts[first - 1] if step else 0) for count in counts[first : first + A_STEP]]


def moments(case: Case) -> list[int]:
    """For each bucket at which of the leader's questions in a step it has all its gradients first."""
    ready = {layer: place for place, layer in enumerate(reversed(case["use"]))}
    return [max(ready[index // 2] for index in bucket) for bucket in buckets(case)]


def let_go(observed: Observed) -> Iterator[tuple[bool, bool, bool]]:
    """Each time that another rank may go on at a gate: whether nothing else moved, whether it stood where it waits for
    the leader's `finish` to end, and whether the leader's backward had ended."""
    ended = 0
    for each in observed.seen.asks:
        step, place = divmod(each.number - 1, A_STEP)
        if each.rank == observed.case["leader"]:
            ended += each.label == "backward ended"
        elif each.label == "gate":
            yield each.why == "quiet", place == HELD[step], ended > step


def waits_in_backward(observed: Observed) -> bool:
    return any(quiet and not ended for quiet, _, ended in let_go(observed))


def finish_waits(observed: Observed) -> list[bool]:
    return [quiet for quiet, at_last, _ in let_go(observed) if at_last]


def find_overlap(observed: Observed) -> Finding | None:
    """That each bucket leaves when it is complete, nobody waits for one during backward, and `finish` does."""
    if not observed.seen.is_proved:
        return None
    if len(observed.seen.asks) != observed.case["world_size"] * (1 + STEPS * A_STEP):
        return Finding("a rank that goes past a gate", "every rank at every gate", observed.words)
    if waits_in_backward(observed):
        return Finding("a rank that waits for the others during backward", "none before it ends", observed.words)
    if not all(finish_waits(observed)) and not find_late(observed):
        return Finding("`finish` ending before the others had sent all", "it to wait for them", observed.words)
    return find_late(observed)


def find_late(observed: Observed) -> Finding | None:
    """A bucket that is complete and not under way, as far as gloo begins it while the others stay behind."""
    at = moments(observed.case)
    for step, held in enumerate(HELD):
        for question, number in enumerate(begun(observed, step)[:LAYERS]):
            wanted = sum(moment <= question for moment in at)
            wanted = min(wanted, sum(moment <= held for moment in at) + UNDER_WAY)
            if number < wanted:
                where = f"in step {step + 1} when so many were complete; {observed.words}"
                return Finding(f"{number} buckets under way", f"{wanted}", where)
    return None


NO_WAIT = signs.every(lambda each: not any(finish_waits(each)))


# Gradients


def needed(case: Case) -> float:
    return 2 * STEPS * oracle.gather_bytes(case)


@oracle.remembered
def right(case: Case) -> Any:
    """The mean over the ranks, after each step on every rank."""
    return [[each for step in range(STEPS) for each in oracle.mean_gradients(case, [step])]] * case["world_size"]


def contributions(case: Case, rank: int) -> Any:
    """What each rank finds, in both steps."""
    n = case["world_size"]
    return [[g for step in range(STEPS) for g in oracle.local_gradients(case, r, step)] for r in range(n)]


def elsewhere(observed: Observed) -> bool:
    """Whether each rank holds all numbers of the means, in other places."""
    wanted = np.sort(oracle.flat(right(observed.case)[0]))
    return all(close(np.sort(oracle.flat(said["gradients"])), wanted, RTOL, ATOL) for said in observed.said)


def too_early(observed: Observed) -> bool:
    """Whether each element is a sum of which other ranks' parts are missing, or divided too often or not at all."""
    n, told = observed.case["world_size"], [oracle.flat(said["gradients"]) for said in observed.said]
    own = np.stack([oracle.flat(each) for each in contributions(observed.case, 0)])
    shares = np.stack(np.meshgrid((1 / n, 1 / n**2), *[(0, 1, 1 / n, 1 / n**2)] * (n - 1)), -1).reshape(-1, n)
    parts = [[own.sum(0), *(shares @ np.roll(own, -rank, 0))] for rank in range(n)]
    return all(np.isclose(one, some, RTOL, ATOL).any(0).all() for one, some in zip(told, parts, strict=True))


GRADIENT: signs.Wrong = {
    "finish does not wait": NO_WAIT,
    "read too early": signs.every(lambda each: any(finish_waits(each)) and too_early(each)),
    "right in the first step only": signs.first_step("gradients", right, RTOL, ATOL),
    "right numbers in wrong places": signs.every(elsewhere),
    "right for one bucket size only": signs.only_if("one bucket"),
    "the first parameter is too long": signs.only_if("the first fits"),
    "right for layers in order only": signs.only_if("in order"),
}
TRAFFIC: signs.Wrong = {
    "everything twice": lambda case: 2 * needed(case),
    "grows with the steps": signs.every(lambda each: begun(each, 1)[-1] > begun(each, 0)[-1]),
    "gathered, then added": signs.GATHERED,
}
BUCKETS: signs.Wrong = {
    "a bucket for each parameter": cut(lambda case: 0),
    "elements for bytes": cut(lambda case: 4 * case["bucket_bytes"]),
    "one bucket for all": cut(oracle.num_bytes),
    "full taken for too full": cut(lambda case: case["bucket_bytes"] - 1),
    "from the first parameter": cut(by=1),
    "buckets that overflow": signs.every(overflows),
}
OVERLAP: signs.Wrong = {
    "blocking in the hook": signs.every(waits_in_backward),
    "launched after backward": signs.every(lambda each: begun(each, 0)[LAYERS - 1] == 0),
    "one bucket for all": signs.every(lambda each: len(sent(each)) == STEPS),
    "finish does not wait": NO_WAIT,
    "launched late": signs.every(lambda each: find_late(each) is not None),
}
CHECKS = (
    kinds.own_work("overlap_gradients", built_in=True),
    kinds.values(
        4, "gradient", "after `finish()` every `.grad` is the mean over the ranks, step after step", right,
        of="gradients", kind="gradient", rtol=RTOL, atol=ATOL, sums=contributions, names=oracle.names_of_steps,
        least_sent=lambda case: needed(case) / 2, wrong=GRADIENT,
    ),
    kinds.sends(2, "traffic", "each step sends what one all-reduce of all gradients needs", needed, wrong=TRAFFIC),
    kinds.order(
        2, "buckets", "the buckets are cut greedily, from the last parameter to the first", find_buckets,
        wrong=BUCKETS,
    ),
    kinds.order(
        3, "overlap", "each bucket leaves when its last gradient is ready, and nobody waits before backward ends",
        find_overlap, where="not one bucket", kind="overlap", wrong=OVERLAP,
    ),
)  # fmt: skip
EXERCISE = Exercise(
    id="dp.6", function="overlap_gradients", title="Buckets that hide behind backward", harness="dp.overlap",
    draw=draw, handed_out=handed_out, holds=holds, checks=CHECKS,
)  # fmt: skip
