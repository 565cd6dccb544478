"""Harness of asynchrony: gradients step by step, and the weights that a rank has after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .given import Given
from .model import returned_function


def steps_alone(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function(weights, rate, local_steps, samples)``, then ``weights = step(gradient)`` in some steps; the
    desk gives each gradient."""
    given, told, changed = desk.next(), [], list[str]()
    start = [torch.from_numpy(given["weights"]), *(given[name] for name in ("rate", "local_steps", "samples"))]
    kept = Given(function, start)
    step = returned_function(function(*start))
    for _ in range(given["steps"]):
        arguments = [torch.from_numpy(desk.next())]
        before = Given(step, arguments)
        weights = step(*arguments)
        if not isinstance(weights, torch.Tensor):
            raise TypeError(f"step must return a tensor, not {type(weights).__name__}")
        told.append(weights.detach().clone())
        changed += before.changed()
    return {"weights": told, "changed": kept.changed() + changed}
