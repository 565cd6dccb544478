"""Published runs in fp8: no constant was fitted to any of them.

Dense models have one scale for each tensor; their rows with scales of blocks or rows are left out, and those that do
not print their precision. Models with experts have MXFP8 too, whose scales of 32 entries the cards' products take.
Rows are read as those in 16 bits of the same tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dtlib.theory import hardware, models
from dtlib.theory.planner import plan_memory
from dtlib.theory.timing import Machine, Plan

from . import published
from .published import Row
from .run import Run


def _mpt(row: Row) -> list[Run]:
    return published.KEPT_BACK["llmfoundry_mpt_half"]({**row, "precision": "bf16"}) if "fp8" in row["precision"] else []


def _torchtitan(row: Row) -> list[Run]:
    """Llama 3; pipelines gather weights once a step, in micro-batches of one sequence."""
    how = row["technique"]
    if "fp8" not in how or "rowwise" in how:
        return []
    (run,) = published.KEPT_BACK["torchtitan_half"]({**row, "technique": how.replace("fp8", "")})
    plan, card = run.plans[0], hardware.accelerator("H200" if row["table"] == "h200" else "H100")
    if plan.pp > 1:
        v = 2 if "Interleaved" in how else 1
        plan = plan.changed(
            zero=2, micro_batch=1, micro_batches=plan.micro_batch, chunks=v, tp_overlap="Async" in how,
            schedule="interleaved" if v > 1 else "1F1B",
        )  # fmt: skip
    return [replace(run, plans=(plan,), machine=replace(run.machine, accelerator=card))]


_MODELS = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3-405b"}
_NODES = {"DGX-H100": ("H100", 8), "DGX-B200": ("B200", 8), "DGX-GB200": ("GB200", 64)}


def _megatron_bridge(row: Row) -> list[Run]:
    """Models with experts as those in 16 bits; dense ones. What was computed again of these is not printed: nothing,
    since with everything all would be a quarter and more faster than they can be. Those that need twice their card like
    this computed some again, and are left out."""
    tensorwise = row["Precision"].split()[:1] in (["FP8"], ["FP8-CS"])
    if (tensorwise or row["Precision"] in ("MXFP8", "FP8-MX")) and row["kind"].startswith("Pre-Training"):
        experts = published.KEPT_BACK["megatron_bridge_half"]({**row, "Precision": "BF16"})
        if experts:
            return experts
    if not tensorwise or row["model"] not in _MODELS or row["System"] not in _NODES or row["kind"].startswith("LoRA"):
        return []
    model, (card, node), gpus = models.model(_MODELS[row["model"]]), _NODES[row["System"]], int(row["#-GPUs"])
    degrees: dict[str, Any] = {axis.lower(): int(row[axis]) for axis in ("TP", "PP", "CP")}
    dp, b, seq = gpus // math.prod(degrees.values()), int(row["MBS"]), int(row["Sequence Length"])
    v = int(row["VP"]) if row["VP"] != "n/a" and degrees["pp"] > 1 else 1
    plan = Plan(
        **degrees, dp=dp, zero=3 if row["FSDP"] not in ("", "0") else 1, micro_batch=b, seq=seq,
        micro_batches=int(row["GBS"]) // dp // b, chunks=v, schedule="interleaved" if v > 1 else "1F1B",
        sequence_parallel=degrees["tp"] > 1, tp_overlap=degrees["tp"] > 1,
    )  # fmt: skip
    seconds = plan.sequences * seq / gpus / float(row["Tokens / sec / GPU"].split()[0])
    machine = Machine(accelerator=hardware.accelerator(card), gpus=gpus, node=node)
    if plan_memory(model, plan).total > 2 * machine.accelerator.memory_bytes:
        return []
    return [Run(model, (plan,), machine, seconds)]


_LAYOUT = re.compile(r"TP(\d+) PP(\d+) VPP(\d+) EP(\d+) MBS(\d+) GBS(\d+) seq (\d+)")


def _moe(row: Row) -> list[Run]:
    """The rows that print all of a layout: DeepSeek-V3 on 256 GB200, one job as its software was tuned.

    The rates are taken to count the 250 GFLOP a token that another row of the table has. The others lack the
    micro-batch or the sequence, or are another's schedule (DualPipe)."""
    layout = _LAYOUT.fullmatch(row["layout"])
    if layout is None:
        return []
    tp, stages, chunks, ep, b, batch, seq = map(int, layout.groups())
    model, gpus = replace(models.model("deepseek-v3"), mtp_modules=0), int(row["gpus"])
    dp = gpus // tp // stages
    plans = tuple(
        Plan(
            dp=dp, tp=tp, pp=stages, ep=ep, zero=1, micro_batch=b, micro_batches=batch // dp // b, chunks=chunks,
            schedule="interleaved", seq=seq, recompute=again,
        )
        for again in ("none", "selective", "full")
    )  # fmt: skip
    seconds = batch * seq * 0.25 / gpus / float(row["model_tflops_per_gpu"])
    machine = Machine(accelerator=hardware.accelerator(row["accelerator"]), gpus=gpus, node=64)
    return [Run(model, plans, machine, seconds)]


TABLES: Mapping[str, Callable[[Row], list[Run]]] = MappingProxyType(
    {
        "llmfoundry_mpt_half": _mpt,
        "torchtitan_half": _torchtitan,
        "megatron_bridge_half": _megatron_bridge,
        "moe_training_throughput": _moe,
    }
)
"""The tables that have such rows."""


def runs(table: str, rows: Iterable[Row]) -> list[Run]:
    """The runs in fp8 that `rows` of `table` describe; ``ValueError`` for a table that is not in `TABLES`."""
    if table not in TABLES:
        raise ValueError(f"table must be one of {', '.join(TABLES)}, not {table!r}")
    found = (run for row in rows for run in TABLES[table](row))
    in_fp8 = (replace(run, plans=tuple(plan.changed(precision="fp8") for plan in run.plans)) for run in found)
    return [replace(run.fitting(), table=table) for run in in_fp8]
