"""Pieces of a model's depth: the GPT cut into stages, and stages that take a set time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtlib.ranks.model import GPT, Stack, refuse_positions
from dtlib.theory.footprint import stage_layers
from dtlib.theory.valid import amount


class Stage(Stack):
    """Consecutive layers of a GPT: the first stage embeds tokens, the last gives logits.

    | | in | out |
    |---|---|---|
    | first stage | tokens (b, s) | (b, s, h) |
    | between | (b, s, h) | (b, s, h) |
    | last stage | (b, s, h) | logits (b, s, v) |
    """

    def __init__(self, model: GPT, blocks: Sequence[nn.Module], *, first: bool, last: bool) -> None:
        super().__init__()
        self.config, self.first, self.last = model.config, first, last
        self.blocks = nn.ModuleList(blocks)
        if first:
            self.token_embedding = model.token_embedding
            if not model.config.rotary:
                self.position_embedding = model.position_embedding
        if last:
            self.norm, self.head = model.norm, model.head
        self.train(model.training)

    def forward(self, x: Tensor, *, offset: int | Tensor = 0, **where: Any) -> Tensor:
        """Through this stage's layers; see the table for shapes, and `GPT.forward` for `offset` and what else blocks
        are told."""
        if self.first:
            refuse_positions(x.shape[1], offset, self.config.seq)
        x_bsh = self.embed(x, offset) if self.first else x
        where |= {"offset": offset} if self.config.rotary else {}
        x_bsh = self.run_blocks(x_bsh, **where)
        return self.logits(x_bsh) if self.last else x_bsh


def cut(model: GPT, num_stages: int, layers: Sequence[int] | None = None) -> list[Stage]:
    """`model` as `num_stages` stages, with its own weights: `layers` says how many layers each has, by default as even
    as possible. A rank keeps those that its schedule gives it and drops the others.

    ``ValueError`` for more stages than layers, or `layers` that are not all layers of the model.
    """
    counts = list(stage_layers(len(model.blocks), num_stages) if layers is None else layers)
    if len(counts) != num_stages or sum(counts) != len(model.blocks) or min(counts) < 0:
        raise ValueError(f"layers must be {num_stages} numbers that add up to {len(model.blocks)}, not {counts}")
    blocks, stages = list(model.blocks), []
    for stage, count in enumerate(counts):
        own, blocks = blocks[:count], blocks[count:]
        stages.append(Stage(model, own, first=stage == 0, last=stage == num_stages - 1))
    return stages


class Timed(nn.Module):
    """A stage that multiplies by one number and takes a set time, without using the core: it sleeps.

    Forward, the gradient of its input and that of its weight each take their own seconds, in operations of their own,
    so that a backward pass that is split is split here too. Any shape in, the same out.
    """

    def __init__(self, forward: float, input_gradient: float, weight_gradient: float) -> None:
        super().__init__()
        given = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
        self.seconds = {name: float(amount(name, value)) for name, value in given.items()}
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """x times the weight, after a while."""
        time.sleep(self.seconds["forward"])
        x = _SleepBackward.apply(x, self.seconds["input_gradient"]) if x.requires_grad else x
        return x * _SleepBackward.apply(self.weight, self.seconds["weight_gradient"])


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        time.sleep(context.seconds)
        return gradient, None
