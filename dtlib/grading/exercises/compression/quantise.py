"""compression.2: QSGD from scratch: levels at random, right in the mean; its error and its bits; on paper."""

from functools import partial
from typing import Any

import numpy as np

from dtlib.grading.exercises.inputs import Array, Case, Rng, call, in_order
from dtlib.grading.exercises.kinds import on_paper, values

#: Entries, levels, and what is particular: levels around powers of two, one entry alone, zeros, or powers of two
#: that are half a step long, so that a number may be the very probability.
KINDS = (
    (6, 4, ""), (9, 1, ""), (12, 3, "sparse"), (7, 16, ""), (11, 127, "sparse"), (5, 8, "one entry"), (4, 5, "zeros"),
    (1, 2, ""), (40, 2, "many"), (4, 1, "halves"),
)  # fmt: skip


def drawn(rng: Rng, num_elements: int, levels: int, particular: str) -> dict[str, Any]:
    """No uniform number is where it decides by rounding, and some entries go up and some down where there are a few."""
    while True:
        x = np.round(rng.normal(0, rng.uniform(0.5, 3), num_elements), 3)
        if particular == "sparse":
            x[rng.permutation(num_elements)[: num_elements // 3]] = 0
        if particular in ("one entry", "zeros"):
            x[1:] = 0
            x[0] *= particular == "one entry"
        uniforms = np.round(rng.random(num_elements), 3)
        if particular == "halves":
            x, uniforms = 2.0 ** rng.integers(3) * rng.choice([-1, 1], 4), rng.permutation([0.25, 0.5, 0.5, 0.75])
        share = fractions(x, levels)
        is_up = uniforms < share
        is_clear = (np.abs(uniforms - share)[share > 0] > 1e-3).all() and (uniforms > 1e-3).all()
        is_mixed = num_elements < 5 or particular in ("one entry", "zeros") or 2 <= is_up.sum() <= (share > 0).sum() - 2
        if (is_clear or particular == "halves") and is_mixed and (np.any(x) or particular == "zeros"):
            return call(f"x = {x.tolist()}, s={levels}, uniforms = {uniforms.tolist()}", [x, levels, uniforms])


def fractions(x: Array, levels: int) -> Array:
    """How far each entry is from the level below it to the one above; exactly 0 for one that has all of the norm."""
    length = np.linalg.norm(x)
    share = levels * np.abs(x) / length % 1 if length else 0 * x
    return np.where(np.abs(share - np.round(share)) < 1e-9, 0, share)


def right(case: Case) -> list[Any]:
    """From the level below: those that go up are one higher, and each is either so far above or so far below."""
    x, levels, uniforms = case["arguments"]
    step, share = np.linalg.norm(x) / levels, fractions(x, levels)
    below = np.round(np.abs(x) / step - share) if step else 0 * x
    codes = np.sign(x) * (below + (uniforms < share))
    up, down = step * (1 - share), step * share
    bits = next(each for each in range(1, 64) if 2**each > 2 * levels)
    return [codes, step * codes, float((share * up**2 + (1 - share) * down**2).sum()), bits * len(x) + 32]


part = partial(values, right=right, parts="codes, decoded, error, bits", atol=1e-9)

EXERCISE = on_paper(
    "compression.2", "quantise", "A gradient in few levels", in_order(KINDS, drawn),
    part(3, "codes", "the codes", part=0),
    part(2, "decoded", "the numbers that they stand for", part=1),
    part(2, "error", "the expected squared error", part=2),
    part(1, "bits", "the bits", part=3, kind="traffic"),
)  # fmt: skip
