"""activations.6: which layers to compute again, and how, so that a budget holds; on paper."""

from typing import Any

import numpy as np

from dtlib.grading.exercises.compare import show
from dtlib.grading.exercises.exercise import Finding, FormError
from dtlib.grading.exercises.inputs import Cases, Rng, call
from dtlib.grading.exercises.kinds import on_paper, order
from dtlib.grading.exercises.seen import Case, Observed
from dtlib.grading.exercises.signs import only_if

#: Layers so long that a further full recompute makes room to keep one layer: s/h, and the heads.
LONG = {"long": (6.2, 2), "long, one sequence": (6.2, 2), "even": (6, 2), "shorter": (5, 2), "one head": (12.4, 1)}


def draw(rng: Rng) -> Cases:
    """Budgets for which one way to save is enough, or two, or none; some that a plan fills to the last byte, one that
    none holds; and long sequences (see `LONG`), where the price of each product decides: from s = 6h on it pays."""
    kinds = ("tight", "narrow", "left over", "roomy", "a byte short", "to the last byte", "inputs alone", "hopeless")
    return [case(kind, rng) for kind in (*kinds, *LONG)]


def case(kind: str, rng: Rng) -> dict[str, Any]:
    ratio, heads = LONG.get(kind, (0, int(rng.choice([16, 24, 32]))))
    head, layers = int(rng.choice([64, 128])), int(rng.integers(20, 60))
    hidden, micro_batch = head * heads, 1 if kind == "long, one sequence" else int(rng.choice([3, 5]))
    seq = head * int(rng.choice([2, 3])) if kind == "left over" else int(rng.choice([1024, 2048, 4096]))
    seq += kind == "a byte short"  # the matrix then has no whole number of bytes for an entry
    sizes = (int(ratio * hidden) or seq, micro_batch, hidden, heads)
    none, core, full = map(int, layer_costs(*sizes)[0])
    again, share = int(rng.integers(3, layers // 2)), rng.uniform(0.2, 0.8)
    mixed = again * full + (layers - again) * core
    too_little = (none - core) - (core - full)  # to keep a layer, even with one more computed again in full
    budget = {
        "tight": layers * core + share * layers * (none - core),
        "narrow": layers * full + share * layers * (core - full),
        "left over": 7 * full + none + (layers - 8) * core + 1000,
        "roomy": layers * none,
        "a byte short": layers * none - 1,
        "to the last byte": mixed,
        "inputs alone": layers * full,
        "hopeless": layers * full - 1,
    }.get(kind, mixed + too_little + share * (core - full - too_little))
    words = f"s={sizes[0]}, b={micro_batch}, h={hidden}, a={heads}, {layers} layers, {int(budget):,} B"
    return call(words, [*sizes, layers, int(budget)], **{"some plan": kind != "hopeless"})


def layer_costs(seq: int, micro_batch: int, hidden: int, heads: int) -> Any:
    """Of a layer with nothing, its core, or all of it computed again: the bytes that it keeps, and the operations."""
    entries, matrix = seq * micro_batch * hidden, 5 * heads * seq * seq * micro_batch
    core = 4 * seq * entries
    kept, again = [34 * entries + matrix, 34 * entries, 2 * entries], [0, core, core + 24 * hidden * entries]
    return np.array([kept, again], float)


def fewest(case: Case) -> float | None:
    """The fewest operations of all plans that fit; None where none does."""
    *sizes, layers, budget = case["arguments"]
    core, full = np.mgrid[: layers + 1, : layers + 1].reshape(2, -1)
    kept, again = layer_costs(*sizes) @ np.stack([layers - core - full, core, full])
    fit = (core + full <= layers) & (kept <= budget)
    return float(again[fit].min()) if fit.any() else None


def costs(value: Any, case: Case) -> Any:
    """The bytes and the operations of the plan in an answer; None if it is None."""
    if value is None:
        return None
    *sizes, layers, _ = case["arguments"]
    plan = np.asarray(value if isinstance(value, list | np.ndarray) else [value])
    if plan.shape != (3,) or plan.dtype.kind not in "iuf":
        raise FormError(show(value), "three numbers of layers, or None")
    if plan.min() < 0 or plan.sum() != layers or (plan != plan.round()).any():
        raise FormError(show(value), f"whole numbers that add up to {layers} layers")
    return (layer_costs(*sizes) @ plan).tolist()


def find_fits(observed: Observed) -> Finding | None:
    """That there is a plan where one fits, and that it does."""
    answer, budget = observed.said[0]["answer"], observed.case["arguments"][5]
    found, least = costs(answer, observed.case), fewest(observed.case)
    if (found is None) != (least is None):
        return Finding(show(answer), "None" if least is None else "a plan, as there is one", observed.words)
    if found is None or found[0] <= budget:
        return None
    return Finding(f"{show(answer)}, which keeps {found[0]:,.0f} B", f"at most {budget:,} B", observed.words)


def find_fewest(observed: Observed) -> Finding | None:
    """That it fits, and that none that fits computes less again."""
    answer, least = observed.said[0]["answer"], fewest(observed.case) or 0.0
    again = (costs(answer, observed.case) or [0, 0])[1]
    if find_fits(observed) or again <= least * (1 + 1e-12):
        return find_fits(observed)
    return Finding(f"{again:.4g} operations again", f"{least:.4g}", f"{show(answer)}; {observed.words}")


def agrees(observed: Observed, other: Any) -> bool:
    return bool(costs(observed.said[0]["answer"], observed.case) == costs(other, observed.case))


FITS = "the plan fits into the budget, and is None where none does"
FEWEST = "no plan that fits computes less again"
NONE = {"a plan where there is none": only_if("some plan")}
EXERCISE = on_paper(
    "activations.6", "spend_budget", "Spend the memory you have", draw,
    order(2, "fits", FITS, find_fits, wrong=NONE, kind="memory", agrees=agrees),
    order(3, "fewest operations", FEWEST, find_fewest, where="some plan", agrees=agrees),
)  # fmt: skip
