"""activations.6: which layers to compute again, and how, so that a budget holds; on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dtlib.grading import plain
from dtlib.grading.checks.on_paper import mistake, own_formula
from dtlib.grading.compare import answer, right_only_if, show
from dtlib.grading.exercise import Case, Check, Exercise, Finding, FormError, Run, describe_case
from dtlib.theory import units

Plan = tuple[int, int, int]
Costs = tuple[float, float, float]
Sizes = Callable[[int, int, int, int], Costs]
"""For a layer with nothing, its core, or all of it computed again: from (seq, micro_batch, hidden, num_heads)."""


def layer_bytes(seq: int, micro_batch: int, hidden: int, num_heads: int) -> Costs:
    """What a layer keeps."""
    entries = seq * micro_batch * hidden
    return 34 * entries + 5 * num_heads * seq * seq * micro_batch, 34 * entries, 2 * entries


def layer_flops(seq: int, micro_batch: int, hidden: int, num_heads: int) -> Costs:
    """The operations of computing it again."""
    core = 4 * micro_batch * seq * seq * hidden
    return 0, core, core + 24 * micro_batch * seq * hidden * hidden


def _draw(rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for kind in ("tight", "narrow", "left over", "roomy", "hopeless"):
        head = int(rng.choice([64, 128]))
        heads = int(rng.choice([16, 24, 32]))
        seq = int(rng.choice([2, 3])) * head if kind == "left over" else int(rng.choice([1024, 2048, 4096]))
        sizes = [seq, int(rng.integers(1, 5)), head * heads, heads]
        layers = int(rng.integers(20, 60))
        none, core, full = (int(each) for each in layer_bytes(*sizes))
        budget = {
            "tight": layers * core + rng.uniform(0.2, 0.8) * layers * (none - core),
            "narrow": layers * full + rng.uniform(0.2, 0.8) * layers * (core - full),
            "left over": 7 * full + none + (layers - 8) * core + 1000,
            "roomy": layers * none,
            "hopeless": layers * full - 1,
        }[kind]
        words = f"s={seq}, b={sizes[1]}, h={sizes[2]}, a={heads}, {layers} layers in {units.format_bytes(int(budget))}"
        cases.append({"arguments": [*sizes, layers, int(budget)], "kind": kind, "words": words})
    return cases


@cache
def _plans(layers: int) -> Any:
    """All plans of so many layers, a row each."""
    core, full = (each.ravel() for each in np.meshgrid(np.arange(layers + 1), np.arange(layers + 1)))
    return np.stack([layers - core - full, core, full], axis=1)[core + full <= layers]


def best_plan(
    case: Case,
    kept: Sizes = layer_bytes,
    again: Sizes = layer_flops,
    allowed: Callable[[Any, Any, Any], Any] = lambda none, core, full: none >= 0,
) -> Plan | None:
    """The plan with the fewest operations that fits (of those that are `allowed`); None where none does."""
    *sizes, layers, budget = case["arguments"]
    plans = _plans(layers)
    plans = plans[allowed(*plans.T) & (plans @ np.array(kept(*sizes), np.float64) <= budget)]
    if not len(plans):
        return None
    none, core, full = plans[(plans @ np.array(again(*sizes), np.float64)).argmin()].tolist()
    return none, core, full


def _total(plan: Sequence[int], costs: Costs) -> float:
    return sum(count * cost for count, cost in zip(plan, costs, strict=True))


def _plan(run: Run) -> Plan | None:
    value = answer(run)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list) or len(value) != 3 or not all(plain.is_number(each) for each in value):
        raise FormError(show(value), "three numbers of layers, or None")
    none, core, full = value
    if min(value) < 0 or none + core + full != run.case["arguments"][4] or any(each != int(each) for each in value):
        raise FormError(show(value), f"whole numbers that add up to {run.case['arguments'][4]} layers")
    return int(none), int(core), int(full)


def _inspect_fits(run: Run) -> Finding | None:
    plan, (*sizes, _, budget) = _plan(run), run.case["arguments"]
    if (plan is None) != (best_plan(run.case) is None):
        return Finding(show(answer(run)), "None" if plan else "a plan, as there is one", describe_case(run.case))
    needed = _total(plan, layer_bytes(*sizes)) if plan else 0
    if needed > budget:
        return Finding(
            f"a plan that keeps {units.format_bytes(needed)}", units.format_bytes(budget), describe_case(run.case)
        )
    return None


def _inspect_fewest(run: Run) -> Finding | None:
    plan, best, sizes = _plan(run), best_plan(run.case), run.case["arguments"][:4]
    if plan is None or best is None:
        return None if plan == best else Finding(show(answer(run)), "a plan", describe_case(run.case))
    seen, fewest = (_total(each, layer_flops(*sizes)) for each in (plan, best))
    if seen > fewest * (1 + 1e-12):
        return Finding(
            f"{seen:.4g} operations again", f"{fewest:.4g}", f"{show(list(plan))}; {describe_case(run.case)}"
        )
    return None


def _is(wrong: Callable[[Case], Plan | None]) -> Any:
    """Recognise a plan, in all runs that came back."""

    def fits(failing: Sequence[Run], passing: Sequence[Run]) -> bool:
        back = [run for run in (*failing, *passing) if run.trouble is None]
        return bool(back) and all(_plan(run) == wrong(run.case) for run in back)

    return fits


def _with_bytes(change: Callable[[Costs], Costs]) -> Any:
    return _is(lambda case: best_plan(case, kept=lambda *sizes: change(layer_bytes(*sizes))))


def _only(allowed: Callable[[Any, Any, Any], Any]) -> Any:
    """Recognise the best of the plans that are `allowed`."""
    return _is(lambda case: best_plan(case, allowed=allowed))


_FITS = (
    mistake(
        "the matrix forgotten",
        _with_bytes(lambda costs: (costs[1], costs[1], costs[2])),
        "A layer with nothing computed again is taken for smaller than it is. What does its attention keep that grows "
        "with the square of s?",
    ),
    mistake(
        "nothing left of a layer",
        _with_bytes(lambda costs: (costs[0], costs[1], 0)),
        "A layer that is computed again is counted as nothing. From what is it computed?",
    ),
    mistake(
        "elements for bytes",
        _with_bytes(lambda costs: (costs[0] / 2, costs[1] / 2, costs[2] / 2)),
        "Half of the bytes: the budget is in bytes. How wide is an entry?",
    ),
    mistake(
        "a plan where there is none",
        right_only_if(lambda case: case["kind"] != "hopeless"),
        "Where not even the smallest layers fit, there is no plan. What does the function return then?",
    ),
)
_FEWEST = (
    mistake(
        "budget not to be reached",
        right_only_if(lambda case: case["kind"] != "roomy"),
        "A plan that fills the budget to the last byte fits as well.",
    ),
    mistake(
        "all layers alike",
        _only(lambda none, core, full: (none * core + none * full + core * full) == 0),
        "All layers are treated alike. What if the budget would hold for some of them to keep more?",
    ),
    mistake(
        "all or nothing",
        _only(lambda none, core, full: core == 0),
        "Each layer keeps everything or its input alone. What does a layer without its matrix keep, and what does it "
        "cost to have the matrix again?",
    ),
    mistake(
        "never all of a layer kept",
        _only(lambda none, core, full: none == 0),
        "Here something is computed again in every layer. Is there room for some that keep all?",
    ),
    mistake(
        "room left over",
        _only(lambda none, core, full: none * full == 0),
        "Your plans never have both layers that keep all and layers that keep their input alone. How much of the "
        "budget is left over, and what would fit into it?",
    ),
    mistake(
        "everything again",
        _only(lambda none, core, full: none + core == 0),
        "All layers are computed again, whatever the budget: safe, and a third more operations. How much room is left?",
    ),
)

BUDGET = Exercise(
    id="activations.6",
    function="spend_budget",
    title="Spend the memory you have",
    harness="paper.call",
    draw=_draw,
    checks=(
        own_formula("spend_budget"),
        Check("fits", "memory", 2, "the plan fits into the budget, and is None where none does", _inspect_fits, _FITS),
        Check(
            "fewest operations",
            "schedule",
            3,
            "no plan that fits computes less again",
            _inspect_fewest,
            _FEWEST,
            applies=lambda case: case["kind"] != "hopeless",
        ),
    ),
)
