"""Sequence parallelism from scratch against torch's own: a forward and a backward pass of a GPT, in one run.

`dtlib.ranks.sp` with inputs that are kept, and gathered again; `dtlib.ranks.tp`, whose tokens are on every rank; and
DTensor with `SequenceParallel` norms, which is held to the same loss. On CPUs torch's reduce-scatter is an all-reduce
of which half is thrown away: so ours sends what theory says, and torch's half as much again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import sp, tp
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss
from dtlib.theory.units import format_bytes, format_seconds

WORLD_SIZES, SEQUENCES, ROUNDS = (2, 4), 4, 15
CONFIG = GPTConfig(num_layers=4, hidden=1024, num_heads=16, seq=64, rotary=True, tied=False)
TORCHS = "torch's DTensor"
OURS: dict[str, Callable[[GPT], GPT]] = {
    "tokens on all ranks": tp.parallelize,
    "split, inputs kept": sp.parallelize,
    "split, gathered again": functools.partial(sp.parallelize, gather_again=True),
}


def by_torch(model: GPT) -> GPT:
    """`model` split by `parallelize_module`."""
    mesh, split = dist.init_device_mesh("cpu", (dist.get_world_size(),)), Shard(1)
    plan: dict[str, Any] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, use_local_output=False),
    }
    for i, block in enumerate(model.blocks):
        block.attention.num_heads //= mesh.size()
        block.attention.num_kv_heads //= mesh.size()
        for name in ("attention", "mlp"):
            plan[f"blocks.{i}.{name}_norm"] = SequenceParallel()
        for name in ("attention.qkv", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel(input_layouts=split)
        for name in ("attention.out", "mlp.down"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel(output_layouts=split)
    return parallelize_module(model, mesh, plan)


def measured() -> tuple[lab.Race, dict[str, tuple[float, int, int]]]:
    """In a rank: the race of forward and backward passes; and of each its loss, its bytes and its peak."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(CONFIG.vocab, (2, SEQUENCES, CONFIG.seq))
    ours = functools.partial(tp.next_token_loss, vocab=CONFIG.vocab)
    models = {name: (split(GPT(CONFIG)), ours) for name, split in OURS.items()}
    models[TORCHS] = by_torch(GPT(CONFIG)), next_token_loss
    found = {}

    def run(model: GPT, loss_of: Callable[..., torch.Tensor]) -> float:
        model.zero_grad()
        with loss_parallel():
            loss = loss_of(model(tokens), targets)
            loss.backward()
        return loss.item()

    runs = {name: functools.partial(run, *each) for name, each in models.items()}
    for name, each in runs.items():
        each()
        lab.barrier()
        with lab.wire() as wire:
            loss = each()
        lab.barrier()
        with lab.memory() as memory:
            each()
        found[name] = loss, wire.total_bytes, memory.peak
    return lab.race(runs, rounds=ROUNDS), found


def main() -> None:
    """Measure, print, save."""
    rows, records = [], []
    for n in WORLD_SIZES:
        race, found = lab.run(measured, n, timeout_s=600)[0]
        losses = [loss for loss, _, _ in found.values()]
        if max(losses) - min(losses) > 1e-4:
            raise AssertionError(f"losses differ: {losses}")
        for name, (loss, sent, peak) in found.items():
            ratio = race.ratio(name, TORCHS)
            cells = [format_bytes(sent / n), f"{sent / found[TORCHS][1]:.3f}", format_bytes(peak)]
            rows.append([name, str(n), format_seconds(race.median(name)), *ratio_cells(ratio), *cells])
            records.append({"contender": name, "ranks": n, "ratio": ratio.median, "middle_half": ratio[1:]})
            records[-1] |= {"loss": loss, "total_bytes": sent, "peak_bytes": peak, "seconds": race.seconds[name]}
    columns = ["contender", "ranks", "pass", "over torch's", "middle half", "sent by a rank", "/ torch's", "peak"]
    print_table(f"Forward and backward of {CONFIG.num_layers} layers of width {CONFIG.hidden}", columns, rows)
    path = save("sp", {"race": records})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
