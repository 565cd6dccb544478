"""Harnesses of ZeRO: weights to split, gradients and states in shares, layers gathered for use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .desk import Desk
from .network import Network, batches, loss_fn, make_optimizer, sample
from .watch import Watch


def optimizer(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function(parameters, make_optimizer)``, then some steps of backward and ``step()``.

    After each step the desk is asked for nothing: what is held then is held between steps. At the end it tells which
    elements of the weights it wants to know.
    """
    given = desk.next()
    model, watch = Network(given), Watch()
    data, maker = batches(given), make_optimizer(given)
    with watch.watching():
        step = function(list(model.parameters()), maker)
        if not callable(step):
            raise TypeError(f"the function must return a function, not {type(step).__name__}")
        seen = []
        for batch in data:
            loss_fn(model, batch).backward()
            step()
            model.zero_grad(set_to_none=True)
            seen.append(sample(model.parameters(), desk.next()))
    return {"weights": seen, **watch.told}
