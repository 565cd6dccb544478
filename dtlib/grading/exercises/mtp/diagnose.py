"""mtp.4: what is wrong with heads, by what was observed of them, on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import by, on_paper
from dtlib.theory import mtp

LATE, AGAIN, AVERAGED = "one head too few", "trunk again", "trunk averaged"
CACHE, GRAPH, NOTHING = "not rolled back", "one graph", "nothing wrong"

#: What is wrong, heads, bytes of a logit, and wrong guesses of the draft. Some with nothing wrong look otherwise: one
#: head, no wrong guess, many heads.
KINDS = (
    (NOTHING, 1, 4, 0), (NOTHING, 2, 4, 50), (NOTHING, 4, 2, 0), (NOTHING, 8, 4, 900), (NOTHING, 3, 2, 20),
    (LATE, 2, 4, 300), (LATE, 4, 2, 500), (LATE, 3, 2, 90),
    (AGAIN, 2, 2, 40), (AGAIN, 4, 4, 0), (AGAIN, 8, 2, 70),
    (AVERAGED, 2, 4, 30), (AVERAGED, 3, 2, 0), (AVERAGED, 8, 4, 11),
    (CACHE, 2, 2, 3), (CACHE, 4, 4, 200), (CACHE, 8, 2, 40),
    (GRAPH, 2, 2, 20), (GRAPH, 3, 4, 0), (GRAPH, 8, 4, 60),
)  # fmt: skip


def case(rng: Rng, number: int, kind: str, n: int, width: int, wrong_guesses: int) -> dict[str, Any]:
    words = {(NOTHING, 2): (120_000, 130_000), (GRAPH, 2): (5_000, 6_000)}.get((kind, n), (5_000, 130_000))
    tokens, vocab = 128 * int(rng.integers(8, 80)), int(rng.integers(*words))
    losses = [float(rng.uniform(*((0.3, 0.5) if (kind, n) == (NOTHING, 2) else (1.5, 3))))]
    for _ in range(n - 1):  # further ahead less is known; in some runs hardly less
        losses.append(losses[-1] * float(rng.uniform(1.075, 1.085 if kind == NOTHING and n in (2, 8) else 1.3)))
    if kind == LATE:  # each predicts what the one before it does
        losses = [losses[0], *losses[:-1]]
    noise = rng.uniform(*([0.995, 1.003], [0.996, 1.004]) if (kind, n) == (LATE, 2) else ([0.995] * n, [1.005] * n))
    noise[:2].sort()  # the second of a late run is not the better one; in one it is nearly a hundredth worse
    losses = [each * float(off) for each, off in zip(losses, noise, strict=True)]
    # Of the trunk's gradient, which point alike here: the first, least; in one run by far.
    parts = (np.linspace(0.5, 1.5, n) if (kind, n) == (AGAIN, 4) else np.sort(rng.uniform(0.8, 1.2, n))) / n
    times = np.arange(n, 0, -1) if kind == AGAIN else np.full(n, 1 / n if kind == AVERAGED else 1)
    norm = float(rng.uniform(0.2, 0.4 if n == 2 else 30))  # a half more is little then
    held = mtp.logits_bytes(1, tokens, vocab, n, in_turn=kind != GRAPH, element_bytes=width)
    told = {
        "predicted": n, "losses": losses, "norm_one_graph": norm * float(parts.sum()),
        "norm": norm * float((parts * times).sum()) * (1 + float(rng.uniform(-1e-9, 1e-9))),
        "wrong_guesses": wrong_guesses, "same_words": kind != CACHE,
        "tokens": tokens, "vocab": vocab, "element_bytes": width,
        "kept_bytes": round(held * float(rng.uniform(1.055 if kind == NOTHING else 1.01, 1.06))),
    }  # fmt: skip
    return call(f"run {number}: {in_words(told)}", [told]) | {"wrong": kind}


of = by("wrong", kind="schedule")

EXERCISE = on_paper(
    "mtp.4", "find_fault_of_heads", "What is wrong with these heads?", in_any_order(KINDS, case),
    of(AGAIN, AVERAGED)(2, "trunk", "a trunk's gradient that is counted again, or averaged"),
    of(LATE)(2, "targets", "targets that are shifted by one head too few"),
    of(CACHE, GRAPH)(2, "kept", "a cache that is not rolled back, logits that are all there at once"),
    of(NOTHING)(2, "nothing", "nothing is found where nothing is wrong"),
)  # fmt: skip
