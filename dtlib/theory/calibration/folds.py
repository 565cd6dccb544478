"""How far off step times are: the errors of runs, each planned with constants that had not seen it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dtlib.theory.models import model_parameters
from dtlib.theory.planner import plan_memory
from dtlib.theory.planner.errors import INSIDE, regime
from dtlib.theory.timing import FITTED, Constants, profile

from .fitting import HABITS, NEUTRAL, TIME_CONSTANTS, fitted
from .run import Run

_FOLDS: Mapping[str, Callable[[Run], str]] = MappingProxyType(
    {
        "megatron": lambda run: run.table,
        "nanotron": lambda run: run.model.name,
        "fsdp": lambda run: f"{run.table} {run.machine.accelerator.name}",
        "deepspeed": lambda run: f"{run.plans[0].tp} {run.plans[0].pp}",
    }
)


def measured(runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """What `planner.errors.known` holds, from `runs`: each planned with constants that were fitted to the other folds.

    The quantiles are the wider ones of these and of the constants in use, which are rounded and shared. `stalled` is
    the share that `told_apart` finds stalled of runs that leave the node; these stand in a regime of their own.

    A fold is a table, of Megatron's; a model, of the sweep; a table and a card, of FSDP; tp and pp, of DeepSpeed. Of
    runs that two tables print, one counts.
    """
    by_framework: dict[str, list[Run]] = defaultdict(list)
    far: dict[str, list[bool]] = defaultdict(list)
    for run in told_apart(unrepeated(runs)):
        by_framework[run.framework].append(run)
        if run.machine.gpus > run.machine.node:
            far[regime(run.plans[0], run.model, run.framework)].append(run.stalled)
    found = defaultdict(list)
    for framework, those in by_framework.items():
        for run, ratio in left_out(those, framework):
            found[regime_of(run)].append((run, ratio))
    return {
        name: _summary(pairs) | {"stalled": round(float(np.mean(far[name] or [False])), 4)}
        for name, pairs in sorted(found.items())
    }


def regime_of(run: Run) -> str:
    """The regime of a run, of one that stalled among those that did."""
    return regime(run.plans[0], run.model, run.framework, stalled=run.stalled)


def told_apart(runs: Iterable[Run]) -> list[Run]:
    """The runs, each marked where it stalled and not all like it do, and read as its memory says.

    It stalled where its seconds are nearer to those with every message between stages held up than to those without:
    no table prints it. Hardly any of the sweep's runs lie between the two. Over tensor ranks of several nodes it kept
    what it gathered, or gathered again, by which of the two its memory is nearer to, where they are further apart than
    the memory's own error.
    """
    marked = []
    for run in map(_by_memory, runs):
        k, plan = profile(run.framework), run.plans[0]
        may = k.stall_seconds > 0 and plan.pp > 1 and run.machine.node < plan.world_size and not k.stalls(plan)
        free, stalled = (abs(replace(run, stalled=each).log_error(k)) for each in (False, True))
        held = may and stalled < free
        marked.append(replace(run, stalled=held))
    return marked


def _by_memory(run: Run) -> Run:
    plan = run.plans[0]
    if run.memory_bytes is None or plan.pp > 1 or plan.tp <= run.machine.node:
        return run
    again, keeps = (plan.changed(keep_gathered=each) for each in (False, True))
    low, high = (plan_memory(run.model, each).total - FITTED.runtime_bytes for each in (again, keeps))
    if high < (1 + FITTED.margin) * low:
        return run
    return replace(run, plans=(keeps if run.memory_bytes**2 > low * high else again,))


def left_out(runs: Sequence[Run], framework: str) -> list[tuple[Run, float]]:
    """Each run with its measured over its planned seconds, planned with constants fitted to the other folds."""
    folds: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        folds[_FOLDS[framework](run)].append(run)
    found = []
    for name, those in folds.items():
        k = fitted_without(name, folds, framework)
        found += [(run, float(np.exp(-run.log_error(k)))) for run in those]
    return found


def fitted_without(left: str, folds: Mapping[str, Sequence[Run]], framework: str) -> Constants:
    """The constants of a framework, fitted to its folds but the one called `left`; none is fitted to experts or fp8."""
    start, names = HABITS.get(framework, (NEUTRAL, TIME_CONSTANTS))
    kept = {name: [run for run in runs if run.model.experts is None and run.plans[0].precision == "bf16"]
            for name, runs in folds.items() if name != left}  # fmt: skip
    return fitted({name: runs for name, runs in kept.items() if runs}, start, names=names)


def unrepeated(runs: Iterable[Run]) -> list[Run]:
    """The runs, each once: those of one model, plans, machine and time are the same."""
    return list({(run.model.name, run.plans, run.machine, run.seconds): run for run in runs}.values())


def _summary(pairs: Sequence[tuple[Run, float]]) -> dict[str, Any]:
    runs, ratios = [run for run, _ in pairs], np.array([ratio for _, ratio in pairs])
    in_use = np.exp([-run.log_error(profile(run.framework)) for run in runs])
    off, tail = np.abs(1 / ratios - 1), (1 - INSIDE) / 2
    low = min(np.quantile(each, tail, method="lower") for each in (ratios, in_use))
    high = max(np.quantile(each, 1 - tail, method="higher") for each in (ratios, in_use))
    ends = {
        "gpus": [run.machine.gpus for run in runs],
        "parameters": [model_parameters(run.model).total for run in runs],
        "seq": [run.plans[0].seq_of(run.model) for run in runs],
    }
    return {
        "runs": len(runs),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "median": round(float(np.median(off)), 4),
        "mean": round(float(np.mean(off)), 4),
        **{name: [min(each), max(each)] for name, each in ends.items()},
        "schedules": sorted({plan.schedule for run in runs for plan in run.plans}),
        "cards": sorted({run.machine.accelerator.name for run in runs}),
        "tp_overlap": sum(run.plans[0].tp_overlap and run.plans[0].tp > 1 for run in runs),
        "matrix": sum(run.plans[0].attention == "matrix" for run in runs),
    }
