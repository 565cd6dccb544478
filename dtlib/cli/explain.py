"""``dtlib explain``: a plan that ``dtlib plan --json`` wrote, every term with its law, its number and its chapter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click

from .options import MOST_LAYERS, read_json

if TYPE_CHECKING:
    from dtlib.theory.models import Architecture
    from dtlib.theory.planner import Goal, Keeping, Plan
    from dtlib.theory.planner.laws import Term

# numpy, rich and dtlib.theory are imported by the functions that need them: --help answers at once.


@dataclass(frozen=True)
class Told:
    """An amount in words that is no term of a sum, with its law, as a `Term` of a plan has it."""

    name: str
    amount: str
    formula: str
    meaning: str
    number: str
    chapter: str


@click.command()
@click.argument("file", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option(
    "--plan",
    "which",
    type=int,
    default=1,
    show_default=True,
    help="The plan to explain, in the order of the file: the fastest is 1.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the terms as JSON, in seconds and bytes.")
def explain(file: Path, which: int, as_json: bool) -> None:
    """Explain a plan term by term: what it is, its law, what the law says of this plan, and where it is derived.

    PLAN.json is what `dtlib plan MODEL --gpus N --json > PLAN.json` writes. Seconds and bytes are counted again with
    the model, the machine and the constants of the file, and must come out as there; `dtlib ledger` shows what held
    each law. With --mtbf and --storage, or --critical-batch, the laws of saves or of the goal stand below.

    Exit code 0, or 2 for a file that is not such an answer, or no longer.
    """
    try:
        model, plan, terms, beside = _read(file, which)
    except ValueError as error:
        raise click.UsageError(f"PLAN.json {file}: {error}") from error
    if as_json:
        everything: dict[str, Sequence[Term | Told]] = {**terms, **beside}
        told = {name: [asdict(each) for each in found] for name, found in everything.items()}
        click.echo(json.dumps({"model": model.name, "plan": asdict(plan), **told}, indent=2, ensure_ascii=False))
    else:
        _print(model, plan, terms, beside)


def _read(file: Path, which: int) -> tuple[Architecture, Plan, dict[str, list[Term]], dict[str, list[Told]]]:
    """Model, plan and terms of an answer's plan, and what was asked beside; ``ValueError`` that says what is wrong with
    the file."""
    from dtlib.theory.models import Architecture
    from dtlib.theory.planner import Constants, Machine, Plan, laws, plan_memory, step_time
    from dtlib.theory.valid import at_most

    said = read_json(file, "it")
    wanted = ("model", "machine", "constants", "plans")
    lacks = [name for name in wanted if not isinstance(said, dict) or name not in said]
    if lacks:
        raise ValueError(f"it is not what dtlib plan --json writes: it has no {lacks[0]}")
    if not isinstance(said["plans"], list):
        raise ValueError(f"plans must be a list, not {said['plans']!r}")
    if not said["plans"]:
        raise ValueError("its plans are none: dtlib plan found none that fits")
    if not 1 <= which <= len(said["plans"]):
        raise ValueError(f"--plan must be from 1 to {len(said['plans'])}, the plans of the file, not {which}")
    model, machine = _made(Architecture, said["model"], "model"), _made(Machine, said["machine"], "machine")
    at_most("model.num_layers", model.num_layers, MOST_LAYERS)
    constants, found = _made(Constants, said["constants"], "constants"), said["plans"][which - 1]
    if not isinstance(found, dict) or not {"plan", "seconds", "bytes"} <= set(found):
        raise ValueError(f"plan {which} must have its plan, seconds and bytes")
    plan = _made(Plan, found["plan"], "plan")
    time, memory = step_time(model, plan, machine, constants), plan_memory(model, plan, constants)
    for name, parts in (("seconds", time), ("bytes", memory)):
        counted = {**parts.parts, "total": parts.total}
        if found[name] != counted:
            differ = next(term for term in counted if not _same(found[name], term, counted[term]))
            there = found[name].get(differ) if isinstance(found[name], dict) else found[name]
            raise ValueError(
                f"its {name} of {differ} are {there}, but are counted as {counted[differ]}: it was changed, or written "
                "by another version of the planner"
            )
    return model, plan, {
        "seconds": laws.explained(time, model, plan, laws.OF_TIME),
        "bytes": laws.explained(memory, model, plan, laws.OF_MEMORY),
    }, _beside(said, which, model, plan, time.total)  # fmt: skip


def _beside(said: Mapping[str, Any], which: int, model: Architecture, plan: Plan, step: float) -> dict[str, list[Told]]:
    """The laws of the saves, told of the fastest plan, and of the goal, where the file has them."""
    from dtlib.theory.planner import Goal, Keeping
    from dtlib.theory.planner.goal import goal_of
    from dtlib.theory.planner.keeping import kept

    found = {}
    if which == 1 and "keeping" in said:
        saves = _made(Keeping, said["keeping"], "keeping")
        _recounted(
            "keeping is", saves, lambda: kept(model, plan, step, saves.mtbf, saves.save_bytes / saves.save_seconds)
        )
        found["saves"] = _of_saves(saves, step)
    if "goals" in said:
        goals = said["goals"]
        if not isinstance(goals, list) or len(goals) != len(said["plans"]):
            raise ValueError("goals must be a list, one for each plan")
        goal = _made(Goal, goals[which - 1], "goals")
        asked: Any = said.get("critical_batch"), said.get("min_tokens")
        _recounted("goals are", goal, lambda: goal_of(plan, plan.sequences * plan.seq_of(model), step, *asked))
        found["goal"] = _of_goal(goal)
    return found


def _recounted(name: str, there: Any, count: Callable[[], Any]) -> None:
    """``ValueError`` unless `there` is what it is counted as; `name` is its name in the file, with its verb."""
    try:
        pairs = zip(asdict(there).values(), asdict(count()).values(), strict=True)
        close = all(one == two or math.isclose(one, two, rel_tol=1e-9) for one, two in pairs)
    except (TypeError, ValueError, ArithmeticError):
        close = False
    if not close:
        raise ValueError(f"its {name} counted otherwise: the file was changed, or written by another version")


def _of_saves(kept: Keeping, step_seconds: float) -> list[Told]:
    """The laws of a job's saves and of what failures leave of its time."""
    from dtlib.theory.units import format_bytes

    apart = f"{kept.steps:,} steps, the job fails each {kept.mtbf / 3600:,.1f} hours"
    behind = f"each in {kept.save_seconds:,.1f} s, steps between two: {kept.behind_steps:,}, copies not counted"
    return [
        _told("a save", format_bytes(kept.save_bytes, digits=3), "reliability.save_bytes",
              "weights and what the optimizer keeps, of all that is trained, once", f"{kept.save_seconds:,.1f} s"),
        _told("apart", f"{kept.steps * step_seconds / 60:,.1f} min", "reliability.best_interval",
              "work between two saves that loses the least", apart),
        _told("goodput", _part(kept.goodput), "reliability.goodput",
              "the time that is lasting work", f"each save stops the run for {kept.save_seconds:,.1f} s"),
        _told("behind", _part(kept.behind_goodput), "reliability.background_goodput",
              "the same where saves are written while the run goes on", behind),
    ]  # fmt: skip


def _of_goal(goal: Goal) -> list[Told]:
    """The laws of a goal that is reached with a plan's batch."""
    share = f"the batch is {goal.batch_share:.3g} of the critical one"
    return [
        _told("tokens", f"{1 + goal.batch_share:.3g}×", "batch.examples_needed", "over the least of the goal", share),
        _told("steps", f"{1 + 1 / goal.batch_share:.3g}×", "batch.steps_needed", "over the least of the goal", share),
    ]


def _part(share: float) -> str:
    """A share that is neither none nor all, rounded to neither."""
    return "< 0.01%" if share < 0.00005 else "> 99.99%" if share >= 0.99995 else f"{share:.2%}"


def _told(name: str, amount: str, law: str, meaning: str, number: str) -> Told:
    from dtlib.theory.formula import formulas

    return Told(name, amount, law, meaning, number, formulas()[law].chapter)


def _same(found: Any, term: str, counted: float) -> bool:
    return isinstance(found, Mapping) and found.get(term) == counted


def _made(kind: type[Any], said: Any, where: str) -> Any:
    """An object from what `dataclasses.asdict` made of it; ``ValueError`` that names the field."""
    if not isinstance(said, Mapping):
        raise ValueError(f"{where} must be an object, not {said!r}")
    known, hints = {each.name for each in fields(kind)}, get_type_hints(kind)
    if unknown := sorted(set(said) - known):
        raise ValueError(f"{where}.{unknown[0]} is unknown")
    given = {}
    for name, value in said.items():
        kinds = [each for each in (get_args(hints[name]) or (hints[name],)) if each is not NoneType]
        nested: Any = next((each for each in kinds if is_dataclass(each)), None)
        of_object = nested is not None and (isinstance(value, Mapping) or len(kinds) == 1) and value is not None
        given[name] = _made(nested, value, f"{where}.{name}") if of_object else value
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is damaged: {error}") from error


def _print(model: Architecture, plan: Plan, terms: Mapping[str, list[Term]], beside: Mapping[str, list[Told]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from dtlib.theory.footprint import DEGREES
    from dtlib.theory.planner.laws import recompute_of
    from dtlib.theory.units import format_bytes, format_seconds

    console = Console(highlight=False)
    degrees = ", ".join(f"{name} {getattr(plan, name)}" for name in (*DEGREES, "zero"))
    degrees += f" among {plan.shard} ranks each" * (plan.shard is not None)
    degrees += ", sequence parallel" * plan.sequence_parallel + f", {plan.schedule}" * (plan.pp > 1)
    habits = (
        ("gathered inputs kept", plan.keep_gathered),
        ("messages of tp behind products", plan.tp_overlap),
        (f"products in {plan.precision}", plan.precision != "bf16"),
        (f"attention as a {plan.attention}", plan.attention == "matrix"),
        (f"adapters of rank {plan.adapters.rank} trained alone" if plan.adapters else "", plan.adapters),
        ("optimizer states on the host", plan.offload),
    )
    console.print(
        f"{escape(model.name)}: {degrees}, {plan.micro_batches} × {plan.micro_batch} sequences, "
        f"recompute {recompute_of(plan)}" + "".join(f", {words}" for words, has in habits if has), soft_wrap=True,
    )  # fmt: skip
    for name, form, words in (("seconds", format_seconds, "a step"), ("bytes", format_bytes, "the fullest rank")):
        console.print(f"\n[bold]{words}: {form(sum(each.value for each in terms[name]))}[/]")
        for each in terms[name]:
            console.print(f"{each.name:18} {form(each.value):>10} {each.share:6.1%}  {each.formula}", soft_wrap=True)
            console.print(f"    {each.meaning}: {each.number} (chapter {each.chapter})", soft_wrap=True)
    for name, words in (("saves", "what failures leave"), ("goal", "the batch and a goal")):
        if name in beside:
            console.print(f"\n[bold]{words}[/]")
        for one in beside.get(name, ()):
            console.print(f"{one.name:18} {one.amount:>10}         {one.formula}", soft_wrap=True)
            console.print(f"    {one.meaning}: {one.number} (chapter {one.chapter})", soft_wrap=True)
