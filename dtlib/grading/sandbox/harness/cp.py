"""Harnesses of context parallelism: each rank is given the queries, keys and values of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .given import Given
from .model import elements


def ring(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(q, k, v, lengths, causal)``; of many elements it tells those at some ``positions``."""
    given = desk.next()
    arguments = [*tensors(given, "qkv"), given["lengths"], given["causal"]]
    kept = Given(function, arguments)
    output = function(*arguments)
    return {"output": elements(output, given["positions"]), "changed": kept.changed()}


def tensors(given: dict[str, Any], names: str) -> list[torch.Tensor]:
    """What a rank makes of a seed of its own."""
    return [torch.from_numpy(each) for each in inputs.heads(given, names)]


def back(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(q, k, v, output, log_sum, gradient, lengths, causal)``: the gradients of q, k and v."""
    given = desk.next()
    q, k, v, gradient = tensors(given, "qkvg")
    output, log_sum = (torch.from_numpy(given[name]) for name in ("output", "log_sum"))
    arguments = [q, k, v, output, log_sum, gradient, given["lengths"], given["causal"]]
    kept = Given(function, arguments)
    to_q, to_k, to_v = function(*arguments)
    return {"queries": to_q, "keys": [to_k, to_v], "changed": kept.changed()}
