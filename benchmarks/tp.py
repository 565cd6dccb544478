"""Tensor parallelism from scratch against torch's own: a whole step of a GPT, in one run.

Both split the same model over the same processes and train it on the same data: `dtlib.ranks.tp`, and DTensor by
`parallelize_module` with `loss_parallel`. They take turns, see `lab.race`; ours also with its forward products cut in
chunks, which pays where the network is not run by the cores that compute. At the end both must have the same weights.
Then come a step whose collectives and bytes are counted, and one whose timeline is recorded. The targets: a step in at
most 0.95 of DTensor's time on two ranks and in 0.85 on four.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.lab.recorder import Recorder
from dtlib.ranks import tp
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.theory.units import format_bytes, format_seconds

WORLD_SIZES = (2, 4)
SEQUENCES, ROUNDS, CHUNKS = 4, 15, 2
CONFIG = GPTConfig(num_layers=4, hidden=1024, num_heads=16, seq=64, tied=False)
TORCHS, OURS, IN_CHUNKS = "torch's DTensor", "ours", f"ours, {CHUNKS} chunks"
TARGETS = {2: 0.95, 4: 0.85}
SAME = 1e-3
"""How far weights may lie apart, relative to the way that training has taken them: sums come in other orders."""

adamw = functools.partial(torch.optim.AdamW, lr=1e-4)


class Ours:
    """A split model with its optimizer and data, ready to take one step after another."""

    def __init__(self, chunks: int) -> None:
        self.model = tp.parallelize(GPT(CONFIG), chunks=chunks)
        self.prepare()

    def prepare(self) -> None:
        """The rest of it, once the model is split."""
        self.optimizer = adamw(self.model.parameters())
        self.data = batches(load_text(), batch=SEQUENCES, seq=CONFIG.seq)

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Gradients of one batch."""
        tp.next_token_loss(self.model(tokens), targets, vocab=CONFIG.vocab).backward()

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.backward(*next(self.data))
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        """All weights end to end; every rank must ask."""
        return torch.cat([value.flatten() for value in tp.state_dict(self.model).values()])


class Torchs(Ours):
    """The same by `parallelize_module`."""

    def __init__(self) -> None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        plan: dict[str, Any] = {
            "token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(use_local_output=False),
        }
        for i in range(CONFIG.num_layers):
            plan |= dict.fromkeys((f"blocks.{i}.attention.qkv", f"blocks.{i}.mlp.up"), ColwiseParallel())
            plan |= dict.fromkeys((f"blocks.{i}.attention.out", f"blocks.{i}.mlp.down"), RowwiseParallel())
        self.model = parallelize_module(GPT(CONFIG), mesh, plan)
        for block in self.model.blocks:
            block.attention.num_heads //= mesh.size()
            block.attention.num_kv_heads //= mesh.size()
        self.prepare()

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Gradients of one batch."""
        with loss_parallel():
            next_token_loss(self.model(tokens), targets).backward()

    def weights(self) -> torch.Tensor:
        """All weights end to end; every rank must ask."""
        state = self.model.state_dict().values()
        return torch.cat([getattr(value, "full_tensor", lambda value=value: value)().flatten() for value in state])


def measured() -> tuple[lab.Race, dict[str, dict[str, Any]]]:
    """In a rank: the race; and by contender how far its weights are off, its collectives and its bytes."""
    contenders = {TORCHS: Torchs(), OURS: Ours(1), IN_CHUNKS: Ours(CHUNKS)}
    race = lab.race({name: one.step for name, one in contenders.items()}, rounds=ROUNDS)
    reference = contenders[TORCHS].weights()
    way = (reference - torch.cat([value.flatten() for value in GPT(CONFIG).state_dict().values()])).norm()
    found = {}
    for name, one in contenders.items():
        off = float((one.weights() - reference).norm() / way)
        lab.barrier()
        with Recorder() as recorder, lab.wire() as wire:
            one.step()
        lab.barrier()
        with lab.timeline() as timeline:
            one.step()
        found[name] = {
            "off": off,
            "calls": len(recorder.log),
            "all_reduces": sum(call.name == "all_reduce" for call in recorder.log),
            "full_bytes": sum(call.full_bytes for call in recorder.log),
            "total_bytes": wire.total_bytes,
            "hidden_share": timeline.hidden_share,
        }
        if not off <= SAME:
            raise AssertionError(f"{name}: weights are off by {off:.1e} of their way")
    return race, found


def expected_bytes(n: int) -> int:
    """What all ranks together send in a step, by theory: 2 (N − 1) times what is reduced."""
    tokens = SEQUENCES * CONFIG.seq
    return 2 * (n - 1) * 4 * tokens * ((4 * CONFIG.num_layers + 2) * CONFIG.hidden + 3)


def main() -> None:
    """Measure, print, save."""
    load = os.getloadavg()[0]
    times, sizes, records, verdicts = [], [], [], []
    for n in WORLD_SIZES:
        race, found = lab.run(measured, n, timeout_s=600)[0]
        for name, one in found.items():
            ratio, cpu = race.ratio(name, TORCHS), race.cpu_ratio(name, TORCHS)
            times.append([name, str(n), format_seconds(race.median(name)), *ratio_cells(ratio), f"{cpu.median:.3f}"])
            times[-1].append(f"{one['hidden_share']:.0%}")
            wire = f"{one['total_bytes'] / expected_bytes(n):.4f}"
            counts = [str(one["calls"]), format_bytes(one["full_bytes"])]
            sizes.append([name, str(n), *counts, format_bytes(one["total_bytes"] / n), wire])
            records.append({"contender": name, "ranks": n, "ratio": ratio.median, "middle_half": ratio[1:], **one})
            records[-1] |= {"seconds": race.seconds[name], "cpu_seconds": race.cpu_seconds[name]}
        ours = race.ratio(OURS, TORCHS)
        verdict = "✓" if ours.median <= TARGETS[n] else "✗ missed"
        verdicts.append(f"{verdict} {n} ranks: {ours} of DTensor's time (at most {TARGETS[n]})")
    columns = ["contender", "ranks", "step", "over DTensor's", "middle half", "core time", "hidden"]
    size = f"{CONFIG.num_layers} layers of width {CONFIG.hidden}, {SEQUENCES * CONFIG.seq} tokens"
    print_table(f"A step of {size}, with AdamW", columns, times)
    columns = ["contender", "ranks", "collectives", "of together", "sent by a rank", "/ theory"]
    print_table("What a step sends", columns, sizes)
    for verdict in verdicts:
        console.print(verdict)
    off = max(record["off"] for record in records)
    console.print(f"all end with the same weights: off by {off:.0e} of the way that training took them, at most {SAME}")
    console.print(f"load of the machine before: {load:.1f}")
    path = save("tp", {"race": records, "targets": TARGETS, "load_before": load})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
