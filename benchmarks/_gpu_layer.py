"""One layer of Llama 3 8B on one card: seconds and bytes beside what the course's formulas say of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._gpu_clock import Clock, Spread, ratio
from dtlib import theory
from dtlib.ranks import activations
from dtlib.ranks.model import GPT, GPTConfig
from dtlib.theory.models import Architecture
from dtlib.theory.timing import Machine, Plan, step_time

HOW = ("none", "selective", "full")
WIDTHS = replace(theory.activations.PAPER, statistic=2, log_sum_exp=4)
"""What the course's layer keeps on a card: its norm's one number a token in bf16, flash attention's in fp32."""


def built(clock: Clock, model: Architecture, num_layers: int = 1) -> GPT:
    """The course's GPT with the layers of `model` in bf16, whose embedding is not used."""
    config = GPTConfig(
        num_layers=num_layers, hidden=model.hidden, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
        seq=model.seq, vocab=16, rms_norm=True, swiglu=True, rotary=True, biases=False, mlp_ratio=1,
        dtype=torch.bfloat16,
    )  # fmt: skip
    gpt = GPT(config)
    for block in gpt.blocks:  # widths that are no multiple of the model's
        block.mlp.up = nn.Linear(model.hidden, 2 * model.ffn_hidden, bias=False, dtype=config.dtype)
        block.mlp.down = nn.Linear(model.ffn_hidden, model.hidden, bias=False, dtype=config.dtype)
    return gpt.to(clock.device)


@contextmanager
def flash(clock: Clock) -> Iterator[None]:
    """Flash attention and no other, where there is a card."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if clock.on_card else nullcontext():
        yield


def requested() -> int:
    """Bytes of all tensors on the card, as the allocator was asked for them."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def bytes_of(clock: Clock, gpt: GPT, x_bsh: Tensor) -> dict[str, Any]:
    """What the layers keep after a forward pass, and the most that there is during the step, by the allocator."""
    gpt.zero_grad(set_to_none=True)
    clock.synchronise()
    before = requested()
    y_bsh = gpt.run_blocks(x_bsh)
    kept = requested() - before - y_bsh.nbytes + x_bsh.nbytes
    torch.cuda.reset_peak_memory_stats()
    y_bsh.backward(torch.ones_like(y_bsh))
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before + x_bsh.nbytes
    return {"kept_bytes": kept, "peak_bytes": int(peak)}


def predicted_seconds(model: Architecture, recompute: str) -> float | None:
    """What the planner's `step_time` says of a layer: two layers less one. None for an unknown card."""
    card = next((card for name, card in theory.hardware.ACCELERATORS.items() if _is_here(name)), None)
    if card is None:
        return None

    def step(num_layers: int) -> float:
        plan = Plan(dp=1, micro_batch=1, micro_batches=1, recompute=recompute, attention="flash", dropout=False)
        found = step_time(replace(model, num_layers=num_layers), plan, Machine(accelerator=card, gpus=1))
        return found.total - found.optimizer

    return step(2) - step(1)


def _is_here(name: str) -> bool:
    here = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return name.split("-")[0] in here and ("PCIe" in name) == ("PCIe" in here)


def layers(clock: Clock, seqs: Sequence[int] = (4096, 8192), name: str = "llama3-8b") -> list[dict[str, Any]]:
    """By tokens: forward pass, and both passes with each kind of recompute; bytes by the allocator beside theory."""
    found = []
    for seq in seqs:
        with flash(clock):
            found.append({"model": name, "tokens": seq} | _layer(clock, replace(theory.models.model(name), seq=seq)))
        clock.free()
    return found


def _layer(clock: Clock, model: Architecture) -> dict[str, Any]:
    """One sequence through one layer."""
    gpt, x_bsh = built(clock, model), clock.randn(1, model.seq, model.hidden).requires_grad_()
    grad_bsh = clock.randn(1, model.seq, model.hidden)

    def both() -> None:
        gpt.zero_grad()
        x_bsh.grad = None
        gpt.run_blocks(x_bsh).backward(grad_bsh)

    @torch.no_grad()
    def forward() -> None:
        gpt.run_blocks(x_bsh)

    seconds: dict[str, list[float]] = {how: [] for how in (*HOW, "forward")}
    for turn in range(6):  # in turns: `recompute` changes the model
        for how in HOW:
            activations.recompute(gpt, how)
            seconds[how] += clock.alternated({"": both}, rounds=2, warm_up=1 if turn else 3)[""]
        activations.recompute(gpt, "none")
        seconds["forward"] += clock.alternated({"": forward}, rounds=2, warm_up=1)[""]
    counted = theory.memory.forward_flops_per_token(replace(model, num_layers=1), seq=model.seq, causal=True)
    operations, once = model.seq * (counted.total - counted.head), Spread.of(seconds["forward"])
    core = model.seq * (counted.scores + counted.weighted_values)  # half of the square: not `recompute_factor`, a GPT's
    again = {"none": 0, "selective": core, "full": operations}
    record: dict[str, Any] = {"forward_flops": operations}
    record["forward"] = {"seconds": once, "flop_per_s": operations / once.median}
    for how in HOW:
        one = record[how] = {"seconds": Spread.of(seconds[how]), "ratio": ratio(seconds[how], seconds["none"])}
        one["model_flop_per_s"] = 3 * operations / one["seconds"].median
        one["theory_ratio"] = 1 + again[how] / (3 * operations)
        one["planner_seconds"] = predicted_seconds(model, how)
        one["theory_bytes"] = theory.activations.layer_activations(
            model, 1, attention="flash", dropout=False, widths=WIDTHS, recompute=how
        ).total
        if clock.on_card:
            activations.recompute(gpt, how)
            one |= bytes_of(clock, gpt, x_bsh)
    return record


def attention(clock: Clock, seqs: Sequence[int] = (2048, 4096, 8192, 16384), heads: int = 32) -> list[dict[str, Any]]:
    """The core alone, heads of 128, by the kernel: rates count the half of the products that a causal mask leaves."""
    found = []
    for seq in seqs:
        q, k, v = (clock.randn(1, heads, seq, 128).requires_grad_() for _ in range(3))
        grad = clock.randn(1, heads, seq, 128)
        operations = theory.cp.forward_flops(1, seq * seq, heads, 128) / 2
        record: dict[str, Any] = {"seq": seq, "forward_flops": operations}
        kinds = {"flash": [SDPBackend.FLASH_ATTENTION], "cuDNN": [SDPBackend.CUDNN_ATTENTION]} if clock.on_card else {}
        for kind, backends in {**kinds, "by default": []}.items():

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            def both(grad: Tensor = grad, forward: Any = forward) -> None:
                forward().backward(grad)

            with sdpa_kernel(backends) if backends else nullcontext():
                runs = clock.alternated({"forward": forward, "both": both}, rounds=5)
            record[kind] = {
                "forward_seconds": Spread.of(runs["forward"]),
                "both_seconds": Spread.of(runs["both"]),
                "forward_flop_per_s": operations / Spread.of(runs["forward"]).median,
                "over_forward": ratio(runs["both"], runs["forward"]),
            }
        found.append(record)
    return found
