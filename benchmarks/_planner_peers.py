"""Other ways to say how long a step takes and what it needs, asked for the plan of a published run.

`mlsysim` and `llm-analysis` come with the extra ``benchmarks-planner``. They keep their defaults; what is told to them
of a run says `TOLD`. Each answer is None where a tool has no way to express the run.
"""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from dtlib.theory import planner
from dtlib.theory.calibration import published
from dtlib.theory.hardware import Accelerator
from dtlib.theory.models import active_parameters, model_parameters
from dtlib.theory.planner import FITTED, Plan

Asked = Callable[[published.Run, Plan], float | None]


@dataclass(frozen=True)
class Tool:
    """What answers: the seconds of a step, the bytes of a rank (none: it does not say), and what it was told.

    A `bare` one says how long a step takes at best, and becomes an estimate with one fitted utilisation.
    """

    name: str
    seconds: Asked
    memory_bytes: Asked | None
    told: str
    bare: bool = False


def tools() -> list[Tool]:
    """All that can be asked here; an extra that is not installed is left out."""
    found = [
        Tool("this planner", _profiled, _planner_bytes, "the run's framework"),
        Tool("this planner, one set", _one_set, None, "nothing of the framework: Megatron's constants for all"),
        Tool("6Ψ a token", _rule_of_thumb, None, "parameters, tokens and the peak of the data sheet", bare=True),
        Tool("roofline", _roofline, None, "each part at its data sheet's rate, hidden where it may be", bare=True),
    ]
    for name, peer in PEERS.items():
        try:
            tool = peer(f"{name} {importlib.metadata.version(name)}")
            found.append(replace(tool, seconds=cache(tool.seconds)))
        except ImportError:
            continue
    return found


def _profiled(run: published.Run, plan: Plan) -> float:
    return planner.step_time(run.model, plan, run.machine, planner.profile(run.framework)).total


def _one_set(run: published.Run, plan: Plan) -> float:
    return planner.step_time(run.model, plan, run.machine).total


def _planner_bytes(run: published.Run, plan: Plan) -> float:
    """Without what the runtime takes, which an allocator does not see."""
    return planner.plan_memory(run.model, plan).total - FITTED.runtime_bytes


def _tokens(run: published.Run, plan: Plan) -> int:
    return plan.sequences * plan.seq_of(run.model)


def _rule_of_thumb(run: published.Run, plan: Plan) -> float:
    flops = 6 * active_parameters(run.model).total * _tokens(run, plan)
    return flops / run.machine.gpus / run.machine.accelerator.half_flop_per_s


ON_PAPER = replace(
    FITTED, matmul_share=1.0, operand_passes=1e-9, attention_share=1.0, kept_passes=1.0, inside_share=1.0,
    across_share=1.0, overlap_share=1.0, contention_share=1e-9, layer_host_seconds=1e-9, step_host_seconds=1e-9,
)  # fmt: skip
"""Constants of a machine that is as its data sheet says: a product takes its operations, a message its bytes."""


def _on_paper(card: Accelerator) -> Accelerator:
    return replace(card, measured_half_flop_per_s=card.half_flop_per_s)


def _roofline(run: published.Run, plan: Plan) -> float:
    machine = replace(run.machine, accelerator=_on_paper(run.machine.accelerator))
    return planner.step_time(run.model, plan, machine, ON_PAPER).total


def _expressible(plan: Plan) -> bool:
    """Neither of the two knows context parallelism."""
    return plan.cp == 1


def _mlsysim(name: str) -> Tool:
    import mlsysim
    from mlsysim.core.units import Q_
    from mlsysim.models.types import SparseTransformerWorkload, TransformerWorkload
    from mlsysim.solvers import DistributedModel, TrainingMemoryModel
    from mlsysim.systems.registry import Fabrics, Nodes
    from mlsysim.systems.types import Fleet

    nodes = {"A": (Nodes.DGX_A100, Fabrics.InfiniBand_HDR), "H": (Nodes.DGX_H100, Fabrics.InfiniBand_NDR)}

    def workload(run: published.Run) -> TransformerWorkload:
        model, size = run.model, model_parameters(run.model)
        sizes = {
            "name": model.name, "architecture": "Transformer", "parameters": Q_(size.total, "count"),
            "layers": model.num_layers, "hidden_dim": model.hidden, "heads": model.num_heads,
            "kv_heads": model.num_kv_heads, "vocab_size": model.vocab,
        }  # fmt: skip
        if model.experts is None:
            return TransformerWorkload(**sizes)
        return SparseTransformerWorkload(
            **sizes, active_parameters=Q_(active_parameters(model).total, "count"), experts=model.experts.num_experts,
            active_experts_per_token=model.experts.top_k,
        )  # fmt: skip

    def fleet(run: published.Run) -> Fleet:
        node, fabric = nodes[run.machine.accelerator.name[0]]
        node = node.model_copy(update={"accelerators_per_node": run.machine.node})
        return Fleet(name="run", node=node, count=run.machine.gpus // run.machine.node, fabric=fabric)

    def common(run: published.Run, plan: Plan) -> Mapping[str, int]:
        return {
            "batch_size": plan.sequences, "tp_size": plan.tp, "pp_size": plan.pp, "ep_size": plan.ep,
            "zero_stage": plan.zero, "seq_len": plan.seq_of(run.model),
        }  # fmt: skip

    def seconds(run: published.Run, plan: Plan) -> float | None:
        if not _expressible(plan) or run.machine.accelerator.name[0] not in nodes or plan.ep > 1:
            return None
        with warnings.catch_warnings(action="ignore"):
            found = DistributedModel().solve(
                workload(run), fleet(run), **common(run, plan), v_stages=plan.chunks,
                microbatch_count=plan.micro_batches, activation_recomputation=plan.recompute == "full",
            )  # fmt: skip
        return float(found.step_latency_total.m_as("second"))

    def memory_bytes(run: published.Run, plan: Plan) -> float | None:
        if not _expressible(plan) or run.machine.accelerator.name[0] not in nodes or plan.ep > 1:
            return None
        in_flight = max(1, plan.micro_batches // plan.pp)  # as its own distributed model asks
        found = TrainingMemoryModel().solve(
            workload(run), fleet(run).node.accelerator, dp_size=plan.dp, **common(run, plan),
            activation_checkpointing="full" if plan.recompute == "full" else "selective",
            gradient_accumulation_steps=in_flight, sequence_parallel=plan.sequence_parallel or plan.tp == 1,
        )  # fmt: skip
        return float(found.total_memory.m_as("byte"))

    assert mlsysim.__version__ in name
    told = (
        "sizes and parameters, its own DGX node and InfiniBand, degrees, ZeRO, batch, micro-batches, chunks, full "
        "recompute; its default efficiency of 0.5"
    )
    return Tool(name, seconds, memory_bytes, told)


def _llm_analysis(name: str) -> Tool:
    logging.disable(logging.WARNING)
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name

    cards = {"A": "a100-sxm-80gb", "H": "h100-sxm-80gb"}

    def asked(run: published.Run, plan: Plan) -> Mapping[str, float] | None:
        model, card = run.model, cards.get(run.machine.accelerator.name[0])
        if not _expressible(plan) or card is None or model.experts is not None:
            return None
        config = ModelConfig(
            name=model.name, num_layers=model.num_layers, n_head=model.num_heads, hidden_dim=model.hidden,
            vocab_size=model.vocab, max_seq_len=plan.seq_of(model), num_key_value_heads=model.num_kv_heads,
            ffn_embed_dim=model.ffn_hidden, expansion_ratio=model.ffn_hidden / model.hidden,
        )  # fmt: skip
        degrees = ParallelismConfig(
            tp_size=plan.tp, pp_size=plan.pp, dp_size=plan.dp, sp_size=plan.tp if plan.sequence_parallel else 1
        )
        kept = {"none": "NONE", "selective": "SELECTIVE", "full": "FULL"}[plan.recompute]
        return LLMAnalysis(config, get_gpu_config_by_name(card), parallelism_config=degrees).training(
            batch_size_per_gpu=plan.micro_batch, gradient_accumulation_steps=plan.micro_batches,
            global_batch_size=plan.sequences, seq_len=plan.seq_of(model), flash_attn=plan.attention == "flash",
            activation_recomputation=ActivationRecomputation[kept], ds_zero=DSZeRO(plan.zero),
            softmax_dropout=plan.dropout, mlp_gated_linear_units=model.gated,
        )  # fmt: skip

    def answer(of: str) -> Asked:
        def ask(run: published.Run, plan: Plan) -> float | None:
            try:
                found = asked(run, plan)
            except AssertionError:  # its way to refuse
                return None
            return None if found is None else float(found[of])

        return ask

    told = (
        "sizes, its own card, degrees, ZeRO, micro-batch and their number, kind of attention, recompute; its default "
        "efficiency of 1, without a pipeline's bubble and messages"
    )
    return Tool(name, answer("latency_per_iter"), answer("(weight+op_state+grad+act)_memory_per_gpu"), told)


PEERS = {"mlsysim": _mlsysim, "llm-analysis": _llm_analysis}
"""Tools of others: the name on the index, and what asks them."""
