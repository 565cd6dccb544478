"""Harness of asynchrony: gradients step by step, and the weights that a rank has after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .given import Given
from .model import stepped


def steps_alone(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function(weights, rate, local_steps, samples)``, then ``weights = step(gradient)`` in some steps; the
    desk gives each gradient."""
    given = desk.next()
    start = [torch.from_numpy(given["weights"]), *(given[name] for name in ("rate", "local_steps", "samples"))]
    kept = Given(function, start)
    told, changed = stepped("step", function(*start), given["steps"], desk)
    return {"weights": told, "changed": kept.changed() + changed}


def served(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``weights = function(weights, rate, updates, next_gradient)``: the desk gives each gradient, and is shown the
    size of the weights that it is asked with."""
    given = desk.next()
    arguments = [torch.from_numpy(given["weights"]), given["rate"], given["updates"]]
    kept, left = Given(function, arguments), given["gradients"]

    def next_gradient(weights: torch.Tensor) -> torch.Tensor:
        if not isinstance(weights, torch.Tensor) or weights.shape != arguments[0].shape:
            raise ValueError(f"weights must be a tensor of shape {tuple(arguments[0].shape)}, not {weights!r}")
        nonlocal left
        if not left:
            has = "has been asked more often than there are updates" if given["gradients"] else "is asked on rank 0"
            raise RuntimeError(f"next_gradient {has}")
        left -= 1
        return torch.from_numpy(desk.next(weights.detach().double().norm()))

    weights = function(*arguments, next_gradient)
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"the function must return a tensor, not {type(weights).__name__}")
    for _ in range(left):
        desk.next()
    return {"weights": weights.detach().clone(), "changed": kept.changed()}
