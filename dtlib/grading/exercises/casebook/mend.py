"""casebook.3: three steps, each with a mistake, to be mended: a norm, an average, experts; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Case, Rng, call, in_any_order, in_words
from dtlib.grading.exercises.kinds import on_paper, values

#: Ranks, the largest norm as a part of the whole one, and experts that nothing is sent to.
KINDS = ((1, 0.5, 0), (2, 0.95, 0), (2, 2.0, 1), (3, 0.9, 1), (3, 0.1, 2), (4, 0.95, 0), (4, 0.3, 1), (8, 1.2, 1))


def case(rng: Rng, number: int, n: int, part: float, unused: int) -> dict[str, Any]:
    """Ranks have another number of micro-batches each, which have other numbers of tokens, one of them none."""
    width = int(rng.integers(2, 4))

    def drawn(*shape: int) -> Any:
        return np.round(rng.uniform(0.5, 3, shape) * rng.choice([-1, 1], shape), 2)

    copied, slices = drawn(2), drawn(n, 2)
    whole = np.hypot(np.linalg.norm(copied), np.linalg.norm(slices))
    tokens = [rng.integers(1, 40, int(rng.integers(2, 4))).tolist() for _ in range(n)]
    tokens[-1][0] = 0
    means = [np.array([drawn(width) if count else np.zeros(width) for count in own]) for own in tokens]
    sums: list[list[Any]] = [[drawn(width) for _ in range(2 + unused)] for _ in range(n)]
    for expert in range(2, 2 + unused):
        for own in sums:
            own[expert] = None
    if n > 1:
        sums[int(rng.integers(n))][0] = None
    run = {
        "most": float(f"{part * whole:.4g}"), "copied": copied, "slices": slices, "tokens": tokens,
        "means": means, "width": width, "sent": sums,
    }  # fmt: skip
    return call(f"step {number}, {n} ranks: {in_words(run)}", [run])


def right(case: Case) -> dict[str, Any]:
    (run,) = case["arguments"]
    flat = np.concatenate([run["copied"], *run["slices"]])
    scale = min(1.0, run["most"] / float(np.linalg.norm(flat)))
    weights = np.concatenate(run["tokens"])
    sent = np.array([[np.zeros(run["width"]) if x is None else x for x in own] for own in run["sent"]])
    return {
        "clipped": [scale * np.array([*run["copied"], *own]) for own in run["slices"]],
        "average": np.average(np.concatenate(run["means"]), axis=0, weights=weights),
        "experts": list(sent.mean(0)),
    }


EXERCISE = on_paper(
    "casebook.3", "mended_step", "Mend three steps", in_any_order(KINDS, case),
    values(3, "clipped", "gradients clipped by one norm", right, part="clipped"),
    values(3, "average", "the mean over all tokens", right, part="average"),
    values(4, "experts", "gradients of experts", right, part="experts"),
)  # fmt: skip
