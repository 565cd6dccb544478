"""Harness of batch: gradients step by step, and what a meter of their noise says after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .given import Given
from .model import returned_function

PARTS = ("mean", "square", "variance", "scale")


def measured(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function()``, then ``mean, square, variance, scale = step(gradient, num_samples)`` in some steps; the
    desk gives a gradient and a number of samples at each of them."""
    told: dict[str, Any] = {name: [] for name in PARTS}
    changed: list[str] = []
    steps = desk.next()
    step = returned_function(function())
    for _ in range(steps):
        piece = desk.next()
        arguments = [torch.from_numpy(piece["gradient"]), piece["num_samples"]]
        kept = Given(step, arguments)
        returned = step(*arguments)
        if not isinstance(returned, tuple | list) or len(returned) != len(PARTS):
            raise TypeError(f"step must return a tuple of four ({', '.join(PARTS)}), not {type(returned).__name__}")
        if not isinstance(returned[0], torch.Tensor):
            raise TypeError(f"the mean that step returns must be a tensor, not {type(returned[0]).__name__}")
        told["mean"].append(returned[0].detach().clone())
        for name, number in zip(PARTS[1:], returned[1:], strict=True):
            told[name].append(float(number))
        changed += kept.changed()
    return {**told, "changed": changed}
