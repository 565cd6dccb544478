"""Data parallelism from scratch against torch's DDP: a whole step of a 25-million-parameter GPT, in one run.

Every contender trains its own copy of one model in the same processes. They take turns, step by step and each time
in another order, so that a slow moment of the machine falls on all; a step ends when the last rank has finished it.
A second run puts the ranks on a link of known bandwidth, where overlap can show: on the loopback device the cores that
compute are also the network.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._report import console, print_table, save
from dtlib import lab, theory
from dtlib.ranks import dp
from dtlib.ranks.model import GPT, batches, load_text, next_token_loss, preset
from dtlib.theory.units import MB, format_bytes, format_rate, format_seconds

WORLD_SIZES = (2, 4)
SEQUENCES, STEPS, WARM_UP = 2, 15, 1  # sequences of 64 tokens on each rank
LINK = 400 * MB
OURS, TORCHS = "bucketed", "torch's DDP"
RACE: dict[str, Callable[[nn.Module], nn.Module]] = {
    OURS: dp.BucketedDataParallel,
    TORCHS: DistributedDataParallel,
    "torch's DDP, views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "flat": dp.FlatDataParallel,
    "naive": dp.NaiveDataParallel,
}
OVERLAP: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no sync": lambda model: model,
    "blocking": partial(dp.BucketedDataParallel, overlap=False),
    OURS: dp.BucketedDataParallel,
    TORCHS: DistributedDataParallel,
}


class Contender:
    """A model, its optimizer and its data, ready to take one step after another."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        config, rank, n = preset("25m"), dist.get_rank(), dist.get_world_size()
        self.model = wrap(GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = batches(load_text(), batch=SEQUENCES * n, seq=config.seq, rank=rank, world_size=n)

    def step(self) -> None:
        """One training step on this rank."""
        tokens, targets = next(self.data)
        self.optimizer.zero_grad()
        next_token_loss(self.model(tokens), targets).backward()
        self.optimizer.step()


def race(wraps: dict[str, Callable[[nn.Module], nn.Module]], link: float | None) -> dict[str, dict[str, Any]]:
    """In a rank: by contender the seconds of each step, the bytes of one, and what of them was hidden."""
    contenders = {name: Contender(wrap) for name, wrap in wraps.items()}
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": []} for name in wraps}
    if link is not None:
        with lab.paced(link):
            return _steps(contenders, found)
    return _steps(contenders, found)


def _steps(contenders: dict[str, Contender], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for repetition in range(WARM_UP + STEPS):
        for name in random.Random(repetition).sample(list(contenders), len(contenders)):
            lab.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            contenders[name].step()
            if repetition >= WARM_UP:
                found[name]["seconds"].append(time.perf_counter() - start)
                found[name]["cpu_seconds"].append(time.process_time() - cpu)
    for name, contender in contenders.items():
        with lab.wire() as wire:
            contender.step()
        found[name]["total_bytes"] = wire.total_bytes
        lab.barrier()
        with lab.timeline() as timeline:
            contender.step()
        found[name]["hidden_share"] = timeline.hidden_share
    return found


def measure(wraps: dict[str, Callable[[nn.Module], nn.Module]], n: int, link: float | None = None) -> dict[str, Any]:
    """By contender: seconds of the slowest rank in each step; of all ranks core time, bytes, the share hidden."""
    ranks = lab.run(race, n, args=(wraps, link), timeout_s=600)
    return {
        name: {
            "seconds": np.max([rank[name]["seconds"] for rank in ranks], axis=0),
            "cpu_seconds": np.sum([rank[name]["cpu_seconds"] for rank in ranks], axis=0),
            "total_bytes": ranks[0][name]["total_bytes"],
            "hidden_share": float(np.mean([rank[name]["hidden_share"] for rank in ranks])),
        }
        for name in wraps
    }


def table(measured: dict[str, Any], n: int, against: str) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Rows to print and records to keep; ratios are medians over the steps, each against `against` in the same turn."""
    full_bytes = 4 * preset("25m").num_params
    expected = n * theory.dp.sent_bytes_per_step(full_bytes, n)
    rows, records = [], []
    for name, one in measured.items():
        ratios = one["seconds"] / measured[against]["seconds"]
        ratio, (low, high) = float(np.median(ratios)), np.quantile(ratios, [0.25, 0.75])
        hidden = "" if np.isnan(one["hidden_share"]) else f"{one['hidden_share']:.0%}"
        wire = f"{one['total_bytes'] / expected:.4f}"
        seconds = format_seconds(float(np.median(one["seconds"])))
        cpu = f"{np.median(one['cpu_seconds'] / measured[against]['cpu_seconds']):.3f}"
        rows.append([name, str(n), seconds, f"{ratio:.3f}", f"{low:.3f} – {high:.3f}", cpu, wire, hidden])
        records.append({"contender": name, "ranks": n, "ratio": ratio, **one, "expected_bytes": expected})
        records[-1] |= {name: one[name].tolist() for name in ("seconds", "cpu_seconds")}
    return rows, records


def main() -> None:
    """Measure, print, save."""
    rows, records = [], []
    for n in WORLD_SIZES:
        shown, kept = table(measure(RACE, n), n, TORCHS)
        rows, records = rows + shown, records + kept
    columns = ["contender", "ranks", "step", "over torch's", "middle half", "core time", "bytes / theory", "hidden"]
    print_table("A step of 25 million parameters on the loopback device, against torch's DDP", columns, rows)
    shown, paced = table(measure(OVERLAP, 2, LINK), 2, "blocking")
    columns[3] = "over blocking"
    print_table(f"The same on links of {format_rate(LINK)}: what overlap gains over blocking", columns, shown)
    for n in WORLD_SIZES:
        by_name = {record["contender"]: record for record in records if record["ranks"] == n}
        ratio, wire = by_name[OURS]["ratio"], by_name[OURS]["total_bytes"] / by_name[TORCHS]["total_bytes"]
        good = ratio <= 1 and abs(wire - 1) < 0.01
        verdict = "✓" if good else "✗ missed"
        console.print(f"{verdict} {n} ranks: {ratio:.3f} of torch's time (at most 1), {wire:.4f} of its bytes")
    console.print(f"a gradient is {format_bytes(4 * preset('25m').num_params)}")
    path = save("dp", {"race": records, "paced": paced, "link_bytes_per_s": LINK})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
