"""``dtlib memory``: the bytes of every rank of a job, before anybody pays for one."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import click

from .memory_job import Job
from .options import (
    CARDS,
    MOST,
    SCHEDULES,
    InGroups,
    card_memory_option,
    chosen_adapters,
    chosen_card,
    chosen_model,
    recipe_option,
    size_options,
    training_options,
    with_flags,
)

if TYPE_CHECKING:
    from dtlib.theory.hardware import Accelerator
    from dtlib.theory.models import Architecture
    from dtlib.theory.planner import Plan

# numpy, rich and dtlib.theory are imported by the functions that need them: --help answers at once.


def _list_models(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the models and leave."""
    if not wanted or context.resilient_parsing:
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from dtlib.theory.models import MODELS, active_parameters, model_parameters

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "parameters", "active", "layers", "hidden", "heads"):
        table.add_column(name, justify="left" if name == "model" else "right")
    sources: dict[str, list[str]] = {}
    for model in MODELS.values():
        sizes = (model.num_layers, model.hidden, model.num_heads)
        numbers = (model_parameters(model).total, active_parameters(model).total, *sizes)
        table.add_row(model.name, *(f"{number:,}" for number in numbers))
        sources.setdefault(model.source, []).append(model.name)
    console = Console()
    console.print(table)
    for source, names in sources.items():
        console.print(f"\n[bold]{escape(source)}[/]: {', '.join(names)}", highlight=False)
    context.exit()


_HEADINGS = {
    "dp": "Ranks",
    "seq": "Training",
    "model": "The answer",
    "card_memory": "A card or a model of your own",
}


@click.command(cls=InGroups, headings=_HEADINGS)
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("--dp", type=int, default=1, show_default=True, help="Ranks of data parallelism.")
@click.option(
    "--zero", type=int, default=0, show_default=True, help="Stage of ZeRO, 0 to 3, over the ranks of dp and cp."
)
@click.option("--shard", type=int, help="Ranks of dp and cp that share the states, the others copies.  [default: all]")
@click.option("--tp", type=int, default=1, show_default=True, help="Ranks that split each matrix.")
@click.option("--sequence-parallel", is_flag=True, help="Split what lies between the matrices, too.")
@click.option("--keep-gathered", is_flag=True, help="Keep the inputs that it gathers.  [default: gather them again]")
@click.option("--pp", type=int, default=1, show_default=True, help="Stages of the pipeline.")
@click.option("--schedule", help=f"{', '.join(SCHEDULES)}.  [default: 1F1B, with --chunks interleaved]")
@click.option("--chunks", type=int, default=1, show_default=True, help="Interleaved pieces of a stage.")
@click.option("--cp", type=int, default=1, show_default=True, help="Ranks that share each sequence.")
@click.option("--ep", type=int, default=1, show_default=True, help="Of the ranks of dp, those that share the experts.")
@click.option("--seq", type=int, help="Tokens of a sequence.  [default: the model's]")
@click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences of one micro-batch.")
@click.option("--micro-batches", type=int, help="Micro-batches of a rank in a step.  [default: one a stage]")
@recipe_option("18-byte")
@training_options
@click.option("--recompute", default="none", show_default=True, help="none, selective or full.")
@click.option("--recompute-layers", type=int, help="With full: so many layers of each piece.  [default: all]")
@click.option("--attention", default="flash", show_default=True, help="flash, or matrix: kept as a matrix.")
@click.option(
    "--imbalance",
    type=float,
    default=1,
    show_default=True,
    help="Tokens of the busiest rank of ep: so many times the mean.",
)
@click.option("--mtp", type=int, help="Modules that predict further tokens.  [default: none]")
@click.option("--dropout", is_flag=True, help="Train with dropout, and keep its masks.")
@click.option("--model", metavar="NAME", help="The same as MODEL.")
@click.option("--pipeline-stage", type=int, help="Count this stage, from 0.  [default: the fullest]")
@click.option("--card", help=f"Say whether it fits: {', '.join(CARDS)}.")
@click.option("--gpu", help="The same as --card.")
@click.option("--json", "as_json", is_flag=True, help="Print the breakdown as JSON, in bytes.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_models, help="List the models and exit."
)
@card_memory_option
@size_options
def memory(name: str | None, model: str | None, pipeline_stage: int | None, as_json: bool, **given: Any) -> None:
    """Say what one rank of a job keeps in memory, part by part.

    MODEL is a published model (--list) or a file of hyperparameters as model hubs publish it (config.json). Told are
    model states, activations, and what is whole for a moment, on the fullest rank. Buffers of the communication
    library, gaps of the allocator and the runtime's own memory come on top. With them, and with constants that were
    fitted to published runs, the number is the one of dtlib plan: the error of those runs is its margin, and what none
    of them had makes the verdict unknown. --card-memory changes the card, an H100 where none is named.

    Of a model with experts, each rank of ep holds as many of them, tp splits each as other matrices, and ZeRO shards
    these over the dp · cp/ep ranks that hold the same ones. No token is dropped.

    Exit code 0, or 2 for a name or a degree that is not possible.
    """
    from dtlib.theory import models
    from dtlib.theory.footprint import memory_by_stage
    from dtlib.theory.planner import Machine, plan_memory
    from dtlib.theory.planner.memory import more_in_flight
    from dtlib.theory.timing.layer import fp8_speedup

    if name is None and model is None:
        raise click.UsageError(f"--model is missing; --list shows the {len(models.MODELS)} that there are")
    gpu, card = given.pop("gpu"), given.pop("card")
    try:
        for one, other, words in ((name, model, "MODEL or --model"), (card, gpu, "--card or --gpu")):
            if one is not None and other is not None and one != other:
                raise ValueError(f"{words} must be given, not both: {one!r} and {other!r}")
        for each in ("dp", "seq", "micro_batch", "micro_batches"):
            if (given[each] or 0) > MOST:
                raise ValueError(f"{each} must be at most {MOST:,}, not {given[each]}")
        if given["keep_gathered"] and not given["sequence_parallel"]:
            raise ValueError("sequence_parallel must be given where --keep-gathered is")
        architecture = chosen_model(str(name or model), given)
        plan = _plan(given)
        device = _device(gpu if card is None else card, given)
        if device is not None and plan.precision == "fp8":
            fp8_speedup(Machine(accelerator=device, gpus=1))  # refuses a card without
        stages = [
            replace(each, layer_activations=each.layer_activations * more_in_flight(plan, stage))
            for stage, each in enumerate(memory_by_stage(architecture, plan))
        ]
        most = max(map(max, plan.pieces(architecture)))
        if plan.recompute_layers is not None and plan.recompute_layers > most:
            raise ValueError(f"recompute_layers must be at most {most}, a piece's, not {plan.recompute_layers}")
        if pipeline_stage is not None and not 0 <= pipeline_stage < plan.pp:
            raise ValueError(f"pipeline_stage must be from 0 to {plan.pp - 1}, not {pipeline_stage}")
        job = Job(architecture, plan, stages, pipeline_stage, device, plan_memory(architecture, plan))
    except ValueError as error:
        named = "card" if gpu is None else "gpu", "MODEL" if model is None else "--model"
        raise click.UsageError(with_flags(str(error), memory, card=named[0], model=named[1])) from error
    if as_json:
        click.echo(json.dumps(_as_dict(job), indent=2, ensure_ascii=False))
    else:
        _print(job)


def _plan(given: dict[str, Any]) -> Plan:
    """The options that say how is trained, as the planner has them."""
    from dtlib.theory.lookup import find
    from dtlib.theory.planner import Plan

    options = {each.name: given[each.name] for each in fields(Plan) if each.name in given}
    if options["schedule"] is None:
        options["schedule"] = "interleaved" if options["chunks"] > 1 else "1F1B"
    pp, chunks, m = options["pp"], options["chunks"], options["micro_batches"]
    schedule = find("schedule", options["schedule"], {each: each for each in SCHEDULES})
    if pp == 1 and schedule != "1F1B" and given["schedule"]:
        raise ValueError(f"schedule must be 1F1B with pp=1, not {schedule}")
    if schedule == "interleaved" and chunks == 1:
        raise ValueError("chunks must be above 1 with schedule=interleaved, not 1")
    if schedule != "interleaved" and chunks > 1:
        raise ValueError(f"schedule must be interleaved with chunks={chunks}, not {schedule}")
    if schedule == "ZB-H1" and m is not None and m < pp:
        raise ValueError(f"micro_batches must be {pp} or more with pp={pp} and schedule=ZB-H1, not {m}")
    options |= {"schedule": schedule, "micro_batches": max(pp, 1) if m is None else m}
    return Plan(**options, adapters=chosen_adapters(given))


def _device(card: str | None, given: dict[str, Any]) -> Accelerator | None:
    """The card that was asked about, or None."""
    if card is None and given["card_memory"] is None:
        return None
    return chosen_card("H100" if card is None else card, given)


def _as_dict(job: Job) -> dict[str, Any]:
    from dtlib.theory.footprint import host_states
    from dtlib.theory.models import active_parameters, model_parameters
    from dtlib.theory.planner import margin_of

    model, device, planned = job.model, job.device, job.planned
    told: dict[str, Any] = {
        "model": model.name,
        "num_params": model_parameters(model).total,
        "parameters": model_parameters(model).parts,
        "active_params": active_parameters(model).total,
        "setup": {**asdict(job.plan), "seq": job.plan.seq_of(model)},
        "world_size": job.plan.world_size,
        "pipeline_stage": job.stage,
        "bytes": job.shown.parts,
        "states_bytes": job.shown.states,
        "activations_bytes": job.shown.activations,
        "transient_bytes": job.shown.transient,
        "total_bytes": job.shown.total,
        **({"host_bytes": host_states(model, job.plan)} if job.plan.offload else {}),
        "planned": {
            "bytes": planned.parts,
            "total_bytes": planned.total,
            "margin_bytes": margin_of(job.plan) * planned.total,
        },
    }
    if device is not None:
        told["device"] = {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "fullest_stage": job.fullest,
            "fullest_bytes": job.most_bytes,
            "verdict": job.fit(device).verdict,
            "largest_micro_batch": job.largest_micro_batch(device),
        }
        told["planned"]["fit"] = job.fit(device).as_dict()
    return told


def _print(job: Job) -> None:
    from rich.console import Console
    from rich.table import Table

    from dtlib.theory.memory import recipe as as_recipe
    from dtlib.theory.units import GB, format_bytes

    from . import told

    plan, found = job.plan, job.shown
    console = Console(highlight=False)
    degrees = f"dp {plan.dp} × tp {plan.tp} × pp {plan.pp}"
    degrees += f" × cp {plan.cp}" if plan.cp > 1 else ""
    degrees += f", experts over ep {plan.ep} of dp" if plan.ep > 1 else ""
    degrees += f", {told.schedule(plan)}" if plan.pp > 1 and plan.schedule != "1F1B" else ""
    ranks = f"{plan.world_size:,} {'rank' if plan.world_size == 1 else 'ranks'} ({degrees}), ZeRO stage {plan.zero}"
    ranks += f" among {plan.shard} each (hybrid)" * (plan.shard is not None)
    tokens = f"{plan.micro_batch:,} × {plan.seq_of(job.model):,} tokens in a micro-batch"
    tokens += "" if plan.seq else " (the model's own length)"
    tokens += f", {as_recipe(plan.recipe).name} recipe" + f", products in {plan.precision}" * (plan.precision != "bf16")
    card = "" if job.device is None else f", for {job.device.name}"
    console.print(f"{job.model.name}: {_counted(job.model)} on {ranks}, {tokens}{card}", soft_wrap=True)
    if plan.adapters is not None:
        trained = job.model.num_layers * plan.adapters.layer_parameters(job.model)
        console.print(f"Trained are adapters of rank {plan.adapters.rank}: {trained:,} parameters.")
    whose = f"on a rank of pipeline stage {job.stage}" if plan.pp > 1 else "on each rank"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in ((whose, "left"), ("bytes", "right"), ("share", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for part in found.table():
        table.add_row(part.name, format_bytes(part.value), f"{part.share:.1%}")
    table.add_section()
    table.add_row("[bold]total[/]", f"[bold]{format_bytes(found.total)}[/]", f"{found.total / GB:.1f} GB")
    console.print(table)
    if plan.recompute == "selective" and plan.attention == "flash":
        console.print("--recompute selective changes nothing here: flash attention keeps no matrix.", soft_wrap=True)
    for assumed in _of_experts(job):
        console.print(assumed, soft_wrap=True)
    for kept in told.of_host(job.model, plan, min(8, plan.world_size)):
        console.print(kept, soft_wrap=True)
    fit = None if job.device is None else job.fit(job.device)
    console.print(told.margin(job.planned, job.plan, job.model, fit), soft_wrap=True)
    if job.device is not None and (most := job.largest_micro_batch(job.device)):
        sequences = f"{most:,} sequence{'s' if most > 1 else ''}"
        console.print(f"The largest micro-batch that fits {job.device.name} with the margin has {sequences}.")


def _counted(model: Architecture) -> str:
    """The parameters of `model`, and how many of them a token meets."""
    from dtlib.theory.models import active_parameters, model_parameters

    found, active = model_parameters(model), active_parameters(model).total
    said = [f"{found.total:,} parameters"]
    if found.mtp:
        said.append(f"{found.mtp:,} of them in modules that predict further tokens")
    if active < found.total:
        said.append(f"{active:,} active (with both embeddings)")
    return ", ".join(said) + ("," if len(said) > 1 else "")


def _of_experts(job: Job) -> list[str]:
    """What is assumed of the load, of the exchange, of what a layer keeps, and of how experts are split."""
    from dtlib.theory import threed
    from dtlib.theory.activations import layer_activations
    from dtlib.theory.units import format_bytes

    plan, experts, said = job.plan, job.model.experts, []
    if experts is None:
        return []
    if plan.ep > 1:
        even = "as many tokens as each other one"
        load = even if plan.imbalance == 1 else f"{plan.imbalance:g} times the mean of tokens"
        said.append(
            f"The busiest rank of ep is taken to get {load}: --imbalance {plan.imbalance:g}. No token is dropped. The "
            f"all-to-all is an upper bound: {experts.top_k} copies of a token, one for each of its experts."
        )
    if plan.recompute != "full":
        written_out = layer_activations(
            job.model, plan.micro_batch, seq=plan.tokens_of(job.model), tp=plan.tp, attention=plan.attention,
            sequence_parallel=plan.sequence_parallel, recompute=plan.recompute, dropout=plan.dropout,
            imbalance=plan.imbalance, with_experts=True,
        )  # fmt: skip
        ours = threed.layer_bytes(job.model, plan, with_experts=True)
        said.append(
            f"A layer with experts is counted as plainly written: {format_bytes(written_out.total)} a micro-batch. "
            "With ranks.ep, which keeps a token once a rank and computes what follows the activation again: "
            f"{format_bytes(ours)}."
        )
    if plan.tp > 1:
        said.append(f"Each expert is split over tp {plan.tp}, as other matrices: none is whole on a rank.")
    return said
