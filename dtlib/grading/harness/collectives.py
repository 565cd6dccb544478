"""Harnesses of the collectives: each rank fills a tensor, calls the learner's function, and reports what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .meter import metered


def _measured(case: Mapping[str, Any], call: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    tensor = torch.from_numpy(case["values"])
    with metered() as meter:
        returned = call(tensor)
    return {"tensor": tensor, "returned": returned, **meter.counts}


def broadcast(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(tensor, src)``, in place."""
    return _measured(case, lambda tensor: function(tensor, case["src"]))


def reduce_scatter(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(tensor)``, which returns this rank's chunk."""
    return _measured(case, function)


def all_reduce(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(tensor, op)``, in place."""
    return _measured(case, lambda tensor: function(tensor, case["op"]))
