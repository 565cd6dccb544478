"""Harness of three dimensions: each rank of a mesh is given its rows and its slices, and says what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .desk import Desk
from .given import Given


def step(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``function(x, target, A, C, axes)``: the gradients that it returns."""
    given = desk.next()
    x, target = (None if each is None else torch.from_numpy(each) for each in (given["x"], given["target"]))
    arguments = [x, target, *map(torch.from_numpy, given["slices"]), dict(given["axes"])]
    kept = Given(function, arguments)
    return {"gradients": function(*arguments), "changed": kept.changed()}
