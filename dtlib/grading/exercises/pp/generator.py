"""pp.2: a schedule made as data: one forward, one backward; on paper."""

from typing import Any

from dtlib.grading.exercises.compare import show
from dtlib.grading.exercises.exercise import Finding, FormError
from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, order
from dtlib.grading.exercises.seen import Observed
from dtlib.theory import pp

#: Ranks and micro-batches.
SIZES = ((2, 3), (4, 8), (1, 3), (3, 3), (4, 2), (8, 1), (5, 12), (8, 24))


def draw(rng: Rng) -> Cases:
    """More micro-batches than ranks, as many, and fewer; and sizes at random."""
    drawn = [(int(rng.integers(2, 9)), int(rng.integers(1, 20))) for _ in range(4)]
    return [
        call(f"p = {p}, m = {m}", [p, m], enough=m >= p, one=p == 1) | {"seconds": rng.uniform(0.5, 2, 3).tolist()}
        for p, m in (*SIZES, *drawn)
    ]


def schedule_of(answer: Any, case: Case) -> pp.Schedule:
    """The schedule that an answer is: of each rank a list of pairs (kind, micro-batch)."""
    p, m = case["arguments"]
    form = f"{p} lists of pairs such as ('F', 0) or ('B', 0)"
    if not isinstance(answer, list) or len(answer) != p or not all(isinstance(own, list) for own in answer):
        raise FormError(show(answer), form)
    for each in (each for own in answer for each in own):
        if not isinstance(each, list) or len(each) != 2 or each[0] not in ("F", "B") or type(each[1]) is not int:
            raise FormError(show(each), form)
    actions = tuple(tuple(pp.Action(kind, rank, i) for kind, i in own) for rank, own in enumerate(answer))
    return pp.Schedule("yours", tuple(range(p)), m, actions)


def given(observed: Observed) -> pp.Schedule:
    return schedule_of(observed.said[0]["answer"], observed.case)


def find_wrong(observed: Observed) -> Finding | None:
    """What `validate` says of it."""
    try:
        pp.validate(given(observed))
    except ValueError as error:
        return Finding(str(error), "", observed.words)
    return None


def find_slow(observed: Observed) -> Finding | None:
    """That a step takes longer than (m + p − 1)(T_F + T_B)."""
    p, m = observed.case["arguments"]
    forward, *backward = observed.case["seconds"]
    seen, wanted = (pp.simulate(each, forward, *backward).span for each in (given(observed), pp.one_f_one_b(p, m)))
    if seen <= wanted * (1 + 1e-9):
        return None
    times = f"T_F = {forward:.2f}, T_B = {sum(backward):.2f}"
    return Finding(f"a step of {seen:.2f}", f"{wanted:.2f}", f"{times}; {observed.words}")


def find_full(observed: Observed) -> Finding | None:
    """That a rank holds more than it must."""
    p, m = observed.case["arguments"]
    for rank, seen in enumerate(pp.simulate(given(observed)).most_in_flight):
        wanted = pp.most_in_flight("1F1B", p, m, rank)
        if seen > wanted:
            return Finding(f"{seen:.0f} held on rank {rank}", f"at most {wanted:.0f}", observed.words)
    return None


def agrees(observed: Observed, other: Any) -> bool:
    """Whether these are the actions of a program of the bank."""
    return given(observed) == schedule_of([[list(each) for each in own] for own in other], observed.case)


EXERCISE = on_paper(
    "pp.2", "one_f_one_b", "One forward, one backward", draw,
    order(3, "complete", "all is done once, and nobody waits for ever", find_wrong, gate=True, agrees=agrees),
    order(2, "time", "a step takes (m + p − 1)(T_F + T_B)", find_slow, agrees=agrees),
    order(3, "memory", "no rank holds more than min(m, p − r) micro-batches", find_full, kind="memory", agrees=agrees),
)  # fmt: skip
