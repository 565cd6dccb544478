"""dp.3: what overlap cannot hide, on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

#: What is drawn: for each bucket whether the link is idle before it (i), it waits (w) or comes just when the link is
#: free (=), and when backward ends.
PLANS = {
    "the first bucket is long": ("iwww", "the last is ready"),
    "idle before each bucket": ("iiii", "the last is ready"),
    "idle once in between": ("iwwiww", "the last is ready"),
    "idle twice in between": ("iwi=wiw", "the last is ready"),
    "idle before the last": ("i=wwi", "the last is ready"),
    "one bucket": ("i", "the last is ready"),
    "ready before backward ends": ("iwi=ww", "later"),
    "ready after backward ended": ("iwiww", "sooner"),
    "hidden with time to spare": ("iwwiw", "after all"),
    "hidden to the last moment": ("iwiww", "with the last"),
}


def draw(rng: Rng) -> Cases:
    """Links that are idle nowhere, in between and at the end; backward that ends at, after and before each moment."""
    return [case(rng, *plan, kind) for kind, plan in PLANS.items()]


def case(rng: Rng, buckets: str, ends: str, kind: str) -> dict[str, Any]:
    """A case, drawn in parts of a second that are sums of powers of two: so a tie is one in any order of sums."""
    ready: list[int] = []
    sync = [int(each) for each in rng.integers(12, 30, len(buckets))]
    sync[0] += 70 * ("first" in kind)  # still under way when the others are ready, and longer than the last from there
    free = 0
    for comes, length in zip(buckets, sync, strict=True):
        soon = ready[-1] + int(rng.integers(1, 12)) if ready else 0  # before the link is free
        ready.append({"i": free + int(rng.integers(3, 12)), "w": soon, "=": free}[comes])
        free = max(free, ready[-1]) + length
    backward = {
        "the last is ready": ready[-1],
        "later": (ready[-1] + free) // 2,
        "sooner": ready[-1] - 2,
        "with the last": free,
        "after all": free + int(rng.integers(5, 20)),
    }[ends]
    told = ", ".join(f"{one}+{two}" for one, two in zip(ready, sync, strict=True))
    arguments = [[each / 1024 for each in ready], [each / 1024 for each in sync], backward / 1024]
    words = f"{kind}: buckets ready+sync in s/1024 {told}; backward {backward}"
    return call(words, arguments, hidden=backward >= free)


def right(case: Case) -> float:
    """How long the link still works when backward has ended."""
    ready, sync, backward = case["arguments"]
    free = 0.0
    for start, length in zip(ready, sync, strict=True):
        free = max(free, start) + length
    return float(max(0.0, free - backward))


seconds = partial(values, right=right, kind="overlap", atol=1e-9)

EXERCISE = on_paper(
    "dp.3", "exposed_seconds", "What overlap cannot hide", draw,
    seconds(4, "exposed", "the exposed time where the link is the last to finish", where="not hidden"),
    seconds(1, "hidden", "nothing exposed where backward is the last to finish", where="hidden"),
)  # fmt: skip
