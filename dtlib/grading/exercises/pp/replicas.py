"""pp.1: how many replicas a batch leaves room for, on paper."""

from typing import Any

from dtlib.grading.exercises import choice
from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper
from dtlib.theory import pp

#: The batch, sequences a micro-batch, ranks, chunks, and the part that may be idle; a part that is hit exactly is a
#: power of two: so in any order of operations.
KINDS = {
    "405 billion": (2048, 1, 16, 8, 0.10),
    "no chunks": (1024, 1, 8, 1, 0.20),
    "micro-batches of four": (1536, 4, 8, 2, 0.15),
    "micro-batches of two": (960, 2, 6, 1, 0.25),
    "just reached": (552, 1, 9, 1, 0.25),
    "just reached, with chunks": (480, 2, 5, 4, 0.0625),
    "nearly reached": (480, 1, 8, 1, 0.2592),
    "odd numbers": (720, 3, 5, 3, 0.12),
    "two ranks": (240, 1, 2, 1, 0.05),
    "one rank": (96, 2, 1, 1, 0.01),
    "one replica": (64, 1, 8, 1, 0.12),
    "more idle than not": (48, 1, 8, 1, 0.6),
    "some share is no whole": (168, 4, 2, 1, 0.17),
    "no whole micro-batches": (250, 4, 4, 1, 0.30),
    "too few": (64, 2, 16, 1, 0.05),
    "too few, with chunks": (48, 4, 16, 2, 0.10),
    "no multiple": (36, 1, 8, 4, 0.30),
}


def draw(rng: Rng) -> Cases:
    """Each kind once, and some at random, in any order."""
    cases = [case(kind, *arguments) for kind, arguments in KINDS.items()]
    for number in range(6):
        p, v, b = int(rng.integers(2, 17)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
        batch = b * p * int(rng.choice([12, 24, 30, 60, 64]))
        cases.append(case(f"run {number + 1}", batch, b, p, v, round(float(rng.uniform(0.03, 0.3)), 3) + 0.0004))
    return [cases[k] for k in rng.permutation(len(cases))]


def case(kind: str, *arguments: Any) -> dict[str, Any]:
    words = "{}: a batch of {}, micro-batches of {}, p = {}, v = {}, at most {:.2%} idle".format(kind, *arguments)
    return call(words, arguments, some=bool(enough({"arguments": arguments})))


def enough(case: Case) -> list[int]:
    """All numbers of replicas that will do, in increasing order."""
    batch, b, p, v, most_idle = case["arguments"]
    found = []
    for d in range(1, batch // b + 1):
        m, rest = divmod(batch, d * b)
        if rest or (v > 1 and m % p):
            continue
        if pp.bubble_fraction(p, m, v) <= most_idle * (1 + 1e-9):
            found.append(d)
    return found


def gives(case: Case, d: int) -> str:
    """What so many replicas come to."""
    batch, b, p, v, _ = case["arguments"]
    if d < 1 or batch % (d * b):
        return f"with {batch / (d * b):.2f} micro-batches each" if d > 0 else "which is no number of replicas"
    m = batch // (d * b)
    if v > 1 and m % p:
        return f"with {m} micro-batches each, no multiple of p = {p}"
    return f"with {m} micro-batches each, {pp.bubble_fraction(p, m, v):.2%} idle"


def rule(case: Case) -> str:
    *_, v, most_idle = case["arguments"]
    return f"whole micro-batches{', a multiple of p,' if v > 1 else ''} and at most {most_idle:.2%} idle"


EXERCISE = on_paper(
    "pp.1", "most_replicas", "How many replicas does a batch leave room for?", draw,
    *choice.largest(
        enough, "replicas", "so many replicas idle no more than they may, and None where none do",
        "no larger number of replicas does", gives=gives, rule=rule,
    ),
)  # fmt: skip
