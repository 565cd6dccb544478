"""Products of matrices on one card: squares, those of Llamas, in bf16 and fp8, and those of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks._gpu_clock import Clock, Spread
from dtlib import theory

SIDES = (512, 1024, 2048, 4096, 8192, 16384)
MODELS, SPLITS, TOKENS = ("llama3-8b", "llama3-70b"), (1, 2, 4, 8), (1024, 2048, 4096, 8192, 16384)
EXPERTS = {"num": 16, "hidden": 7168, "width": 4096, "tokens": (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024, 4096)}
"""One rank's experts of DeepSeek-V3's width (gate and up side by side), with so many tokens each."""
FLOAT8 = torch.float8_e4m3fn


def products_of(model: str, tp: int) -> dict[str, tuple[int, int]]:
    """Name to (inputs, outputs) of the matrices that a tensor rank has of a layer."""
    m = theory.models.model(model)
    h, q, kv, f = m.hidden, m.query_width // tp, m.kv_width // tp, m.ffn_hidden // tp
    return {"qkv": (h, q + 2 * kv), "attention out": (q, h), "up and gate": (h, 2 * f), "down": (f, h)}


def shapes() -> Iterator[dict[str, Any]]:
    """Every product of the Llamas: (rows, inner) by (inner, columns)."""
    for model in MODELS:
        for tp in SPLITS:
            for name, (inner, columns) in products_of(model, tp).items():
                for rows in TOKENS:
                    yield {"model": model, "tp": tp, "product": name, "rows": rows, "inner": inner, "columns": columns}


def rounds_for(operations: float) -> int:
    """Fewer rounds of what takes long."""
    return 15 if operations < 2e12 else 7


def row(operations: float, seconds: Spread) -> dict[str, Any]:
    """A product's time and rate."""
    return {"seconds": seconds, "flop_per_s": operations / seconds.median}


def bf16(clock: Clock, rows: int, inner: int, columns: int) -> dict[str, Any]:
    """A linear layer without a bias: x Wᵀ."""
    x, w, operations = clock.randn(rows, inner), clock.randn(columns, inner), 2.0 * rows * inner * columns
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    return row(operations, clock.spread(lambda: torch.mm(x, w.T, out=out), rounds=rounds_for(operations)))


def fp8(clock: Clock, rows: int, inner: int, columns: int, fast: bool) -> dict[str, Any]:
    """The same in 8 bits with one scale a tensor, result in bf16; `fast` adds up in fewer bits."""
    x, w, operations = clock.randn(rows, inner), clock.randn(columns, inner), 2.0 * rows * inner * columns
    one = torch.ones((), device=x.device)
    x8, w8 = x.to(FLOAT8), w.to(FLOAT8)

    def work() -> Any:
        return torch._scaled_mm(x8, w8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return row(operations, clock.spread(work, rounds=rounds_for(operations)))


def squares(clock: Clock, sides: Sequence[int] = SIDES) -> list[dict[str, Any]]:
    """n by n by n."""
    found = []
    for n in sides:
        found.append({"side": n, "bf16": bf16(clock, n, n, n)})
        for fast in (False, True) if clock.on_card else ():
            found[-1]["fp8, fast sums" if fast else "fp8"] = fp8(clock, n, n, n, fast)
    return found


def llamas(clock: Clock, best_flop_per_s: float, bytes_per_s: float, most: int | None = None) -> list[dict[str, Any]]:
    """Each product beside `planner.product_share` at the rate of the best square and the memory's, both measured."""
    found = []
    for shape in list(shapes())[:most]:
        sizes = shape["rows"], shape["inner"], shape["columns"]
        found.append(shape | bf16(clock, *sizes))
        found[-1]["share"] = found[-1]["flop_per_s"] / best_flop_per_s
        found[-1]["theory_share"] = float(theory.timing.product_share(*sizes, best_flop_per_s, bytes_per_s))
        if clock.on_card and shape["tp"] == 1 and shape["rows"] in (1024, 16384):
            found[-1]["fp8"] = fp8(clock, *sizes, True)
    return found


def experts(
    clock: Clock, num: int = EXPERTS["num"], hidden: int = EXPERTS["hidden"], width: int = EXPERTS["width"],
    tokens: Sequence[int] = EXPERTS["tokens"],
) -> list[dict[str, Any]]:  # fmt: skip
    """The first product of a rank's experts by tokens an expert: alike for all (bmm), and drawn (grouped)."""
    w = clock.randn(num, width, hidden)
    found = []
    for each in tokens:
        operations = 2.0 * num * each * hidden * width
        x = clock.randn(num, each, hidden)
        rounds = rounds_for(operations)
        found.append({"tokens_an_expert": each})
        found[-1]["alike"] = row(operations, clock.spread(lambda x=x: torch.bmm(x, w.mT), rounds=rounds))
        found[-1]["weights_bytes_per_s"] = w.nbytes / found[-1]["alike"]["seconds"].median
        if clock.on_card:
            drawn = torch.multinomial(torch.ones(num), num * each, replacement=True).bincount(minlength=num)
            ends, flat = drawn.cumsum(0).int().to(x.device), x.flatten(0, 1)
            spread = clock.spread(lambda flat=flat, ends=ends: torch._grouped_mm(flat, w.mT, offs=ends), rounds=rounds)
            found[-1]["drawn"] = row(operations, spread) | {"busiest": drawn.max().item()}
    return found
