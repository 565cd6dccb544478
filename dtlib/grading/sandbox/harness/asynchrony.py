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
