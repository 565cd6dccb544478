"""ZeRO from scratch against torch's DDP and FSDP2: a whole step of a 25-million-parameter GPT, in one run.

Every contender trains its own copy of one model on the same data in the same processes. They take turns, see
`lab.race`. At the end all must have the same weights. Then come a step whose bytes are counted, and one whose tensors
are followed. The targets: stage 3 in at most 0.85 of FSDP2's time, stages 1 and 2 in at most 1.05 of DDP's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab, theory
from dtlib.ranks import zero
from dtlib.ranks.model import GPT, batches, load_text, next_token_loss, preset
from dtlib.theory.units import format_bytes, format_seconds

WORLD_SIZES = (2, 4)
SEQUENCES, STEPS, WARM_UP = 2, 9, 1  # sequences of 64 tokens on each rank
CONFIG = preset("25m")
UNITS = [f"blocks.{i}" for i in range(CONFIG.num_layers)]
DDP, FSDP2 = "torch's DDP", "torch's FSDP2"
STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3}
AGAINST = {DDP: DDP, "stage 1": DDP, "stage 2": DDP, FSDP2: FSDP2, "stage 3": FSDP2}
TARGETS = {"stage 1": 1.05, "stage 2": 1.05, "stage 3": 0.85}
BUCKET_BYTES = 25 * 2**20  # what stages 1 and 2 reduce together, by default
SAME = 1e-3
"""How far weights may lie apart, relative to the way that training has taken them: sums come in other orders."""

adamw = functools.partial(torch.optim.AdamW, lr=1e-4)


def fsdp2(model: nn.Module) -> nn.Module:
    """Each block a unit, the rest another."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for name in UNITS:
        fully_shard(model.get_submodule(name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    DDP: DistributedDataParallel,
    "stage 1": lambda model: zero.Zero(model, adamw, stage=1),
    "stage 2": lambda model: zero.Zero(model, adamw, stage=2),
    FSDP2: fsdp2,
    "stage 3": lambda model: zero.Zero(model, adamw, stage=3),
}


class Contender:
    """A model, its optimizer and its data, ready to take one step after another."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        self.module: nn.Module = GPT(CONFIG)
        self.model = wrap(self.module)
        own = isinstance(self.model, zero.Zero)
        self.optimizer = self.model.optimizer if own else adamw(self.model.parameters())
        self.data = batches(load_text(), batch=SEQUENCES * n, seq=CONFIG.seq, rank=rank, world_size=n)

    def step(self) -> None:
        """One training step on this rank."""
        tokens, targets = next(self.data)
        self.optimizer.zero_grad()
        next_token_loss(self.model(tokens), targets).backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        """All weights end to end; every rank must ask."""
        state = self.model.state_dict().values()
        return torch.cat([getattr(value, "full_tensor", lambda value=value: value)().flatten() for value in state])

    def peak(self) -> dict[str, int]:
        """Tensor bytes by kind at the fullest moment of a step."""
        self.optimizer.zero_grad()
        with lab.memory_spans(self.module, self.model, self.optimizer) as spans:
            self.step()
        return max((span.fullest for span in spans), key=lambda held: held.total).as_dict()


def race() -> tuple[lab.Race, dict[str, dict[str, Any]]]:
    """In a rank: the race; and by contender how far its weights are off, and its bytes sent and held."""
    contenders = {name: Contender(wrap) for name, wrap in WRAPS.items()}
    race = lab.race({name: one.step for name, one in contenders.items()}, rounds=STEPS, warm_up=WARM_UP)
    found: dict[str, dict[str, Any]] = {name: {} for name in WRAPS}
    reference = contenders[DDP].weights()
    start_weights = torch.cat([value.flatten() for value in GPT(CONFIG).state_dict().values()])
    way = (reference - start_weights).norm()
    for name, contender in contenders.items():
        found[name]["off"] = float((contender.weights() - reference).norm() / way)
        lab.barrier()
        with lab.wire() as wire:
            contender.step()
        found[name]["total_bytes"] = wire.total_bytes
        lab.barrier()
        found[name]["peak"] = contender.peak()
    return race, found


def alone() -> list[lab.MemorySpan]:
    """What the passes hold besides weights and gradients."""
    model, data = GPT(CONFIG), batches(load_text(), batch=SEQUENCES, seq=CONFIG.seq)
    with lab.memory_spans(model, units=UNITS) as spans:
        tokens, targets = next(data)
        next_token_loss(model(tokens), targets).backward()
    return spans


def expected_peak(stage: int, n: int, work: list[lab.MemorySpan], is_fsdp2: bool) -> float:
    """Bytes that theory says a rank holds at the fullest moment, within a unit and its work."""
    params = {name: parameter.numel() for name, parameter in GPT(CONFIG).named_parameters()}
    block = sum(size for name, size in params.items() if name.startswith(f"{UNITS[0]}."))
    outer = sum(params.values()) - len(UNITS) * block
    passes = [each.fullest for each in work]
    held = max(each.activations + each.buffers + each.temporary for each in passes)
    of_stage: dict[str, Any] = {"outer_params": outer, "copies": 2 + 1 / n if is_fsdp2 else None} if stage == 3 else {}
    unit = block if stage == 3 else BUCKET_BYTES / 4
    return theory.zero.peak_bytes(sum(params.values()), n, stage, unit, work_bytes=held, **of_stage)


def measure(n: int, work: list[lab.MemorySpan]) -> tuple[lab.Race, dict[str, dict[str, Any]]]:
    """The race; and by contender the bytes of all ranks, rank 0's peak, and what theory says of both."""
    ranks = lab.run(race, n, timeout_s=600)
    full_bytes = 4 * CONFIG.num_params
    found = {}
    for name in WRAPS:
        stage = STAGES.get(name, 3 if name == FSDP2 else 0)
        found[name] = {
            "off": max(by_name[name]["off"] for _, by_name in ranks),
            "total_bytes": ranks[0][1][name]["total_bytes"],
            "expected_bytes": n * theory.zero.sent_bytes(full_bytes, n, stage),
            "peak": ranks[0][1][name]["peak"],
            "expected_peak_bytes": expected_peak(stage, n, work, name == FSDP2) if stage else None,
        }
        if not found[name]["off"] <= SAME:
            raise AssertionError(f"{name} on {n} ranks: weights are off by {found[name]['off']:.1e} of their way")
    return ranks[0][0], found


def tables(
    race: lab.Race, found: dict[str, Any], n: int
) -> tuple[list[list[str]], list[list[str]], list[dict[str, Any]]]:
    """Rows of times, rows of bytes, and records to keep; ratios are against torch's own contender in the same round."""
    times, sizes, records = [], [], []
    for name, one in found.items():
        ratio, cpu = race.ratio(name, AGAINST[name]), race.cpu_ratio(name, AGAINST[name])
        times.append([name, str(n), format_seconds(race.median(name)), *ratio_cells(ratio), f"{cpu.median:.3f}"])
        peak, expected = sum(one["peak"].values()), one["expected_peak_bytes"]
        wire = f"{one['total_bytes'] / one['expected_bytes']:.4f}"
        held = f"{peak / expected:.4f}" if expected else ""
        sizes.append([name, str(n), format_bytes(one["total_bytes"] / n), wire, format_bytes(peak), held])
        middle = {"middle_half": [ratio.low, ratio.high], "against": AGAINST[name]}
        records.append({"contender": name, "ranks": n, "ratio": ratio.median, **middle, **one})
        records[-1] |= {"seconds": race.seconds[name], "cpu_seconds": race.cpu_seconds[name]}
    return times, sizes, records


def main() -> None:
    """Measure, print, save."""
    load = os.getloadavg()[0]
    work = lab.at_scale(alone, 1).result
    times, sizes, records = [], [], []
    for n in WORLD_SIZES:
        for rows, more in zip((times, sizes, records), tables(*measure(n, work), n), strict=True):
            rows.extend(more)
    columns = ["contender", "ranks", "step", "over torch's", "middle half", "core time"]
    print_table(
        "A step of 25 million parameters with AdamW: stages 1 and 2 over DDP, stage 3 over FSDP2", columns, times
    )
    columns = ["contender", "ranks", "sent by a rank", "/ theory", "peak of tensors", "/ theory"]
    print_table("What a step sends and holds, over theory", columns, sizes)
    for record in records:
        name, ratio, (low, high) = record["contender"], record["ratio"], record["middle_half"]
        if name in TARGETS:
            verdict = "✓" if ratio <= TARGETS[name] else "✗ missed"
            whose = f"of {record['against']}'s time (at most {TARGETS[name]})"
            console.print(f"{verdict} {name}, {record['ranks']} ranks: {ratio:.3f}, {low:.3f} – {high:.3f}, {whose}")
    off = max(record["off"] for record in records)
    console.print(f"all end with the same weights: off by {off:.0e} of the way that training took them, at most {SAME}")
    console.print(f"the weights take {format_bytes(4 * CONFIG.num_params)}; load of the machine before: {load:.1f}")
    path = save("zero", {"race": records, "targets": TARGETS, "load_before": load})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
