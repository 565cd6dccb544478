"""Gradients that are cut off, or that flow through other values than the forward pass had: the reference runs again,
with what one module takes or gives detached, for each; with a weight that several modules share detached in one of
them; and with a module that is computed again, for its backward pass, from what another one takes or gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from .case import Case, Kind
from .expected import Reference
from .matched import is_told
from .pieces import Array

_MOST = 200
"""Runs of the reference at most: one for each tensor that a module takes or gives, or is computed from again."""

Where = tuple[int, str, int]
"""Which module, in the order of their first calls; "input", "output", the name of a weight, or "again"; which of the
tensors, "again" of all those that modules took and gave before."""


@contextmanager
def _changed(cut: Where | None, suspects: Callable[[str], bool]) -> Iterator[dict[Where, str]]:
    """Inside, the reference is changed in one place. What it yields fills with all places where it could be, and what
    would be so there. `suspects` says, by their names, which modules may be computed again."""
    order: dict[int, int] = {}
    names: dict[int, str] = {}
    seen: dict[Where, str] = {}
    alive = []
    shared: dict[int, set[int]] = {}
    put_aside: dict[tuple[nn.Module, str], nn.Parameter] = {}
    passed: list[tuple[str, Tensor]] = []
    entered: dict[int, tuple[int, Tensor]] = {}
    is_off = False

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
                seen[number, name, 0] = f"the {name} that {called} shares were detached"
                if (number, name, 0) == cut:
                    put_aside[module, name] = weight
                    module._parameters[name] = weight.detach()  # type: ignore[assignment]
        leaves, form = tree_flatten(given)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                seen[number, side, n] = f"the {side} of {called} were detached"
                passed.append((f"the {side} of {called}", leaf.detach()))
                if (number, side, n) == cut:
                    leaves[n] = leaf.detach()
        return tree_unflatten(leaves, form)

    def entering(module: nn.Module, given: Any) -> Any:
        if is_off:
            return None
        entered[id(module)] = len(passed), torch.get_rng_state()
        return passing(module, "input", given)

    def leaving(module: nn.Module, given: Any, output: Any) -> Any:
        nonlocal is_off
        if is_off:
            return None
        before, dice = entered[id(module)]
        number, called = order[id(module)], names.get(id(module), "")
        x = given[0] if given and isinstance(given[0], Tensor) else None
        for n, (words, other) in enumerate(passed[:before] if suspects(called) else ()):
            if x is None or not isinstance(output, Tensor) or other.shape != x.shape or torch.equal(other, x):
                continue
            seen[number, "again", n] = f"{called} were computed again, for its backward pass, from {words}"
            if (number, "again", n) == cut:
                is_off = True
                with torch.random.fork_rng(devices=[]):
                    torch.set_rng_state(dice)
                    wrong = module(other + (x - x.detach()), *given[1:])
                is_off = False
                output = wrong + (output - wrong).detach()
        return passing(module, "output", output)

    before = hooks.register_module_forward_pre_hook(entering)
    after = hooks.register_module_forward_hook(leaving)
    try:
        yield seen
    finally:
        before.remove()
        after.remove()


def cut_off(source: Reference, cases: list[Case], first: str) -> dict[str, Kind]:
    """By name, for each of `cases` that a change explains, the kind; of several changes that no name speaks against and
    that explain `first`, where one is given, the one that explains most of them, the first among these."""

    def has_it(called: str) -> bool:  # the weight whose gradient is the first that differs
        return bool(called) and f".{called}." in f".{first.rpartition('/')[2]}"

    places: dict[Where, str] = {}
    for suspects in (lambda called: False, has_it, bool):  # the likelier ones first
        with _changed(None, suspects) as more:
            source()
        places |= {where: place for where, place in more.items() if where not in places}
    best: list[str] = []
    kind = Kind("cut off")
    for cut, place in list(places.items())[:_MOST]:
        if best and cut[1] == "again" and kind.code == "cut off":
            break
        try:
            with _changed(cut, bool):
                found = {name: values.ravel() for name, (_, values) in source().items()}
        except Exception:  # a reference need not bear that a gradient is None
            continue
        leans = {case.name: _leans(case, found[case.name]) for case in cases if case.name in found}
        fits = [name for name, lean in leans.items() if lean > 0]
        if len(fits) > len(best) and (not first or first in fits) and min(leans.values()) >= 0:
            tail = "" if cut[1] == "again" else ": cut off, or through a collective that autograd does not see"
            best, kind = fits, Kind("recomputed" if cut[1] == "again" else "cut off", (), f"as if {place}{tail}")
    return dict.fromkeys(best, kind)


def _leans(case: Case, values: Array) -> int:
    """1 where what is held is what a change gives, -1 where it is what is right, 0 where nobody can tell."""

    def cut(rank: int) -> Array:
        return values

    def right(rank: int) -> Array:
        return case.right

    if not case.differing and is_told(case, cut, right):
        return -1
    return int(is_told(case, right, cut) and case.misfit(cut) <= max(case.near, 1e-12))
