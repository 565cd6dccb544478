"""Harnesses of data parallelism: gradients to average, micro-batches to accumulate, hooks to attach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .collectives import on_values
from .desk import Desk
from .given import Given
from .model import Model, batches, gradients, loss_fn

token_weighted = partial(on_values, names=("num_tokens",))


def accumulate(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(model, micro_batches, loss_fn)``, which leaves the gradients in ``parameter.grad``."""
    given = desk.next()
    model = Model(given)
    arguments = [model, batches(given), loss_fn]
    kept = Given(function, arguments)
    function(*arguments)
    return {"gradients": gradients(model), "changed": kept.changed()}


def overlap(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``finish = function(model, bucket_bytes)``, then steps of backward, through the gates, and ``finish()``.

    The desk is asked once more when backward has ended, and when ``finish`` has.
    """
    given, seen = desk.next(), []
    model = Model(given, desk)
    finish = function(model, given["bucket_bytes"])
    for batch in batches(given):
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        desk.next()
        finish()
        desk.next()
        seen += gradients(model)
    return {"gradients": seen}
