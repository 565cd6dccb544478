"""Pipelines from scratch against torch's own, schedule by schedule, in one run: GPipe, 1F1B, interleaved, ZB-V, DualPipeV.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from dtlib.ranks.pp.executor import counted_tokens, sum_of_losses
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
CONFIG = GPTConfig(num_layers=8, hidden=256, num_heads=4, seq=64, tied=False)
SECONDS = 0.012
"""What a rank spends on a micro-batch forward, on its input's gradient and on its weights' gradient, each."""
TORCHS, OURS = "torch's", "ours"
TARGET, AIM, BUBBLE_TARGET, SAME = 1.0, 0.90, 0.05, 1e-5


class Idle(pp.Timed):
    """A stage that takes a set time, the first one too: its input needs a gradient, which the model's data do not."""

    def forward(self, x: Tensor) -> Tensor:
        """x times the weight, after a while."""
        return super().forward(x if x.requires_grad else x.detach().requires_grad_())


@dataclass(frozen=True)
class Work:
    """What a pipeline is to do: stages, a batch, and a loss as a sum, as a mean, and by how much they differ."""

    rounds: int
    width: int
    stages: Callable[[theory.Schedule], list[nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_sum: Callable[..., Tensor]
    loss_mean: Callable[..., Tensor]
    count: Callable[[Tensor], int]


def idle_stages(schedule: theory.Schedule) -> list[nn.Module]:
    """A stage's share of a rank's time, for each stage."""
    return [Idle(*[SECONDS / schedule.chunks] * 3) for _ in schedule.placed]


WORKS = {
    "GPT": Work(
        9, CONFIG.hidden, lambda schedule: [*pp.cut(GPT(CONFIG), schedule.num_stages)],
        lambda: next(batches(load_text(), batch=M, seq=CONFIG.seq)), sum_of_losses, next_token_loss, counted_tokens,
    ),
    "set time": Work(
        5, 1, idle_stages, lambda: (torch.ones(M, 1, 1), torch.zeros(M, 1, 1)),
        lambda y, _: y.sum(), lambda y, _: y.mean(), torch.numel,
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
        """The rest of it, once there are stages."""
        self.pipeline = pp.Pipeline(
            self.stages, self.schedule, width=self.work.width, loss=self.work.loss_sum, count=self.work.count
        )

    def go(self) -> None:
        """Forward and backward with the whole batch."""
        self.pipeline.step(self.inputs, self.targets)

    def step(self) -> None:
        """The same, from no gradients on."""
        for stage in self.stages.values():
            stage.zero_grad()
        self.go()

    def gradients(self) -> Tensor:
        """All of this rank's gradients end to end."""
        return torch.cat([each.grad.flatten() for stage in self.stages.values() for each in stage.parameters()])

    def timed(self) -> list[tuple[theory.Action, float, float]]:
        """The actions of one step, with when they began and ended."""
        log = []

        @contextmanager
        def around(action: theory.Action) -> Iterator[None]:
            start = time.monotonic()
            yield
            log.append((action, start, time.monotonic()))

        self.pipeline.around = around
        self.step()
        self.pipeline.around = lambda action: nullcontext()
        return log


class Torchs(Ours):
    """The same by torch's own stages and schedule."""

    def prepare(self, name: str) -> None:
        """The rest of it, once there are stages."""
        number, device = self.schedule.num_stages, torch.device("cpu")
        stages = [pipelining.PipelineStage(stage, k, number, device) for k, stage in self.stages.items()]
        self.torchs = SCHEDULES[name](stages if self.schedule.chunks > 1 else stages[0], M, self.work.loss_mean)

    def go(self) -> None:
        """Forward and backward with the whole batch."""
        inputs = (self.inputs,) if 0 in self.stages else ()
        target = self.targets if self.schedule.num_stages - 1 in self.stages else None
        self.torchs.step(*inputs, target=target, return_outputs=False)


def measured(name: str, work_name: str) -> tuple[lab.Race, dict[str, Any], list[list[Any]]]:
    """In a rank: the race; how far gradients are off and what each sent; and our actions in time, round by round."""
    work = WORKS[work_name]
    contenders = {TORCHS: Torchs(name, work), OURS: Ours(name, work)}
    race = lab.race({each: one.step for each, one in contenders.items()}, rounds=work.rounds)
    theirs, ours = (one.gradients() for one in contenders.values())
    found: dict[str, Any] = {"off": float((ours - theirs).norm() / theirs.norm())}
    for each, one in contenders.items():
        lab.barrier()
        with lab.SendCounter() as counter:
            one.step()
        found[each] = counter.num_sends, counter.sent_bytes, len(counter.collectives)
    logs = []
    for _ in range(work.rounds if work_name == "set time" else 0):
        lab.barrier()
        logs.append(contenders[OURS].timed())
    return race, found, logs


def bubble(schedule: theory.Schedule, logs: list[Any]) -> float:
    """The idle part of a step, from each rank's actions."""
    places = [tuple(zip(*log, strict=True)) for log in logs]
    starts, ends = (tuple(each[k] for each in places) for k in (1, 2))
    zero = min(each[0] for each in starts)
    shifted = [tuple(tuple(t - zero for t in each) for each in times) for times in (starts, ends)]
    return theory.Timetable(schedule, *shifted).bubble


def expected_bubble(name: str, p: int) -> float:
    """By the law, or by the simulator; where a backward pass is split the first stage leaves all of it for later."""
    schedule = made(name, p)
    if name in ("GPipe", "1F1B", "interleaved"):
        return theory.bubble_fraction(p, M, schedule.chunks)
    own = SECONDS / schedule.chunks
    later = [own] * (schedule.num_stages - 1)
    return theory.simulate(schedule, SECONDS, [0.0, *later], [2 * own, *later]).bubble
