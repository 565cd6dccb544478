"""Harness of replicas that are watched while they train."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from dtlib.grading.exercises import inputs

from .desk import Desk
from .given import Given

_FLOATS = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}


def guarded(function: Callable[..., Any], desk: Desk) -> dict[str, Any]:
    """``step = function(parameters, every, replicas)``, then ``step()`` after each step: what it found.

    A step changes some low bits of all replicas alike; the desk says which elements then have other bits as well.
    """
    given = desk.next()
    words = [torch.from_numpy(each) for each in inputs.words(given)]
    shaped = zip(words, given["shapes"], given["bits"], given["turned"], strict=True)
    floats = [(each.view(_FLOATS[bits]).view(shape), turned) for each, shape, bits, turned in shaped]
    parameters = [torch.nn.Parameter(each.t() if turned else each) for each, turned in floats]
    arguments = [parameters, given["every"], given["replicas"]]
    kept = Given(function, arguments[1:])
    before = [each.clone() for each in words]
    step, found = mock.patch.object(builtins, "hash", _hash)(function)(*arguments), []
    changed = [] if _alike(words, before) else ["parameters"]
    if not callable(step):
        raise TypeError(f"the function must return one that is called after each step, not {type(step).__name__}")
    for number in range(given["steps"]):
        for each, mask in zip(words, inputs.words(given, number), strict=True):
            each ^= torch.from_numpy(mask)
        for place, element, word in desk.next():
            words[place][element] = word
        before = [each.clone() for each in words]
        with mock.patch.object(builtins, "hash", _hash):
            found.append(step())
        changed += [] if _alike(words, before) else ["parameters"]
    desk.next()
    return {"found": found, "changed": kept.changed() + changed}


def _hash(value: object, known: Callable[[object], int] = hash) -> int:
    """As in processes that were started one by one: of text and bytes each has another."""
    return known((os.getpid(), value) if isinstance(value, str | bytes) else value)


def _alike(words: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(words, before, strict=True))
