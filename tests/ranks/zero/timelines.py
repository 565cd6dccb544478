"""The memory of a step, measured by `lab.memory_spans` on a rank and `played`, side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtlib import lab
from dtlib.ranks.model import GPT, GPTConfig, next_token_loss

from .buckets import Bucket, reduction_buckets, unit_buckets
from .played import Rules, Span, play

make_adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
make_sgd = functools.partial(torch.optim.SGD, lr=0.1)
PLAIN_SGD = {"states": 0, "scalar_bytes": 0, "step_copies": 0, "step_kept": 0}
MASTER = {"width": 2, "master_width": 4}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained: `options` are the wrapper's, `rules` what theory is told of it."""

    config: GPTConfig
    batch: int = 2
    optimizer: Callable[..., Any] = make_adamw
    options: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    no_sync: bool = False

    @property
    def units(self) -> list[str]:
        return [f"blocks.{i}" for i in range(self.config.num_layers)]

    def tokens(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.config.seq, dtype=torch.int64)


def alone(case: Case) -> list[lab.MemorySpan]:
    """The passes of one micro-batch, without any sharding."""
    model, tokens = GPT(case.config), case.tokens()
    with lab.memory_spans(model, tokens, units=case.units) as spans:
        next_token_loss(model(tokens), tokens).backward()
    return spans


def trained(case: Case, wrap: Callable[..., Any]) -> list[lab.MemorySpan]:
    """The second step on this rank: in the first one states are made, and the order of modules is learnt."""
    wrapped, tokens = wrap(GPT(case.config), case.optimizer, **case.options), case.tokens()
    for _ in range(2):
        wrapped.optimizer.zero_grad()
        with lab.memory_spans(wrapped.module, wrapped, wrapped.optimizer, tokens, units=case.units) as spans:
            for i in range(case.micro_batches):
                with wrapped.no_sync() if case.no_sync and i < case.micro_batches - 1 else nullcontext():
                    next_token_loss(wrapped(tokens), tokens).backward()
            wrapped.optimizer.step()
    return spans


@functools.cache
def work(config: GPTConfig, batch: int) -> list[lab.MemorySpan]:
    """What the passes of one process hold."""
    return lab.at_scale(alone, 1, args=(Case(config, batch),)).result


def params_of(module: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in module.named_parameters()}


def buckets_of(case: Case, stage: int) -> list[Bucket]:
    width, params = case.rules.get("width", 4), params_of(GPT(case.config))
    if stage == 3:
        return unit_buckets(params, case.units)
    sizes = {name: value for name, value in case.options.items() if "bucket" in name}
    return reduction_buckets(params, width=width, **sizes)


def predicted(case: Case, stage: int, n: int, rank: int) -> list[Span]:
    names = ("prefetch", "reshard_after_forward", "overlap")
    rules = {name: value for name, value in case.options.items() if name in names} | case.rules
    return play(
        buckets_of(case, stage),
        work(case.config, case.batch),
        n,
        stage,
        rank=rank,
        rules=Rules(**rules),
        micro_batches=case.micro_batches,
        no_sync=case.no_sync,
    )


def assert_alike(played: Sequence[Span], measured: Sequence[lab.MemorySpan]) -> None:
    """Raise AssertionError unless both are the same story.

    At every event each kind is the same to the byte, except what is temporary; between events the fullest moment is
    within 2 %, in total and each kind by itself (of the total). What an optimizer computes with besides is torch's
    business, and so are the few bytes of a loss: they are in the 2 %.
    """
    assert [(span.event, span.name) for span in played] == [(span.event, span.name) for span in measured]
    for theirs, mine in zip(measured, played, strict=True):
        where = f"{mine.event} {mine.name}"
        for kind, size in mine.held.kinds.items():
            slack = 64 if kind == "temporary" else 0
            assert abs(size - getattr(theirs.held, kind)) <= slack, f"{kind} at {where}: {size}, {theirs.held}"
        allowed = 0.02 * theirs.fullest.total
        assert abs(mine.fullest.total - theirs.fullest.total) <= allowed, f"fullest after {where}: {mine}, {theirs}"
        for kind, size in mine.fullest.kinds.items():
            off = abs(size - getattr(theirs.fullest, kind))
            assert off <= allowed, f"fullest {kind} after {where}: {size}, {theirs.fullest}"


def peak(spans: Sequence[Any]) -> Any:
    """What was held at the fullest moment of all."""
    return max((span.fullest for span in spans), key=lambda held: held.total)
