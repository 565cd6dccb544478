"""Harnesses of tensor parallelism: each rank is given slices, goes forward and backward, and says what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .given import Given
from .model import elements


def mlp(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``y = function(x, *slices)``, and back from it.

    Between the two the desk gives the gradient that comes back.
    """
    given = desk.next()
    x, *slices = (torch.from_numpy(each).requires_grad_() for each in (given["x"], *given["slices"]))
    kept = Given(function, [x, *slices])
    y = function(x, *slices)
    output = y.detach().clone()
    upstream = torch.from_numpy(desk.next())
    y.backward(upstream)
    found = [each.grad for each in slices]
    return {"output": output, "gradient": x.grad, "slices": found, "changed": kept.changed()}


def loss(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``losses = function(logits, targets, first)``, and back from them.

    Between the two the desk gives the gradient that comes back. Of many elements of a gradient it tells those at some
    ``positions``.
    """
    given = desk.next()
    logits = torch.from_numpy(inputs.logits(given)).requires_grad_()
    arguments = [logits, torch.from_numpy(given["targets"]), given["first"]]
    kept = Given(function, arguments)
    losses = function(*arguments)
    upstream = torch.from_numpy(desk.next(losses.detach().norm()))
    told = losses.detach().clone()
    losses.backward(upstream)
    found = elements(logits.grad, given["positions"])
    return {"losses": told, "gradient": found, "changed": kept.changed()}
