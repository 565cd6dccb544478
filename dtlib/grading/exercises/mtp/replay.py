"""mtp.2: passes of a draft that is checked, played again on paper."""

from functools import partial
from typing import Any

from dtlib.grading.exercises.inputs import Case, Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, values

TRIPLE = "tokens, kept, shares"
EXAMPLE = [[[], [7]], [[3, 9, 4], [3, 9, 5, 8]], [[1, 2, 6], [0, 2, 6, 1]]]


def draw(rng: Rng) -> Cases:
    """The task's example; drafts of one guess and of several, all right, none right, right again behind a wrong one,
    shorter ones at the end, and long runs of all of these."""
    cases = [case("the example", 10, EXAMPLE)]
    for name, most, right_ones in (
        ("one guess a pass", 1, (1, 0, 1, 1, 0)), ("all right", 3, (3, 3, 3)), ("none right", 3, (0, 0, 0, 0)),
        ("some right", 4, (2, 4, 0, 1, 2, 3)), ("a run", 5, (5, *(int(each) for each in rng.integers(0, 6, 12)))),
    ):  # fmt: skip
        passes: list[Any] = [[[], [int(rng.integers(100))]]]
        for number, right in enumerate(right_ones):
            shorter = name in ("some right", "a run") and number == len(right_ones) - 1
            says = [int(each) for each in rng.integers(0, 100, most + 1 - shorter)]
            drafts = list(says[:-1])
            if right < len(drafts):
                drafts[right] = (drafts[right] + int(rng.integers(1, 50))) % 100  # those behind it look right again
            passes.append([drafts, says])
        cases.append(case(name, int(rng.integers(5, 60)), passes))
    return cases


def case(name: str, prompt_length: int, passes: list[Any]) -> dict[str, Any]:
    return call(f"{name}: {prompt_length} tokens, passes {passes}", [prompt_length, passes])


def right(case: Case) -> list[Any]:
    """By prefixes: a pass gives the longest draft that is what the model says, and the model's word behind it."""
    prompt_length, passes = case["arguments"]
    tokens: list[int] = []
    kept, lengths = [], []
    for drafts, says in passes:
        length = max(j for j in range(len(drafts) + 1) if drafts[:j] == says[:j])
        tokens += says[: length + 1]
        kept.append(prompt_length + len(tokens) - 1)
        lengths.append((len(drafts), length))
    most = max(drafted for drafted, _ in lengths)
    tried = [[length for drafted, length in lengths if drafted > j and length >= j] for j in range(most)]
    return [tokens, kept, [sum(length > j for length in each) / len(each) for j, each in enumerate(tried) if each]]


part = partial(values, right=right, parts=TRIPLE, rtol=1e-9)

EXERCISE = on_paper(
    "mtp.2", "replay", "A draft, checked", draw,
    part(3, "tokens", "the tokens that the passes give", part=0),
    part(2, "kept", "positions that the cache keeps after each pass", part=1),
    part(3, "shares", "how often the guess at each place was right where those before it were", part=2),
)  # fmt: skip
