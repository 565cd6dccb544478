"""Harness of expert parallelism: each rank is given its tokens and its experts, goes forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .given import Given


def routed(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``y = function(x, experts, weights, up, down)``, and back from it.

    Between the two the desk gives the gradient that comes back.
    """
    given = desk.next()
    x, weights, up, down = (torch.from_numpy(given[name]).requires_grad_() for name in ("x", "weights", "up", "down"))
    arguments = [x, torch.from_numpy(given["experts"]), weights, up, down]
    kept = Given(function, arguments)
    y = function(*arguments)
    output = y.detach().clone()
    y.backward(torch.from_numpy(desk.next()))
    told = {"output": output, "gradient": x.grad, "router": weights.grad, "experts": [up.grad, down.grad]}
    return told | {"changed": kept.changed()}
