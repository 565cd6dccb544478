"""Gradients that are cut off: the reference runs again, with what one module takes or gives detached, for each; and
with a weight that several modules share detached in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from .case import Case, Kind
from .expected import Reference
from .matched import is_told
from .pieces import Array

_MOST = 200
"""Runs of the reference at most: one for each tensor that a module takes or gives."""

Where = tuple[int, str, int]
"""Which module, in the order of their first calls; "input", "output" or the name of a weight; which of the tensors."""


@contextmanager
def _detached(cut: Where | None) -> Iterator[dict[Where, str]]:
    """Inside, this tensor has no gradient. What it yields fills with all places where there is one, and their names."""
    order: dict[int, int] = {}
    names: dict[int, str] = {}
    seen: dict[Where, str] = {}
    alive = []
    shared: dict[int, set[int]] = {}
    put_aside: dict[tuple[nn.Module, str], nn.Parameter] = {}

    def passing(module: nn.Module, side: str, given: Any) -> Any:
        if not order:
            names.update((id(each), name) for name, each in module.named_modules())
            for each in module.modules():
                for weight in each.parameters(recurse=False):
                    shared.setdefault(id(weight), set()).add(id(each))
        alive.append(module)  # so that no other gets its id
        number = order.setdefault(id(module), len(order))
        called = names.get(id(module)) or type(module).__name__
        for key in [key for key in put_aside if key[0] is module]:
            module._parameters[key[1]] = put_aside.pop(key)
        for name, weight in list(module.named_parameters(recurse=False)) if side == "input" else ():
            if weight.requires_grad and len(shared.get(id(weight), ())) > 1:
                seen[number, name, 0] = f"the {name} that {called} shares"
                if (number, name, 0) == cut:
                    put_aside[module, name] = weight
                    module._parameters[name] = weight.detach()  # type: ignore[assignment]
        leaves, form = tree_flatten(given)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                seen[number, side, n] = f"the {side} of {called}"
                if (number, side, n) == cut:
                    leaves[n] = leaf.detach()
        return tree_unflatten(leaves, form)

    before = hooks.register_module_forward_pre_hook(lambda module, given: passing(module, "input", given))
    after = hooks.register_module_forward_hook(lambda module, given, output: passing(module, "output", output))
    try:
        yield seen
    finally:
        before.remove()
        after.remove()


def cut_off(source: Reference, cases: list[Case], first: str) -> dict[str, Kind]:
    """By name, for each of `cases` that a cut explains, the kind; of several cuts that no name speaks against and that
    explain `first`, where one is given, the one that explains most of them, the first among these."""
    with _detached(None) as places:
        source()
    best: list[str] = []
    place = ""
    for cut, called in list(places.items())[:_MOST]:
        try:
            with _detached(cut):
                found = {name: values.ravel() for name, (_, values) in source().items()}
        except Exception:  # a reference need not bear that a gradient is None
            continue
        leans = {case.name: _leans(case, found[case.name]) for case in cases if case.name in found}
        fits = [name for name, lean in leans.items() if lean > 0]
        if len(fits) > len(best) and (not first or first in fits) and min(leans.values()) >= 0:
            best, place = fits, called
    words = f"as if {place} were detached: cut off, or through a collective that autograd does not see"
    return {name: Kind("cut off", (), words) for name in best}


def _leans(case: Case, values: Array) -> int:
    """1 where what is held is what a cut gives, -1 where it is what is right, 0 where nobody can tell."""

    def cut(rank: int) -> Array:
        return values

    def right(rank: int) -> Array:
        return case.right

    if not case.differing and is_told(case, cut, right):
        return -1
    return int(is_told(case, right, cut) and case.misfit(cut) <= max(case.near, 1e-12))
