"""``dtlib memory``: the bytes of every rank of a job, before anybody pays for one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dtlib.theory.footprint import RankMemory, Setup
    from dtlib.theory.hardware import Accelerator
    from dtlib.theory.models import Architecture

# numpy, rich and dtlib.theory are imported by the functions that need them: --help answers at once.


def _list_models(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the models and leave."""
    if not wanted or context.resilient_parsing:
        return
    from rich.console import Console
    from rich.table import Table

    from dtlib.theory.models import MODELS, model_parameters

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "parameters", "layers", "hidden", "heads", "source"):
        table.add_column(name, justify="left" if name in ("model", "source") else "right")
    for model in MODELS.values():
        numbers = (model_parameters(model).total, model.num_layers, model.hidden, model.num_heads)
        table.add_row(model.name, *(f"{number:,}" for number in numbers), model.source)
    Console().print(table)
    context.exit()


@click.command()
@click.option("--model", "name", metavar="NAME", help="A published model, for example llama3-70b.")
@click.option("--dp", type=int, default=1, show_default=True, help="Ranks of data parallelism.")
@click.option("--zero", type=int, default=0, show_default=True, help="Stage of ZeRO, 0 to 3, over these ranks.")
@click.option("--tp", type=int, default=1, show_default=True, help="Ranks that split each matrix.")
@click.option("--sequence-parallel", is_flag=True, help="Split what lies between the matrices, too.")
@click.option("--pp", type=int, default=1, show_default=True, help="Stages of the pipeline (1F1B).")
@click.option("--chunks", type=int, default=1, show_default=True, help="Interleaved pieces of a stage.")
@click.option("--recipe", default="16-byte", show_default=True, help="Bytes a parameter: 12, 16, 18, 20, fp32, 8bit.")
@click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences of one micro-batch.")
@click.option("--micro-batches", type=int, help="Micro-batches of a rank in a step.  [default: one a stage]")
@click.option("--seq", type=int, help="Tokens of a sequence.  [default: the model's]")
@click.option("--recompute", default="none", show_default=True, help="none, selective or full.")
@click.option("--attention", default="flash", show_default=True, help="flash, or matrix: kept as a matrix.")
@click.option("--dropout", is_flag=True, help="Train with dropout, and keep its masks.")
@click.option("--pipeline-stage", type=int, help="Count this stage, from 0.  [default: the fullest]")
@click.option("--gpu", help="Say whether it fits, for example H100.")
@click.option("--json", "as_json", is_flag=True, help="Print the breakdown as JSON, in bytes.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_models, help="List the models and exit."
)
def memory(name: str | None, pipeline_stage: int | None, gpu: str | None, as_json: bool, **options: Any) -> None:
    """Say what one rank of a job keeps in memory, part by part.

    Model states, activations, and the modules that are whole for a moment, on the fullest rank. Buffers of the
    communication library, gaps of the allocator and the runtime's own memory come on top.

    Exit code 0, or 2 for a name or a degree that is not possible.
    """
    from dtlib.theory import hardware, models
    from dtlib.theory.footprint import Setup, memory_by_stage

    if name is None:
        raise click.UsageError(f"--model is missing; there are {', '.join(models.MODELS)}")
    try:
        model, setup = models.model(name), Setup(**options)
        device = hardware.accelerator(gpu) if gpu else None
        stages = memory_by_stage(model, setup)
        if pipeline_stage is not None and not 0 <= pipeline_stage < setup.pp:
            raise ValueError(f"pipeline-stage must be from 0 to {setup.pp - 1}, not {pipeline_stage}")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    fullest = max(range(setup.pp), key=lambda stage: stages[stage].total)
    stage = fullest if pipeline_stage is None else pipeline_stage
    if as_json:
        click.echo(json.dumps(_as_dict(model, setup, stage, stages[stage], device), indent=2, ensure_ascii=False))
    else:
        _print(model, setup, stage, stages[stage], device)


def _as_dict(
    model: Architecture, setup: Setup, stage: int, found: RankMemory, device: Accelerator | None
) -> dict[str, Any]:
    from dtlib.theory.models import model_parameters

    told: dict[str, Any] = {
        "model": model.name,
        "num_params": model_parameters(model).total,
        "parameters": model_parameters(model).parts,
        "setup": {**asdict(setup), "micro_batches": setup.num_micro_batches, "seq": setup.seq_of(model)},
        "world_size": setup.world_size,
        "pipeline_stage": stage,
        "bytes": found.parts,
        "states_bytes": found.states,
        "activations_bytes": found.activations,
        "transient_bytes": found.transient,
        "total_bytes": found.total,
    }
    if device is not None:
        told["device"] = {
            "name": device.name,
            "memory_bytes": device.memory_bytes,
            "fits": found.total <= device.memory_bytes,
            "largest_micro_batch": _largest_micro_batch(model, setup, device),
        }
    return told


def _print(model: Architecture, setup: Setup, stage: int, found: RankMemory, device: Accelerator | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from dtlib.theory.models import model_parameters
    from dtlib.theory.units import GB, format_bytes

    console = Console(highlight=False)
    psi, degrees = model_parameters(model).total, f"dp {setup.dp} × tp {setup.tp} × pp {setup.pp}"
    ranks = f"{setup.world_size:,} ranks ({degrees}), ZeRO stage {setup.zero}"
    console.print(f"{model.name}: {psi:,} parameters on {ranks}", soft_wrap=True)
    whose = f"on a rank of pipeline stage {stage}" if setup.pp > 1 else "on each rank"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in ((whose, "left"), ("bytes", "right"), ("share", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for part in found.table():
        table.add_row(part.name, format_bytes(part.value), f"{part.share:.1%}")
    table.add_section()
    table.add_row("[bold]total[/]", f"[bold]{format_bytes(found.total)}[/]", f"{found.total / GB:.1f} GB")
    console.print(table)
    if device is None:
        return
    largest = _largest_micro_batch(model, setup, device)
    verdict = "[green]fits[/]" if found.total <= device.memory_bytes else "[red]does not fit[/]"
    most = f"micro-batches of up to {largest} would" if largest else "no micro-batch would"
    console.print(f"It {verdict} the {device.memory_bytes / GB:.0f} GB of {device.name}; {most}.", soft_wrap=True)


def _largest_micro_batch(model: Architecture, setup: Setup, device: Accelerator) -> int:
    from dtlib.theory.footprint import largest_micro_batch

    return largest_micro_batch(model, setup, device.memory_bytes)
