"""Harnesses of compression: gradients step by step, and what a rank remembers from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .given import Given
from .model import stepped


def fed_back(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``mean, residual = function(gradient, residual, k)`` in some steps; the desk gives a gradient at each of them."""
    given, changed = desk.next(), list[str]()
    told: dict[str, list[Any]] = {"means": [], "residuals": []}
    residual = torch.zeros(given["shape"])
    for _ in range(given["steps"]):
        arguments = [torch.from_numpy(desk.next()), residual, given["k"]]
        kept = Given(function, arguments)
        mean, residual = _pair(function(*arguments))
        told["means"].append(mean.detach().clone())
        told["residuals"].append(residual.detach().clone())
        changed += kept.changed()
    return {**told, "changed": changed}


def _pair(returned: Any) -> Any:
    if not isinstance(returned, tuple | list) or not all(isinstance(each, torch.Tensor) for each in returned):
        raise TypeError(f"the function must return a pair of tensors (mean, residual), not {type(returned).__name__}")
    if len(returned) != 2:
        raise TypeError(f"the function must return a pair of tensors (mean, residual), not {len(returned)} of them")
    return returned


def exchanges(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``exchange = function(start)``, then ``exchange(gradient)`` in some steps; the desk gives each gradient."""
    given = desk.next()
    start = torch.from_numpy(given["start"])
    kept = Given(function, [start])
    means, changed = stepped("exchange", function(start), given["steps"], desk)
    return {"means": means, "changed": kept.changed() + changed}
