"""Harnesses of data parallelism: gradients to average, micro-batches to accumulate, hooks to attach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .network import Network, batches, gradients, loss_fn
from .watch import Watch


def token_weighted(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(gradient, num_tokens)``, in place."""
    given, watch = desk.next(), Watch()
    gradient = torch.from_numpy(given["values"])
    with watch.watching():
        returned = function(gradient, given["num_tokens"])
    return {"tensor": gradient, "returned": returned, **watch.told}


def accumulate(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(model, micro_batches, loss_fn)``, which leaves the gradients in ``parameter.grad``."""
    given, watch = desk.next(), Watch()
    model = Network(given)
    with watch.watching():
        function(model, batches(given), loss_fn)
    return {"gradients": gradients(model), **watch.told}


def overlap(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``finish = function(model, bucket_bytes)``, then steps of backward, through the gates, and ``finish()``.

    The desk is asked once more when backward has ended, and when ``finish`` has.
    """
    given, watch, seen = desk.next(), Watch(), []
    model = Network(given, desk)
    with watch.watching():
        finish = function(model, given["bucket_bytes"])
        for batch in batches(given):
            model.zero_grad(set_to_none=True)
            loss_fn(model, batch).backward()
            desk.next()
            finish()
            desk.next()
            seen.append(gradients(model))
    return {"gradients": [each for step in seen for each in step], **watch.told}
