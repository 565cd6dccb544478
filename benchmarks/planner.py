"""The planner beside others on the same published rows, what each of its terms earns, and how far its constants carry.

Nothing is timed here: a fit asks for a million step times, which is too long for a page of the book. `mlsysim` and
`llm-analysis` come with ``pip install -e ".[benchmarks-planner]"``; without them nothing is saved.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._planner_peers import PEERS, Tool, tools
from benchmarks._report import console, print_table, save
from dtlib.theory import planner
from dtlib.theory.calibration import fitting, folds, published
from dtlib.theory.planner import FITTED, Plan

DATA = Path(__file__).parents[1] / "chapters" / "data"
Tables = Mapping[str, Sequence[published.Run]]
Column = NDArray[Any]

SWEEP: Mapping[str, Callable[[Plan], bool]] = {
    "sweep, no pipeline, tp to 8": lambda plan: plan.pp == 1 and plan.tp <= 8,
    "sweep, no pipeline, tp over 8": lambda plan: plan.pp == 1 and plan.tp > 8,
    "sweep, pipelines": lambda plan: plan.pp > 1,
}
"""The parts of the sweep of small models, whose rows stand in two files."""


def tables(
    names: Iterable[str] = tuple(published.TABLES), read: Callable[..., list[published.Run]] = published.runs
) -> dict[str, list[published.Run]]:
    """The runs of the tables called `names`, as `read` understands their rows."""
    found = {}
    for table in names:
        with (DATA / f"{table}.csv").open(encoding="utf-8") as file:
            found[table] = read(table, csv.DictReader(file))
    return found


def kept_back() -> dict[str, list[published.Run]]:
    """The runs of all other tables, the sweep by its parts."""
    found = tables([*(name for name in published.KEPT_BACK if name != "megatron_bridge_half"), "ultrascale_small"])
    sweep = folds.unrepeated([*found.pop("ultrascale_small"), *found.pop("ultrascale_half")])
    return found | {part: [run for run in sweep if has(run.plans[0])] for part, has in SWEEP.items()}


def error(planned: Column, held: Column) -> float:
    """The mean of what a planned value is off by, as a share of the published one."""
    return float(np.mean(np.abs(planned / held - 1)))


def order(planned: Column, held: Column) -> float | None:
    """The rank correlation; of two rows it would be a coin's, and is None."""
    if len(held) < 3:
        return None
    ranks = [np.argsort(np.argsort(each)) for each in (planned, held)]
    return float(np.corrcoef(*ranks)[0, 1])


def answers(of: Mapping[str, Callable[[published.Run, Plan], float | None]], runs: Sequence[published.Run]) -> Column:
    """What each of the tools says of each run, where all can express it; a row of numbers a run."""
    told = [[ask(run, run.planned()) for ask in of.values()] for run in runs]
    return np.array([[np.nan] * len(of) if None in each else each for each in told], float)


def one_factor(planned: Tables, held: Tables) -> float:
    """The factor with the smallest error over `planned`, each table counting the same: the best of all exact ones."""
    ratios = np.concatenate([held[table] / each for table, each in planned.items()])
    return float(min(ratios, key=lambda f: np.mean([error(f * planned[each], held[each]) for each in planned])))


def beside(asked: Sequence[Tool], fitted: Tables, others: Tables) -> dict[str, Any]:
    """Error and order of the step time of each tool, as it comes and times one factor, on the rows that all express.

    The factor is fitted to the tables that the planner's constants were fitted to, and to no other.
    """
    of = {tool.name: tool.seconds for tool in asked}
    found, rows = {}, {}
    for table, runs in {**fitted, **others}.items():
        told, held = answers(of, runs), np.array([run.seconds for run in runs])
        ok = ~np.isnan(told).any(axis=1)
        found[table], rows[table] = (told[ok].T, held[ok]), [int(ok.sum()), len(runs)]
    held = {table: each for table, (_, each) in found.items()}
    factors = {
        name: one_factor({table: found[table][0][i] for table in fitted}, {table: held[table] for table in fitted})
        for i, name in enumerate(of)
    }
    return {
        "told": {tool.name: tool.told for tool in asked},
        "bare": [tool.name for tool in asked if tool.bare],
        "factors": factors,
        "rows": rows,
        "error": {t: {n: error(p, held[t]) for n, p in zip(of, found[t][0], strict=True)} for t in found},
        "times a factor": {
            t: {n: error(factors[n] * p, held[t]) for n, p in zip(of, found[t][0], strict=True)} for t in found
        },
        "order": {t: {n: order(p, held[t]) for n, p in zip(of, found[t][0], strict=True)} for t in found},
    }


def memory(asked: Sequence[Tool], others: Tables) -> dict[str, Any]:
    """Order, share within a fifth and median ratio of the memory of each tool that says it, for parts of the sweep."""
    of = {tool.name: tool.memory_bytes for tool in asked if tool.memory_bytes}
    parts = {part: others[part] for part in SWEEP}
    parts["sweep, all"] = [run for runs in parts.values() for run in runs]
    found: dict[str, Any] = {}
    for part, runs in parts.items():
        told, held = answers(of, runs), np.array([run.memory_bytes for run in runs])
        ok = ~np.isnan(told).any(axis=1)
        found[part] = {"rows": int(ok.sum())} | {
            name: {
                "order": order(each, held[ok]),
                "within a fifth": float(np.mean(np.abs(each / held[ok] - 1) <= 0.2)),
                "median": float(np.median(each / held[ok])),
            }
            for name, each in zip(of, told[ok].T, strict=True)
        }
    return found


def choosing(asked: Sequence[Tool], others: Tables) -> dict[str, Any]:
    """What a tool's pick reaches of the best measured speed, by cards: the mean and the worst of all jobs of the sweep.

    A job is a model, its cards and the sequences of a step, with three configurations or more that were measured.
    Of plans that a tool cannot tell apart the mean counts.
    """
    jobs: dict[Any, dict[Plan, list[published.Run]]] = defaultdict(lambda: defaultdict(list))
    for part in SWEEP:
        for run in others[part]:
            jobs[run.model, run.machine.gpus, run.plans[0].sequences][run.plans[0]].append(run)
    reached: dict[str, dict[str, list[float]]] = {tool.name: defaultdict(list) for tool in asked}
    for (_, gpus, _), plans in jobs.items():
        if len(plans) < 3:
            continue
        measured = {plan: float(np.median([run.seconds for run in runs])) for plan, runs in plans.items()}
        for tool in asked:
            told = {plan: tool.seconds(runs[0], plan) for plan, runs in plans.items()}
            alike = [measured[plan] for plan, each in told.items() if each <= min(told.values()) * (1 + 1e-9)]
            cards = "up to 64" if gpus <= 64 else f"{gpus}"
            reached[tool.name][cards].append(float(np.mean(min(measured.values()) / np.array(alike))))
    return {
        name: {
            cards: {"jobs": len(each), "mean": float(np.mean(each)), "worst": min(each)} for cards, each in by.items()
        }
        for name, by in reached.items()
    }


NEUTRAL = {
    "thin products": {"operand_passes": 1e-9},
    "what messages take from products": {"contention_share": 1e-9},
    "what links lose": {"inside_share": 1.0, "across_share": 1.0},
}
"""What a constant stands for, and its value where it says nothing."""


def without(fitted: Tables, others: Tables) -> dict[str, dict[str, float]]:
    """The error of the planner with one term after another left out, the rest times one factor that is fitted anew."""
    every = {**fitted, **others}
    held = {table: np.array([run.seconds for run in runs]) for table, runs in every.items()}
    times = {
        table: [planner.step_time(run.model, run.planned(), run.machine) for run in runs]
        for table, runs in every.items()
    }
    ways = {"": {table: np.array([each.total for each in steps]) for table, steps in times.items()}}
    terms = {term for steps in times.values() for each in steps for term, value in each.parts.items() if value}
    for term in sorted(terms):
        ways[term.replace("_", " ")] = {
            table: np.array([each.total - each.parts[term] for each in steps]) for table, steps in times.items()
        }
    for name, values in NEUTRAL.items():
        constants = replace(FITTED, **values)
        ways[name] = {
            table: np.array([planner.step_time(r.model, r.planned(), r.machine, constants).total for r in runs])
            for table, runs in every.items()
        }
    found = {}
    for name, planned in ways.items():
        factor = one_factor({table: planned[table] for table in fitted}, {table: held[table] for table in fitted})
        found[name or "nothing"] = {table: error(factor * planned[table], held[table]) for table in every}
    return found


def left_out() -> dict[str, dict[str, float]]:
    """The error over each table, and with constants that were fitted on the others alone."""
    runs = tables()
    again = fitting.fitted(runs)
    for words, constants in (("found again", again), ("in use", FITTED)):
        values = ", ".join(f"{name} {getattr(constants, name):.3g}" for name in fitting.TIME_CONSTANTS)
        console.print(f"{words}: {values}", highlight=False)
    here = {table: published.mean_error(each) for table, each in runs.items()}
    return {"with": here, "left_out": fitting.left_out_errors(runs)}


def _cells(values: Mapping[str, float | None], form: str) -> list[str]:
    return ["–" if value is None else format(value, form) for value in values.values()]


def main() -> None:
    """Ask all tools for the same rows, leave terms out, fit with tables left out; show all of it and save it."""
    asked, fitted, others = tools(), tables(), kept_back()
    names = [tool.name for tool in asked]
    for tool in asked:
        console.print(f"{tool.name} was told {tool.told}", highlight=False)
    time = beside(asked, fitted, others)
    for title, form in (("error", ".1%"), ("times a factor", ".1%"), ("order", ".2f")):
        rows = [[t, "{} of {}".format(*time["rows"][t]), *_cells(each, form)] for t, each in time[title].items()]
        print_table(f"step time: {title}", ["table", "rows", *names], rows)
    kept = memory(asked, others)
    for part, each in kept.items():
        says = [name for name in each if name != "rows"]
        rows = [[name, *_cells(each[name], ".2f")] for name in says]
        print_table(f"memory, {part}: {each['rows']} rows", ["", "order", "within a fifth", "median"], rows)
    picks = choosing(asked, others)
    for name, by in picks.items():
        said = (f"{cards} cards {v['mean']:.0%}, {v['worst']:.0%} at worst" for cards, v in sorted(by.items()))
        console.print(f"the pick of {name} reaches of the best: {'; '.join(said)}", highlight=False)
    terms = without(fitted, others)
    print_table("without", ["", *terms["nothing"]], [[name, *_cells(each, ".1%")] for name, each in terms.items()])
    missing = [name for name in PEERS if not any(tool.name.startswith(name) for tool in asked)]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not installed, so nothing is saved: see the top of {__file__}")
    fits = left_out()
    rows = [[table, f"{fits['with'][table]:.1%}", f"{fits['left_out'][table]:.1%}"] for table in fitted]
    print_table("step time, fitted", ["table", "with it", "left out"], rows)
    save("planner", {**fits, "beside": time, "memory": kept, "choosing": picks, "without": terms})
