"""Harness of sequence parallelism: each rank is given its tokens and its slices, goes forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .given import Given
from .model import elements


def mlp(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``y = function(x, *weights)``, and back from it: x of a rank's own tokens, weights that others have or not.

    Between the two the desk gives the seed of the gradient that comes back. Of many elements it tells those at some
    ``positions``.
    """
    given = desk.next()
    x = torch.from_numpy(inputs.own_tokens(given["own_seed"], given["shape"])).requires_grad_()
    weights = [torch.from_numpy(each).requires_grad_() for each in given["weights"]]
    kept = Given(function, [x, *weights])
    y = function(x, *weights)
    output: Any = elements(y, given["positions"])
    upstream = inputs.noise({"weights_seed": desk.next(output.norm())}, "upstream", given["shape"])
    y.backward(torch.from_numpy(upstream))
    gradient = elements(x.grad, given["positions"])
    found = [each.grad for each in weights]
    return {"output": output, "gradient": gradient, "weights": found, "changed": kept.changed()}
