"""``dtlib plan``: the best way to train a model on a number of cards, and why not otherwise."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    CARDS,
    FRAMEWORKS,
    LINKS,
    InGroups,
    card_memory_option,
    chosen_adapters,
    chosen_card,
    chosen_model,
    chosen_network,
    in_unit,
    reason,
    recipe_option,
    size_options,
    training_options,
    with_flags,
)
from .space import DEGREES, choice_options, chosen_framework, chosen_space, degree_options

if TYPE_CHECKING:
    from dtlib.theory.calibration.measured import Refit
    from dtlib.theory.models import Architecture
    from dtlib.theory.planner import Answer, Found, Goal, Keeping, Machine, Plan, Training

# numpy, rich and dtlib.theory are imported by the functions that need them: --help answers at once.

_MOST_TOKENS = 1e18
"""More are nobody's: all text there is has fewer."""

_HEADINGS = {
    "gpus": "Cards",
    "seq": "Training",
    "framework": "The answer",
    "tokens": "The whole run",
    "dp": "Look only at",
    "card_memory": "A card, a network or a model of your own",
}


@click.command(cls=InGroups, headings=_HEADINGS)
@click.argument("model")
@click.option("--gpus", type=int, required=True, help="Cards in all.")
@click.option("--card", default="H100", show_default=True, help=f"One of {', '.join(CARDS)}.")
@click.option(
    "--node",
    type=int,
    default=8,
    show_default=True,
    help="Cards that their own link joins; in racks of GB200 up to 72.",
)
@click.option(
    "--network",
    default="InfiniBand NDR",
    show_default=True,
    help=f"Link to other nodes: {' or '.join(LINKS)}.",
)
@click.option("--seq", type=int, help="Tokens of a sequence.  [default: the model's]")
@click.option("--batch", type=int, help="Sequences of a step.  [default: 4 million tokens, or 1024 a card]")
@recipe_option("18-byte")
@training_options
@click.option(
    "--imbalance",
    type=float,
    default=1,
    show_default=True,
    help="Tokens that the busiest rank of experts gets, over the mean.",
)
@click.option("--mtp", type=int, help="Modules that predict further tokens.  [default: none]")
@click.option("--tp-overlap", is_flag=True, help="Messages of tp travel behind its products, in eight pieces.")
@click.option("--attention", default="flash", show_default=True, help="flash, or matrix: kept as a matrix.")
@click.option(
    "--framework",
    help=f"Without what it does not run (above), with its constants: {', '.join(FRAMEWORKS)} (torchtitan is fsdp).  "
    "[default: every plan, with megatron's constants]",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV of runs of your own: the constants that they decide are fitted to them. Columns above.",
)
@click.option("--keep", type=int, default=5, show_default=True, help="Plans to show, and a simpler one that ties.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, in bytes and seconds.")
@click.option("--tokens", type=float, help="Tokens of the whole run: days, energy and cost are told.")
@click.option(
    "--critical-batch",
    type=float,
    metavar="TOKENS",
    help="Tokens of a step at which a goal takes twice its least tokens, and twice its least steps.",
)
@click.option(
    "--min-tokens",
    type=float,
    metavar="TOKENS",
    help="Tokens that the goal takes with a small batch: days to it are told. Needs --critical-batch.",
)
@click.option("--mtbf", type=float, metavar="HOURS", help="Mean time between failures of a node: saves are told.")
@click.option("--storage", type=float, metavar="GB/s", help="What all cards together write. Needs --mtbf.")
@click.option("--price", type=float, help="Price of a card for an hour.")
@click.option("--watts", type=float, help="Power of a card.  [default: its design power, if published]")
@degree_options
@choice_options
@card_memory_option
@click.option("--card-rate", type=float, metavar="TFLOP/s", help="Dense products in 16 bits.")
@click.option("--card-memory-rate", type=float, metavar="TB/s", help="A card's memory.")
@click.option("--card-link", type=float, metavar="GB/s", help="A card's link in one direction.")
@click.option("--host-link", type=float, metavar="GB/s", help="A card's link to the host, one direction.")
@click.option("--host-memory", type=float, metavar="GB/s", help="A node's memory.  [default: its generation's]")
@click.option("--network-rate", type=float, metavar="GB/s", help="A card's port to the network, one direction.")
@size_options
def plan(
    model: str,
    tokens: float | None,
    critical_batch: float | None,
    min_tokens: float | None,
    mtbf: float | None,
    storage: float | None,
    price: float | None,
    watts: float | None,
    measured: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the fastest plans for MODEL on so many cards.

    MODEL is a published model (dtlib memory --list) or a file of hyperparameters as model hubs publish it
    (config.json). Every degree, ZeRO stage, micro-batch, schedule and recompute is timed, with sequence parallelism
    (+sp) and with one that keeps what it gathers (+sp*). The fastest that fit are shown, each with the margin of its
    memory, and with what it has that none of the runs had from which the margin is. Of a model with experts, ep of the
    dp ranks share them, and what their exchange takes is an estimate that no run was held to.
    Times come from formulas and the constants of --framework, which were fitted to published runs of it. By what runs
    of one regime were off, each left out of the fit, is the interval of a time; what no run was like is told. Plans
    that tie with the fastest are marked ≈: first those whose time runs hold, of them the simplest, with the fewest axes
    and the commonest schedule. Whether those marked ≟ are slower nobody knows, since they or the fastest have no
    interval.

    With --critical-batch B* a step of B tokens is taken to need 1 + B*/B times the least steps of a goal, and so 1 +
    B/B* times its least tokens: cards that double the batch save a quarter of the steps at B*, and less beyond, for
    half as many tokens more, and more beyond. B* is measured by runs to one goal, and grows during a run. Measured as
    the gradient's noise scale (chapter "batch size") it may be far off: in published runs that was from a twentieth of
    B* to eight times as much, and for OLMo less by orders of magnitude.

    With --framework megatron none has schedule ZB-H1, sequence-parallel keep, or zero 2, 3 with a pipeline (TP, EP and
    CP are listed with its FSDP, PP is not); with nanotron none has zero 2, 3, shard node, schedule interleaved, ZB-H1,
    recompute some, offload, or lora; with fsdp none has zero 1 (0 is its DDP, replicate); with deepspeed none has
    schedule interleaved, ZB-H1, sequence-parallel keep, zero 2, 3 with a pipeline, shard below zero 3, or cp (Ulysses
    is not planned, cp is a ring): by their documentation, and all else is looked at, also what they may not run.

    --measured FILE has a row for each run, on such cards, nodes and network: gpus, mbs (sequences of a micro-batch),
    grad_acc (micro-batches of a rank), tok_s_gpu (tokens a second and card). It may have model and seq (else MODEL and
    its), tp, pp, cp, ep and chunks (else 1), zero (else 0), recompute and sequence_parallel (else none), shard and
    recompute_layers (else all); recipe, precision, attention, adapters, offload and what travels behind products are
    the command's. A constant that the rows do not decide stays, and is named.

    With --precision fp8, attention, norms, the head, messages, states and what is kept stay as in bf16. Recipes with
    scales of blocks (mx, nvfp4) or rows are not planned.
    Of LoRA a token takes 4Ψ operations, not 6Ψ: no matrix of the model needs a gradient of its own.
    With --offload it is taken that nothing hides what travels to the host and back, and that the link and the host's
    memory reach the rates of their standards: no run is known that this was held to.
    No inference is planned.

    Exit code 0, or 2 for what is not possible.
    """
    from dtlib.theory import hardware, planner
    from dtlib.theory.units import GB

    try:
        if tokens is None and (price is not None or watts is not None):
            raise ValueError("tokens must be given where --price or --watts is")
        if critical_batch is None and min_tokens is not None:
            raise ValueError("critical_batch must be given where --min-tokens is")
        space, framework = chosen_space(given), chosen_framework(given) or "megatron"
        if (mtbf is None) != (storage is None):
            lacks, has = ("storage", "mtbf") if storage is None else ("mtbf", "storage")
            raise ValueError(f"{lacks} must be given where --{has} is")
        for name, number in (("tokens", tokens), ("critical_batch", critical_batch), ("min_tokens", min_tokens)):
            if number is not None and number > _MOST_TOKENS:
                raise ValueError(f"{name} must be at most {_MOST_TOKENS:.0e}, not {number:g}")
        for name in ("host_link", "host_memory"):
            if given[name] is not None and not given["offload"]:
                raise ValueError(f"offload must be given where --{name.replace('_', '-')} is")
        architecture = chosen_model(model, given)
        memory = given["host_memory"]
        machine = planner.Machine(
            accelerator=chosen_card(given["card"], given),
            gpus=given["gpus"],
            node=given["node"],
            network=chosen_network(given),
            host_memory_bytes_per_s=None if memory is None else GB * in_unit("host_memory", memory),
        )
        like = planner.Plan(precision=given["precision"], adapters=chosen_adapters(given), offload=given["offload"],
                            tp_overlap=given["tp_overlap"], attention=given["attention"])  # fmt: skip
        refit = None if measured is None else _refit(measured, architecture, machine, given, like, framework)
        answer = planner.search(
            architecture,
            machine,
            sequences=given["batch"],
            seq=given["seq"],
            recipe=given["recipe"],
            keep=given["keep"],
            degrees={name: given[name] for name in DEGREES if given[name] is not None},
            imbalance=given["imbalance"],
            space=space,
            constants=None if refit is None else refit.constants,
            framework=framework,
            like=like,
        )
        goals = None
        if critical_batch is not None:
            of = answer.plans if as_json else answer.shown
            goals = [planner.toward_goal(answer, each, critical_batch, min_tokens) for each in of]
        kept = None
        if mtbf is not None and storage is not None:
            kept = planner.keeping(answer, 3600 * in_unit("mtbf", mtbf), GB * in_unit("storage", storage))
        run = None
        if tokens is not None:
            if 0 < tokens < answer.tokens:
                raise ValueError(f"tokens must be at least those of a step, {answer.tokens:,}, not {tokens:g}")
            if watts is None:  # a card that flags change still draws the power of the one it is made from
                watts = hardware.POWER_WATTS.get(hardware.accelerator(given["card"]).name)
            run = planner.training(answer, tokens, price_per_card_hour=price, watts=watts)
    except ValueError as error:
        raise click.UsageError(with_flags(str(error), plan)) from error
    if as_json:
        asked = {} if goals is None else {"critical_batch": critical_batch, "min_tokens": min_tokens}
        click.echo(json.dumps(_as_dict(answer, run, goals, kept, refit) | asked, indent=2, ensure_ascii=False))
    else:
        defaults = {f"{name}_given": given[name] is not None for name in ("seq", "batch")}
        _print(answer, run, goals, kept, refit, defaults)


def _refit(
    file: Path, model: Architecture, machine: Machine, given: dict[str, Any], like: Plan, framework: str
) -> Refit:
    """The constants that runs of one's own decide; ``ValueError`` for a file that has none."""
    from dtlib.theory.calibration import fitting, measured
    from dtlib.theory.planner import profile

    try:
        text = file.read_text(encoding="utf-8-sig")
        heading = text.partition("\n")[0]
        table = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=heading.count))
        names, rows = table.fieldnames or (), list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"measured {file} cannot be read: {reason(error)}") from error
    try:
        measured.once(names)
        runs = measured.read(rows, model, machine, given["recipe"], node=given["node"], as_plan=like)
        constants = fitting.HABITS.get(framework, (None, fitting.TIME_CONSTANTS))[1]
        return measured.refitted(runs, profile(framework), constants)
    except ValueError as error:
        raise ValueError(f"measured {file}: {error}") from error


def _as_dict(
    answer: Answer, run: Training | None, goals: list[Goal] | None, kept: Keeping | None, refit: Refit | None
) -> dict[str, Any]:
    def found(each: Found) -> dict[str, Any]:
        return {
            "plan": asdict(each.plan),
            "seconds": {**each.time.parts, "total": each.time.total},
            "bytes": {**each.memory.parts, "total": each.memory.total},
            "fit": each.fit.as_dict(),
            "interval": asdict(each.interval),
            "ties": answer.best.ties(each),
            "unknown": answer.best.unknown(each),
            "mfu": answer.mfu(each),
            "bottleneck": each.bottleneck,
        }

    second = answer.plans[1] if len(answer.plans) > 1 else None
    return {
        "model": asdict(answer.model),
        "machine": asdict(answer.machine),
        "constants": asdict(answer.constants),
        "sequences": answer.sequences,
        "tokens_per_step": answer.tokens,
        "looked_at": answer.looked_at,
        "plans": [found(each) for each in answer.plans],
        "simpler": found(answer.simpler) if answer.simpler else None,
        "framework": answer.framework,
        "space": asdict(answer.space),
        "second_lost_seconds": answer.lost_to(second) if second else None,
        "too_large": found(answer.too_large) if answer.too_large else None,
        "buys_seconds": answer.buys,
        "training": asdict(run) if run else None,
        **({} if goals is None else {"goals": [asdict(each) for each in goals]}),
        **({} if kept is None else {"keeping": asdict(kept)}),
        **({} if refit is None else {"measured": asdict(refit)}),
    }


def _print(
    answer: Answer, run: Training | None, goals: list[Goal] | None, kept: Keeping | None, refit: Refit | None,
    defaults: dict[str, bool],
) -> None:  # fmt: skip
    from rich.console import Console
    from rich.table import Table

    from dtlib.theory.memory import recipe as as_recipe
    from dtlib.theory.models import model_parameters

    from . import told

    console = Console(highlight=False)
    recipe = as_recipe(answer.best.plan.recipe).name
    number = f"{model_parameters(answer.model).total:,} parameters"
    console.print(f"{answer.model.name}: {number}, {recipe} recipe", soft_wrap=True)
    machine = answer.machine
    across = f", {machine.network.name} between nodes" if machine.gpus > machine.node else ""
    console.print(f"{machine.gpus:,} × {machine.accelerator.name}, {machine.node} a node{across}")
    if refit is not None:
        console.print(told.of_refit(refit))
    console.print(f"{told.head(answer, **defaults)}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in told.columns(answer):
        table.add_column(column, justify="left" if column in ("schedule", "again") else "right", no_wrap=True)
    for each in answer.shown:
        table.add_row(*told.row(answer, each))
    console.print(table)
    console.print("\n[bold]the fastest plan[/]")
    terms = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left", "right"):
        terms.add_column(justify=justify)  # type: ignore[arg-type]
    for time, memory in zip_longest(*told.terms(answer.best)):
        left = (time[0], time[1], f"{time[2]:.1%}") if time else ("", "", "")
        terms.add_row(*left, *(("  " + memory[0], memory[1]) if memory else ("", "")))
    console.print(terms)
    console.print()
    for sentence in told.sentences(answer):
        console.print(sentence)
    for sentence in [] if goals is None else told.of_goal(answer, goals):
        console.print(sentence)
    if kept is not None:
        console.print(told.of_keeping(answer, kept))
    if run is not None:
        _print_run(console, run, answer.mfu(answer.best))


def _print_run(console: Any, run: Training, mfu: float) -> None:
    said = f"The run: {run.steps:,.0f} steps, {run.seconds / 86400:,.1f} days at an MFU of {mfu:.1%}"
    if run.energy_joules is not None:
        said += f", {run.energy_joules / 3.6e9:,.1f} MWh of the cards at most"
    if run.cost is not None:
        said += f", a price of {run.cost:,.0f}"
    console.print(said + ".")
