"""What to say where nothing fits, or nothing is like what was asked for: what is possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dtlib.theory.footprint import DEGREES
from dtlib.theory.models import Architecture
from dtlib.theory.timing import Constants, Machine, Plan
from dtlib.theory.timing.space import EVERYTHING, MOST_CARDS, Space, larger, meshes
from dtlib.theory.units import format_bytes

from .laws import recompute_of
from .memory import least_cards, margin_of, plan_memory

if TYPE_CHECKING:
    from .partial import Timed


def nothing_fits(
    model: Architecture, timed: list[Timed], machine: Machine, sequences: int, imbalance: float, fixed: bool,
    space: Space, k: Constants, found: Callable[[Iterable[Plan], Machine, Space], Plan | None],
) -> str:  # fmt: skip
    """What to say where nothing fits: the plan that needs the least, and the nearest machine on which one fits.

    Where degrees are `fixed`, others may do on the same cards, and where `space` leaves something out, that. `found` is
    asked for a plan that fits among meshes, on a machine, of a part of the choices.
    """
    plan, needed = _least(model, timed, k, partly="some" in space.recompute and "full" not in space.recompute)
    if needed == math.inf:
        return f"recompute must not be some alone where no piece of {model.name} has two layers"
    has, name = format_bytes(machine.accelerator.memory_bytes, digits=3), machine.accelerator.name
    said = (
        f"no plan of {model.name} fits on gpus={machine.gpus} ({name}, {has} each): the least is "
        f"{format_bytes(needed, digits=3)} with a margin of {margin_of(plan, k):.0%} "
        f"({_degrees(plan)}, recompute {recompute_of(plan)})"
    )
    fewest = least_cards(model, machine.accelerator, plan.least_recipe, k)
    if fewest > MOST_CARDS:
        return f"{said}; the states alone take {fewest:,} such cards"
    like, asked = timed[0].mesh, [each.mesh for each in timed]
    others = f"without {' and '.join(space.narrowed)} held fixed others"
    tried = [(others, machine, EVERYTHING)] * bool(space.narrowed) + [("other degrees", machine, space)] * fixed
    sizes = larger(machine, fewest)
    for which, more, of in tried + [(str(more.gpus), more, space) for more in sizes]:
        possible = asked if which == others else meshes(model, more, sequences, like, imbalance, of)
        p = found(possible, more, of)
        if p is not None:
            return said + f"; {which} do ({_degrees(p)})"
    return said + (f"; nor does one on more such cards, as far as was tried: {sizes[-1].gpus:,}" if sizes else "")


def _degrees(plan: Plan) -> str:
    degrees = ", ".join(f"{name} {getattr(plan, name)}" for name in DEGREES if name != "ep" or plan.ep > 1)
    return f"{degrees}, ZeRO {plan.zero}" + f" among {plan.shard} ranks" * (plan.shard is not None)


def _least(model: Architecture, timed: list[Timed], k: Constants, partly: bool) -> tuple[Plan, float]:
    """The plan that needs the fewest bytes with its margin, and how many: bounds from below say which need not be
    counted.

    Where none may compute all layers again, but some (`partly`), those that would leave out one.
    """
    rows = [(float(bound), mesh, row) for mesh, each in enumerate(timed) for row, bound in enumerate(each.least_bytes)]
    best, needed = timed[0].mesh, math.inf
    for bound, mesh, row in sorted(rows):
        if bound * (1 + k.margin) >= needed:  # no margin is below that one
            break
        plan = timed[mesh].plan(row)
        if partly and plan.recompute == "full" and plan.recompute_layers is None:
            most = max(map(max, plan.pieces(model)))
            if most == 1:
                continue
            plan = plan.changed(recompute_layers=most - 1)
        total = plan_memory(model, plan, k).total * (1 + margin_of(plan, k))
        if total < needed:
            best, needed = plan, total
    return best, needed


def impossible(model: Architecture, fixed: Mapping[str, int], of: Sequence[Plan], gpus: int, sequences: int) -> str:
    """What to say where no mesh has these degrees: which ones each axis may have, or that they do not go together."""
    for name, size in fixed.items():
        possible = sorted({getattr(mesh, name) for mesh in of})
        if name == "ep" and model.experts is None and size > 1:
            return f"ep must be 1 for a model without experts, not {size}"
        if size not in possible:
            shared = name == "dp" or (name == "ep" and model.experts and model.experts.num_experts % size == 0)
            batch = f" and a batch of {sequences}" if shared and sequences % size else ""
            some = "one of " * (len(possible) > 1) + ", ".join(map(str, possible))
            return f"{name} must be {some} with gpus={gpus}{batch}, not {size}"
    said = " and ".join(f"{name}={size}" for name, size in fixed.items())
    return f"{said} do not go together with gpus={gpus}, the model's sizes and the batch"
