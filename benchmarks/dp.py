"""Data parallelism from scratch against torch's DDP: a whole step of a 25-million-parameter GPT, in one run.

Every contender trains its own copy of one model in the same processes. They take turns, see `lab.race`.
A second run puts the ranks on a link of known bandwidth, where overlap can show: on the loopback device the cores that
compute are also the network.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._report import console, print_table, ratio_cells, save
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


def race(
    wraps: dict[str, Callable[[nn.Module], nn.Module]], link: float | None
) -> tuple[lab.Race, dict[str, dict[str, Any]]]:
    """In a rank: the race; and by contender the bytes of a step, and what of them was hidden."""
    contenders = {name: Contender(wrap) for name, wrap in wraps.items()}
    with nullcontext() if link is None else lab.paced(link):
        race = lab.race({name: one.step for name, one in contenders.items()}, rounds=STEPS, warm_up=WARM_UP)
        found: dict[str, dict[str, Any]] = {}
        for name, contender in contenders.items():
            with lab.wire() as wire:
                contender.step()
            lab.barrier()
            with lab.timeline() as timeline:
                contender.step()
            found[name] = {"total_bytes": wire.total_bytes, "hidden_share": timeline.hidden_share}
    return race, found


def measure(
    wraps: dict[str, Callable[[nn.Module], nn.Module]], n: int, link: float | None = None
) -> tuple[lab.Race, dict[str, Any]]:
    """The race; and by contender the bytes of all ranks and the share hidden."""
    ranks = lab.run(race, n, args=(wraps, link), timeout_s=600)
    found = {
        name: {
            "total_bytes": one["total_bytes"],
            "hidden_share": float(np.mean([by_name[name]["hidden_share"] for _, by_name in ranks])),
        }
        for name, one in ranks[0][1].items()
    }
    return ranks[0][0], found


def table(race: lab.Race, found: dict[str, Any], n: int, against: str) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Rows to print and records to keep; ratios are against `against` in the same round."""
    full_bytes = 4 * preset("25m").num_params
    expected = n * theory.dp.sent_bytes_per_step(full_bytes, n)
    rows, records = [], []
    for name, one in found.items():
        ratio, cpu = race.ratio(name, against), race.cpu_ratio(name, against)
        hidden = "" if np.isnan(one["hidden_share"]) else f"{one['hidden_share']:.0%}"
        wire = f"{one['total_bytes'] / expected:.4f}"
        seconds = format_seconds(race.median(name))
        rows.append([name, str(n), seconds, *ratio_cells(ratio), f"{cpu.median:.3f}", wire, hidden])
        records.append({"contender": name, "ranks": n, "ratio": ratio.median, **one, "expected_bytes": expected})
        records[-1] |= {"seconds": race.seconds[name], "cpu_seconds": race.cpu_seconds[name]}
    return rows, records


def main() -> None:
    """Measure, print, save."""
    rows, records = [], []
    for n in WORLD_SIZES:
        shown, kept = table(*measure(RACE, n), n, TORCHS)
        rows, records = rows + shown, records + kept
    columns = ["contender", "ranks", "step", "over torch's", "middle half", "core time", "bytes / theory", "hidden"]
    print_table("A step of 25 million parameters on the loopback device, against torch's DDP", columns, rows)
    shown, paced = table(*measure(OVERLAP, 2, LINK), 2, "blocking")
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
