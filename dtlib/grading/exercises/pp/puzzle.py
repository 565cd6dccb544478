"""pp.4: a schedule that beats 1F1B, move by move; on paper."""

from typing import Any

from dtlib.grading.exercises.compare import show
from dtlib.grading.exercises.exercise import Finding, FormError
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, order
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import Sign, Wrong
from dtlib.theory import pp

BOARDS = ((2, 2), (2, 4), (3, 3), (3, 5), (4, 5))


def draw(rng: Rng) -> Cases:
    """Every board, in any order."""
    boards = [BOARDS[k] for k in rng.permutation(len(BOARDS))]
    return [call(f"board of {p} ranks and {m} micro-batches", [p, m]) for p, m in boards]


def schedule_of(answer: Any, case: Case) -> pp.Schedule:
    """The schedule that an answer is: a text for each rank."""
    p, m = case["arguments"]
    form = f"{p} texts of moves such as 'F0 I0 W0'"
    if not isinstance(answer, list) or len(answer) != p or not all(isinstance(row, str) for row in answer):
        raise FormError(show(answer), form)
    try:
        read = pp.from_text(answer)
    except ValueError as error:
        raise FormError(str(error), form) from None
    return pp.Schedule(read.name, read.placed, m, read.actions)


def given(observed: Observed) -> pp.Schedule:
    return schedule_of(observed.said[0]["answer"], observed.case)


def find_illegal(observed: Observed, limit: int | None = None) -> Finding | None:
    """What `validate` says of it."""
    try:
        pp.validate(given(observed), limit=limit)
    except ValueError as error:
        return Finding(str(error), "", observed.words)
    return None


def find_full(observed: Observed) -> Finding | None:
    """That a rank holds more than the board allows."""
    return find_illegal(observed, limit=observed.case["arguments"][0])


def idle(observed: Observed) -> tuple[str, str]:
    """Why a game is no shorter: where the last rank waits, before it begins, between its moves, or not at all; and
    before which move, or which rank is the last one to end."""
    table, (p, _) = pp.simulate(given(observed)), observed.case["arguments"]
    starts, ends = table.starts[-1], [p - 1.0, *table.ends[-1]]
    for number, (ready, start) in enumerate(zip(ends, starts, strict=False)):
        if start > ready:
            told = f"rank {p - 1} waits for {start - ready:.0f} of them before move {number + 1}"
            return "between" if number else "before", told
    longest = max(range(p), key=lambda rank: table.ends[rank][-1])
    return "not at all", f"rank {longest} is the last to end"


def waits(where: str) -> Sign:
    """That the last rank does so in the case that is told."""
    return Sign(lambda failing, passing: idle(failing[0])[0] == where)


SLOW: Wrong = {
    "the first one comes late": waits("before"),
    "the last rank waits between": waits("between"),
    "another rank ends later": waits("not at all"),
}


def slower_than(units: Any) -> Any:
    """A function that finds schedules which take more than ``units(p, m)``."""

    def find(observed: Observed) -> Finding | None:
        seen, wanted = pp.simulate(given(observed)).span, units(*observed.case["arguments"])
        if seen <= wanted:
            return None
        return Finding(f"{seen:.0f} units of time, {idle(observed)[1]}", f"at most {wanted}", observed.words)

    return find


def agrees(observed: Observed, other: Any) -> bool:
    """Whether these are the moves of a program of the bank."""
    return given(observed) == schedule_of(other, observed.case)


EXERCISE = on_paper(
    "pp.4", "moves", "Beat 1F1B", draw,
    order(2, "legal", "every move is possible, and all are made", find_illegal, gate=True, agrees=agrees),
    order(2, "memory", "no rank holds more than p micro-batches", find_full, kind="memory", agrees=agrees),
    order(2, "faster", "faster than 1F1B, which takes 3(m + p − 1)", slower_than(lambda p, m: 3 * (m + p - 1) - 1),
          wrong=SLOW, agrees=agrees),
    order(3, "fastest", "as fast as can be: 3m + p − 1", slower_than(lambda p, m: 3 * m + p - 1), wrong=SLOW,
          agrees=agrees),
)  # fmt: skip
