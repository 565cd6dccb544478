"""Pipelines from scratch against torch's own, schedule by schedule, in one run each: from GPipe to DualPipeV.

`dtlib.ranks.pp.Pipeline` and the class of `torch.distributed.pipelining` take turns, see `lab.race`, with the same
stages and the same data; a step goes forward and backward with the whole batch. Afterwards both must have the same
gradients, and the messages of a warm step are counted. The stages are those of a GPT, which share the cores; and stages
that take a set time without a core, so that idle time shows where there are fewer cores than ranks: their bubble is
held to the law, or to the simulator where there is no law. The targets: a step in at most torch's time, better in 0.90
of it, and a bubble within 5 % of what theory says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks._report import console, print_table, ratio_cells, save
from dtlib import lab
from dtlib.ranks import pp
from dtlib.ranks.model import GPT, GPTConfig, batches, load_text, next_token_loss
from dtlib.theory import pp as theory
from dtlib.theory.units import format_bytes, format_seconds

WORLD_SIZES, M, CHUNKS = (2, 4), 8, 2
SCHEDULES: dict[str, Any] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "ZB-V": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}
CONFIG = GPTConfig(num_layers=8, hidden=128, num_heads=4, seq=64, tied=False)
SECONDS, SLOWER = 0.01, 15
"""What a rank spends on a micro-batch forward, on its input's gradient and on its weights' gradient, each; and how much
slower it is where its bubble is measured, for the law has messages that take no time."""
GPTS, IDLE = "GPT", "set time"
LAWS = ("GPipe", "1F1B", "interleaved")
TORCHS, OURS = "torch's", "ours"
TARGET, AIM, BUBBLE_TARGET, SAME = 1.0, 0.90, 0.05, 1e-5


class Idle(pp.Timed):
    """A stage that takes a set time, the first one too: its input needs a gradient, which the model's data do not."""

    def forward(self, x: Tensor) -> Tensor:
        """x times the weight, after a while."""
        return super().forward(x if x.requires_grad else x.detach().requires_grad_())


@dataclass(frozen=True)
class Work:
    """What a pipeline is to do: its stages, a batch, and its loss with a `reduction`."""

    rounds: int
    width: int
    stages: Callable[[theory.Schedule], list[nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


WORKS = {
    GPTS: Work(
        11, CONFIG.hidden, lambda schedule: [*pp.cut(GPT(CONFIG), schedule.num_stages)],
        lambda: next(batches(load_text(), batch=M, seq=CONFIG.seq)), next_token_loss,
    ),
    IDLE: Work(
        5, 1, lambda schedule: [Idle(*[SECONDS / schedule.chunks] * 3) for _ in schedule.placed],
        lambda: (torch.ones(M, 1, 1), torch.zeros(M, 1, 1)), lambda y, _, reduction: getattr(y, reduction)(),
    ),
}  # fmt: skip


def made(name: str, p: int) -> theory.Schedule:
    """Our schedule of that name."""
    return theory.interleaved(p, M, CHUNKS) if name == "interleaved" else theory.SCHEDULES[name](p, M)


class Ours:
    """This rank's part of our pipeline with its data, ready to take one step after another."""

    def __init__(self, name: str, work: Work) -> None:
        self.schedule, self.work = made(name, dist.get_world_size()), work
        places = enumerate(zip(work.stages(self.schedule), self.schedule.placed, strict=True))
        self.stages = {k: stage for k, (stage, place) in places if place == dist.get_rank()}
        self.inputs, self.targets = work.batch()
        self.prepare(name)

    def prepare(self, name: str) -> None:
        """The rest of it, once there are stages: what a step is to call."""
        about = {"width": self.work.width, "loss": partial(self.work.loss, reduction="sum"), "count": torch.numel}
        self.pipeline = pp.Pipeline(self.stages, self.schedule, **about)
        self.go = partial(self.pipeline.step, self.inputs, self.targets)

    def step(self) -> None:
        """Forward and backward with the whole batch."""
        for stage in self.stages.values():
            stage.zero_grad()
        self.go()

    def gradients(self) -> Tensor:
        """All of this rank's gradients end to end."""
        return torch.cat([each.grad.flatten() for stage in self.stages.values() for each in stage.parameters()])

    def timed(self, slower: int) -> list[tuple[theory.Action, float, float]]:
        """The actions of a step of so much slower stages, with when they began and ended."""
        log = []

        @contextmanager
        def around(action: theory.Action) -> Iterator[None]:
            start = time.monotonic()
            yield
            log.append((action, start, time.monotonic()))

        for stage in self.stages.values():
            stage.seconds = {key: slower * value for key, value in stage.seconds.items()}
        self.pipeline.around = around
        self.step()
        return log


class Torchs(Ours):
    """The same by torch's own stages and schedule."""

    def prepare(self, name: str) -> None:
        """The rest of it, once there are stages."""
        number, device = self.schedule.num_stages, torch.device("cpu")
        stages = [pipelining.PipelineStage(stage, k, number, device) for k, stage in self.stages.items()]
        own: Any = stages if self.schedule.chunks > 1 else stages[0]
        torchs = SCHEDULES[name](own, M, partial(self.work.loss, reduction="mean"))
        inputs = (self.inputs,) if 0 in self.stages else ()
        target = self.targets if number - 1 in self.stages else None
        self.go = partial(torchs.step, *inputs, target=target, return_outputs=False)


def measured(name: str, work_name: str) -> tuple[lab.Race, dict[str, Any], list[Any]]:
    """In a rank: the race; how far gradients are off and what each contender sent; and our actions in time."""
    work = WORKS[work_name]
    contenders = {TORCHS: Torchs(name, work), OURS: Ours(name, work)}
    race = lab.race({each: one.step for each, one in contenders.items()}, rounds=work.rounds)
    theirs, ours = (one.gradients() for one in contenders.values())
    found: dict[str, Any] = {"off": float((ours - theirs).norm() / theirs.norm())}
    for each, one in contenders.items():
        lab.barrier()
        with lab.SendCounter() as counter:
            one.step()
        found[each] = counter.num_sends, counter.sent_bytes
    lab.barrier()
    return race, found, contenders[OURS].timed(SLOWER) if work_name == IDLE else []


def bubble(logs: Sequence[Any]) -> float:
    """The idle part of a step, from each rank's actions."""
    span = max(log[-1][2] for log in logs) - min(log[0][1] for log in logs)
    return 1 - sum(end - start for log in logs for _, start, end in log) / (span * len(logs))


def expected_bubble(name: str, schedule: theory.Schedule) -> float:
    """By the law, or by the simulator; where a backward pass is split the first stage leaves all of it for later."""
    if name in LAWS:
        return theory.bubble_fraction(schedule.num_ranks, M, schedule.chunks)
    later = [0.5] * (schedule.num_stages - 1)
    return theory.simulate(schedule, 1.0, [0.0, *later], [1.0, *later]).bubble


def compared(name: str, p: int, work_name: str) -> dict[str, Any]:
    """All that is found of a schedule on p ranks; or the error, if there is one."""
    record: dict[str, Any] = {"schedule": name, "ranks": p, "work": work_name}
    try:
        races, by_rank, logs = zip(*lab.run(measured, p, args=(name, work_name), timeout_s=120), strict=True)
    except (lab.RankError, lab.RankTimeout) as error:
        return {**record, "error": str(error)}
    race, schedule, (inputs, _) = races[0], made(name, p), WORKS[work_name].batch()
    off = max(found["off"] for found in by_rank)
    if not off <= SAME:
        raise AssertionError(f"{name} on {p} ranks, {work_name}: gradients are off by {off:.1e}")
    ratio, cpu = race.ratio(OURS, TORCHS), race.cpu_ratio(OURS, TORCHS)
    record |= {"off": off, "ratio": ratio.median, "middle_half": ratio[1:], "cpu_ratio": cpu.median}
    record |= {"seconds": race.seconds, "cpu_seconds": race.cpu_seconds}
    for k, key in enumerate(("messages", "sent_bytes")):
        record[key] = {each: sum(found[each][k] for found in by_rank) for each in (TORCHS, OURS)}
    cuts = sum(a != b for a, b in zip(schedule.placed, schedule.placed[1:], strict=False))
    record["bytes_by_theory"] = 2 * cuts * 4 * inputs.shape[:2].numel() * WORKS[work_name].width
    if work_name == IDLE:
        record |= {"bubble": bubble(logs), "bubble_by_theory": expected_bubble(name, schedule)}
    return record


def cells(record: dict[str, Any]) -> list[str]:
    """A line of the table of steps, after the schedule and its ranks."""
    if "error" in record:
        return [record["error"].splitlines()[0]]
    ratio = lab.Ratio(record["ratio"], *record["middle_half"])
    mark = "✗ missed" if ratio.median > TARGET else "✓" if ratio.median > AIM else f"✓ {AIM:.2f}"
    steps = [format_seconds(float(np.median(each))) for each in record["seconds"].values()]
    messages = " / ".join(str(each) for each in record["messages"].values())
    sent = " / ".join(format_bytes(each) for each in record["sent_bytes"].values())
    by_theory = f"{record['sent_bytes'][OURS] / record['bytes_by_theory']:.4f}"
    return [*steps, *ratio_cells(ratio), f"{record['cpu_ratio']:.3f}", mark, messages, sent, by_theory]


def bubble_cells(record: dict[str, Any]) -> list[str]:
    """The same of the table of bubbles."""
    found, expected, law = record["bubble"], record["bubble_by_theory"], record["schedule"] in LAWS
    mark = "" if not law else "✓" if abs(found / expected - 1) <= BUBBLE_TARGET else "✗ missed"
    return [f"{found:.4f}", f"{expected:.4f}", "law" if law else "simulator", f"{found / expected - 1:+.1%}", mark]


def main() -> None:
    """Measure, print, save."""
    load = os.getloadavg()[0]
    records = [compared(name, p, work) for work in WORKS for p in WORLD_SIZES for name in SCHEDULES]
    titles = {
        GPTS: f"A step of a GPT of {CONFIG.num_layers} layers of width {CONFIG.hidden}, {M} × {CONFIG.seq} tokens",
        IDLE: f"A step of stages that take a set time, 3 × {format_seconds(SECONDS)} on a rank for a micro-batch",
    }
    both = f"{TORCHS} / {OURS}"
    columns = ["step, torch's", "ours", "over torch's", "middle half", "core time", "", f"messages, {both}"]
    columns = ["schedule", "ranks", *columns, f"bytes, {both}", "/ theory"]
    for work, title in titles.items():
        own = [record for record in records if record["work"] == work]
        rows = [[record["schedule"], str(record["ranks"]), *cells(record)] for record in own]
        print_table(f"{title}, {M} micro-batches", columns, rows)
        for bound in (TARGET, AIM):
            count = sum(record["ratio"] <= bound for record in own if "error" not in record)
            verdict = "✓" if count == len(own) else "✗ missed:"
            console.print(f"{verdict} {count} of {len(own)} in at most {bound:.2f} of torch's time")
    rows = [[each["schedule"], str(each["ranks"]), *bubble_cells(each)] for each in records if "bubble" in each]
    columns = ["schedule", "ranks", "idle", "in theory", "by", "more", f"within {BUBBLE_TARGET:.0%}"]
    print_table(f"The idle part of our step, 3 × {format_seconds(SECONDS * SLOWER)} a micro-batch", columns, rows)
    off = max(record["off"] for record in records if "off" in record)
    console.print(f"all have the same gradients: off by {off:.0e} of their norm, at most {SAME:.0e}")
    console.print(f"load of the machine before: {load:.1f}")
    path = save("pp", {"race": records, "targets": [TARGET, AIM, BUBBLE_TARGET], "load_before": load})
    console.print(f"[dim]{path.relative_to(path.parents[2])}[/]")


if __name__ == "__main__":
    main()
