"""The tables that the planner is held to: what each row was.

Rows are dictionaries of text, as ``csv.DictReader`` gives them. Where a row does not say the micro-batch, the planner's
own choice stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dtlib.theory import hardware, models
from dtlib.theory.hardware import Link
from dtlib.theory.memory import paper_flops_per_step, training_flops_per_token
from dtlib.theory.models import Architecture
from dtlib.theory.planner import plan_memory
from dtlib.theory.timing import Machine, Plan
from dtlib.theory.units import GB, TFLOP, GiB

from .run import Run, mean_error

__all__ = ["EVERY", "KEPT_BACK", "TABLES", "Row", "Run", "mean_error", "runs", "ultrascale"]

Row = Mapping[str, str]


_OMNI_PATH = Link("Omni-Path, four for eight cards", 6.25 * GB, "BigScience, Jean Zay")
_NETWORKS = {"A": "InfiniBand HDR", "H": "InfiniBand NDR"}


def _machine(name: str, gpus: int) -> Machine:
    """So many cards called `name`, nodes of eight, with the network of their generation."""
    card = hardware.accelerator(name)
    return Machine(accelerator=card, gpus=gpus, network=hardware.link(_NETWORKS[card.name[0]]))


def _counts(row: Row, *names: str) -> dict[str, Any]:
    return {name: int(row[name]) for name in names}


_SIZES = {"num_layers": "layers", "hidden": "hidden", "num_heads": "heads", "vocab": "vocab", "seq": "seq"}
_SHARDED = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def _sizes(row: Row) -> dict[str, Any]:
    """What a row prints of its model."""
    return {ours: int(row[theirs]) for ours, theirs in _SIZES.items()}


def _sc21(row: Row) -> list[Run]:
    """Attention as a matrix, dropout, everything computed again; the published rate counts that."""
    model = models.gpt(f"sc21-{row['params_B']}b", **_sizes(row))
    plan = Plan(
        **_counts(row, "tp", "pp", "dp"), micro_batch=int(row["mbs"]), micro_batches=int(row["microbatches"]),
        chunks=int(row["v"]), schedule="interleaved" if int(row["v"]) > 1 else "1F1B", recompute="full",
        attention="matrix", dropout=True, seq=int(row["seq"]), recipe="16-byte",
    )  # fmt: skip
    flops = paper_flops_per_step(
        int(row["gbs"]), model.num_layers, model.hidden, int(row["seq"]), model.vocab, full_recompute=True
    )
    gpus = int(row["gpus"])
    return [Run(model, (plan,), _machine("A100", gpus), flops / gpus / float(row["tflops_per_gpu"]) / TFLOP)]


def _korthikanti(row: Row) -> list[Run]:
    """Two measurements a row: everything computed again, and sequence parallelism with attention's core again."""
    model, gpus = models.gpt(f"korthikanti-{row['model'].lower()}", **_sizes(row)), int(row["gpus"])
    tp, stages = int(row["tp"]), int(row["pp"])
    v = int(row["interleave_m"])
    dp = gpus // tp // stages
    plan = Plan(
        tp=tp, pp=stages, dp=dp, micro_batch=int(row["mbs"]), micro_batches=int(row["gbs"]) // int(row["mbs"]) // dp,
        chunks=v, schedule="interleaved" if v > 1 else "1F1B", recompute="full", attention="matrix", dropout=True,
        seq=int(row["seq"]), recipe="18-byte",
    )  # fmt: skip
    machine = _machine("A100", gpus)
    split = plan.changed(recompute="selective", sequence_parallel=True)
    return [
        Run(model, (plan,), machine, float(row["iter_full_recompute_s"])),
        Run(model, (split,), machine, float(row["iter_sp_selective_s"])),
    ]


def _llama3(row: Row) -> list[Run]:
    """405B; the published rate is taken to count 6 operations a parameter and attention behind its causal mask."""
    model, gpus = models.model("llama3-405b"), int(row["gpus"])
    dp, stages, m, seq = int(row["dp"]), int(row["pp"]), int(row["bs_per_dp"]), int(row["seq"])
    plans = tuple(
        Plan(
            **_counts(row, "tp", "cp", "pp", "dp"), micro_batches=m, seq=seq, chunks=v, zero=1, sequence_parallel=True,
            schedule="interleaved" if v > 1 else "1F1B",
        )
        for v in ((2, 4, 8) if m % stages == 0 else (1,))
    )  # fmt: skip
    num_params = models.model_parameters(model).total
    flops = training_flops_per_token(num_params, model.num_layers, model.hidden, seq, causal=True).model
    seconds = flops * dp * m * seq / gpus / float(row["tflops_per_gpu"]) / TFLOP
    return [Run(model, plans, _machine("H100", gpus), seconds)]


def _megatron_h100(row: Row) -> list[Run]:
    """Micro-batch and chunks are not published: the planner's own choice. ZeRO stage 1, sequence parallelism."""
    model = models.gpt(f"megatron-h100-{row['model'].lower()}", **_sizes(row), tied=False)
    gpus = int(row["gpus"])
    dp, stages = int(row["dp"]), int(row["pp"])
    per_rank = int(row["gbs"]) // dp
    plans = tuple(
        Plan(
            **_counts(row, "tp", "pp", "dp"), zero=1, sequence_parallel=int(row["tp"]) > 1, micro_batch=b,
            micro_batches=per_rank // b, chunks=v, schedule="interleaved" if v > 1 else "1F1B", seq=int(row["seq"]),
            tp_overlap=True,
        )
        for b in (1, 2, 4, 8)
        if per_rank % b == 0
        for v in ((1,) if stages == 1 else (1, 2, 3, 6))
        if v == 1 or per_rank // b % stages == 0
    )  # fmt: skip
    flops = paper_flops_per_step(int(row["gbs"]), model.num_layers, model.hidden, int(row["seq"]), model.vocab)
    return [Run(model, plans, _machine("H100", gpus), flops / gpus / float(row["tflops_per_gpu"]) / TFLOP)]


def _mpt(row: Row) -> list[Run]:
    """FSDP, flash attention, no dropout."""
    gpus, seq, card = int(row["gpus"]), int(row["seq"]), f"{row['gpu'].replace('_', ' ')} sxm"
    model = replace(models.model(f"mpt-{row['model']}"), seq=seq)
    plan = Plan(
        dp=gpus, zero=_SHARDED[row["sharding"]], micro_batch=int(row["mbs"]), micro_batches=int(row["grad_accum"]),
        seq=seq, recompute="full" if row["act_ckpt"] == "True" else "none", early_stop=True, recipe="16-byte",
    )  # fmt: skip
    seconds = plan.sequences * seq / gpus / float(row["tok_s_gpu"])
    return [Run(model, (plan,), _machine(card, gpus), seconds, framework="fsdp")]


def ultrascale(row: Row) -> Run:
    """A run of the sweep, with its memory; one that failed has infinite seconds, and none.

    nanotron splits tokens as well, cuts stages by their cost, and adds the gradients of a micro-batch late.
    """
    name, tied = f"ultrascale-{row['model'].lower()}", row["tied"] == "1"
    model = models.llama(name, **_sizes(row), ffn_hidden=int(row["ffn"]), tied=tied)
    gpus, tp = int(row["gpus"]), int(row["tp"])
    plan = Plan(
        **_counts(row, "dp", "tp", "pp", "zero"), micro_batch=int(row["mbs"]), micro_batches=int(row["grad_acc"]),
        sequence_parallel=tp > 1, seq=int(row["seq"]), sums_late=True, balance="cost",
    )  # fmt: skip
    plan = plan.changed(keep_gathered=tp > 1 and _kept(model, plan))
    if row.get("status", "ok") != "ok":
        return Run(model, (plan,), _machine("H100", gpus), np.inf, framework="nanotron")
    seconds = plan.sequences * int(row["seq"]) / gpus / float(row["tok_s_gpu"])
    return Run(model, (plan,), _machine("H100", gpus), seconds, float(row["mem_GiB"]) * GiB, "nanotron")


def _kept(model: Architecture, plan: Plan) -> bool:
    """Whether a run of the sweep kept its gathered inputs: an earlier version did, a later one gathers them again.

    Which of the two ran is not printed. The memory of the rows says: the later one with two stages, over 32 tensor
    ranks with stages, on 512 cards with stages or with 8 or 16 tensor ranks, and where keeping needs more than the card
    has, or, without stages over nodes on two or four replicas, more than half of it.
    """
    if plan.pp == 2 or (plan.pp > 1 and plan.tp == 32):
        return False
    if plan.world_size >= 512 and (plan.pp > 1 or plan.tp in (8, 16)):
        return False
    half = plan.pp == 1 and plan.tp > 8 and plan.dp in (2, 4)
    room = hardware.accelerator("H100").memory_bytes / (2 if half else 1)
    return plan_memory(model, plan.changed(keep_gathered=True)).total <= room


def _sc21_table2(row: Row) -> list[Run]:
    """Megatron-LM and ZeRO-3 side by side: chunks are not printed, so the planner chooses them."""
    layers, hidden, heads = {"174.6": (96, 12288, 96), "529.6": (105, 20480, 128)}[row["params_B"]]
    name = f"sc21-{row['params_B']}b"
    model = models.gpt(name, num_layers=layers, hidden=hidden, num_heads=heads, vocab=51200, seq=2048)
    gpus, parallel, batch, b = (int(row[each]) for each in ("gpus", "model_parallel", "gbs", "mbs"))
    tp, stages = (1, 1) if parallel == 1 else (8, parallel // 8)
    dp = gpus // tp // stages
    m = batch // dp // b
    plans = tuple(
        Plan(
            dp=dp, tp=tp, pp=stages, zero=3 if parallel == 1 else 0, micro_batch=b, micro_batches=m, chunks=v,
            schedule="interleaved" if v > 1 else "1F1B", recompute="full", attention="matrix", dropout=True,
            recipe="16-byte",
        )
        for v in (1, 2, 3)
        if v == 1 or (stages > 1 and m % stages == 0)
    )  # fmt: skip
    flops = paper_flops_per_step(batch, layers, hidden, 2048, 51200, full_recompute=True)
    seconds = flops / gpus / float(row["tflops_per_gpu"]) / TFLOP
    return [Run(model, plans, _machine("A100", gpus), seconds, framework="deepspeed" if parallel == 1 else "megatron")]


def _torchtitan(row: Row) -> list[Run]:
    """Llama 3 on H100."""
    model, gpus, seq = models.model(f"llama3-{row['model'].lower()}"), int(row["gpus"]), int(row["seq"])
    plan = Plan(
        **_counts(row, "tp", "pp", "cp"), dp=int(row["fsdp"]), zero=3, micro_batch=int(row["local_bs"]), seq=seq,
        sequence_parallel=int(row["tp"]) > 1, tp_overlap="async" in row["technique"], recipe="16-byte",
        recompute="full" if row["act_ckpt"] == "full" else "selective",
    )  # fmt: skip
    seconds = plan.sequences * seq / gpus / float(row["tok_s_gpu"])
    return [Run(model, (plan,), _machine("H100", gpus), seconds, framework="fsdp")]


def _bloom(row: Row) -> list[Run]:
    """Megatron-DeepSpeed on A100 with Omni-Path, rows that ran: full recompute, ZeRO 1 unless a row says otherwise.

    A row whose printed rate is not that of its time and batch is none. Where heads are not printed they are taken to
    be 64: a row that prints 64 takes as long as its twin that does not.
    """
    if not row["check_ratio_eq3_over_pub"] or abs(float(row["check_ratio_eq3_over_pub"]) - 1) > 0.05:
        return []
    nodes, hidden, dp = int(row["nodes8gpu"]), int(row["hidden"]), int(row["dp"] or 1)
    heads, b = int(row["heads"] or 64), int(row["mbs"])
    m, rest = divmod(int(row["gbs"]), dp * b)
    model = models.gpt(f"bloom-{row['size']}", num_layers=int(row["layers"]), hidden=hidden, num_heads=heads,
                       vocab=250_880, seq=2048)  # fmt: skip
    plan = Plan(
        dp=dp, **_counts(row, "tp", "pp"), zero=int(row["zero"] or 1) if dp > 1 else 0, micro_batch=b, micro_batches=m,
        recompute="full", attention="matrix", dropout=True, recipe="18-byte",
    )  # fmt: skip
    machine = replace(_machine("A100", 8 * nodes), network=_OMNI_PATH)
    return [] if rest else [Run(model, (plan,), machine, float(row["sec_per_it"]), framework="deepspeed")]


def _ultrascale_half(row: Row) -> list[Run]:
    """Runs that ran, but for one of more stages than layers."""
    return [ultrascale(row)] if row["status"] == "ok" and int(row["pp"]) <= int(row["layers"]) else []


_EXPERTS = {
    "GPT OSS 120B": "gpt-oss-120b", "DeepSeekV3 (w/o MTP)": "deepseek-v3", "DeepSeekV3": "deepseek-v3",
    "Qwen3_235B_a22B": "qwen3-235b-a22b", "Qwen3_30B_a3B": "qwen3-30b-a3b",
}  # fmt: skip
_NODES = {"DGX-H100": ("H100", 8), "DGX-B200": ("B200", 8), "DGX-GB200": ("GB200", 64)}


def _megatron_bridge(row: Row) -> list[Run]:
    """Models with experts in 16 bits. What was computed again is not printed: the planner chooses.

    Where ep does not divide dp, the cards of an expert are laid out in a way that the row does not say."""
    if row["Precision"] != "BF16" or row["model"] not in _EXPERTS or row["System"] not in _NODES:
        return []
    model, (card, node) = models.model(_EXPERTS[row["model"]]), _NODES[row["System"]]
    if row["model"] != "DeepSeekV3":
        model = replace(model, mtp_modules=0)
    degrees, gpus, b = _counts(row, "TP", "PP", "CP", "EP"), int(row["#-GPUs"]), int(row["MBS"])
    dp = gpus // math.prod(degrees[axis] for axis in ("TP", "PP", "CP"))
    if dp % degrees["EP"]:
        return []
    chunks = int(row["VP"]) if row["VP"] != "n/a" and degrees["PP"] > 1 else 1
    plans = tuple(
        Plan(
            **{axis.lower(): size for axis, size in degrees.items()}, dp=dp, zero=1, micro_batch=b, recompute=again,
            micro_batches=int(row["GBS"]) // dp // b, chunks=chunks, seq=int(row["Sequence Length"]),
            schedule="interleaved" if chunks > 1 else "1F1B",
        )
        for again in ("none", "selective", "full")
    )  # fmt: skip
    seconds = plans[0].sequences * int(row["Sequence Length"]) / gpus / float(row["Tokens / sec / GPU"])
    machine = Machine(accelerator=hardware.accelerator(card), gpus=gpus, node=node)
    return [Run(model, plans, machine, seconds)]


KEPT_BACK: Mapping[str, Callable[[Row], list[Run]]] = MappingProxyType(
    {
        "ultrascale_half": _ultrascale_half,
        "llmfoundry_mpt_half": lambda row: _mpt(row) if row["precision"].endswith("bf16") else [],
        "torchtitan_half": lambda row: _torchtitan(row) if "fp8" not in row["technique"] else [],
        "sc21_table2": _sc21_table2,
        "bloom_prequel_half": _bloom,
        "megatron_bridge_half": _megatron_bridge,
    }
)
"""Tables that none of Megatron's constants was fitted on: of their rows those that ran, in 16 bits."""

TABLES: Mapping[str, Callable[[Row], list[Run]]] = MappingProxyType(
    {
        "sc21_table1": _sc21,
        "korthikanti_table3_5": _korthikanti,
        "llama3_table4": _llama3,
        "megatron_h100_model_table": _megatron_h100,
        "llmfoundry_mpt_a100": _mpt,
    }
)
"""The tables whose step times the planner is held to; a row of each is one run or two."""

EVERY: Mapping[str, Callable[[Row], list[Run]]] = MappingProxyType(
    {**TABLES, **KEPT_BACK, "ultrascale_small": lambda row: [ultrascale(row)]}
)
"""All tables of step times; the constants of other frameworks than Megatron were fitted on those kept back too."""


def runs(table: str, rows: Iterable[Row]) -> list[Run]:
    """The runs that `rows` of `table` describe; ``ValueError`` for a table that is not in `EVERY`."""
    if table not in EVERY:
        raise ValueError(f"table must be one of {', '.join(EVERY)}, not {table!r}")
    return [replace(run.fitting(), table=table) for row in rows for run in EVERY[table](row)]
