"""Gradients that are cut off: the reference runs again, with what one module takes or gives detached, for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from .case import Case, Kind
from .expected import Reference
from .pieces import Array

_MOST = 200
"""Runs of the reference at most: one for each tensor that a module takes or gives."""

Where = tuple[int, str, int]
"""Which module, in the order of their first calls; "input" or "output"; which of the tensors there."""


@contextmanager
def _detached(cut: Where | None) -> Iterator[dict[Where, str]]:
    """Inside, this tensor has no gradient. What it yields fills with all places where there is one, and their names."""
    order: dict[int, int] = {}
    names: dict[int, str] = {}
    seen: dict[Where, str] = {}
    alive = []

    def passing(module: nn.Module, side: str, given: Any) -> Any:
        if not order:
            names.update((id(each), name) for name, each in module.named_modules())
        alive.append(module)  # so that no other gets its id
        number = order.setdefault(id(module), len(order))
        leaves, form = tree_flatten(given)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                seen[number, side, n] = f"the {side} of {names.get(id(module)) or type(module).__name__}"
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


def cut_off(source: Reference, differing: list[Case], agreeing: list[Case]) -> dict[str, Kind]:
    """By name, for each of `differing` that a cut explains, the kind; of several cuts that leave `agreeing` alone the
    one that explains most of them, the first among these."""
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
        if any(c.allowed.beyond(found[c.name], c.right) > 1 for c in agreeing if c.name in found):
            continue
        fits = [c.name for c in differing if c.name in found and _fits(c, found[c.name])]
        if differing[0].name in fits and len(fits) > len(best):
            best, place = fits, called
    words = f"as if {place} were detached: cut off, or through a collective that autograd does not see"
    return {name: Kind("cut off", (), words) for name in best}


def _fits(case: Case, found: Array) -> bool:
    return case.is_right(case.misfit(lambda rank: found))
