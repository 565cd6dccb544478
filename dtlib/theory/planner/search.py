"""The search: every plan of a model on a machine, timed mesh by mesh, and the best of those that fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.footprint import AXES
from dtlib.theory.models import Architecture, checked_model
from dtlib.theory.timing import FITTED, Constants, Machine, Plan, profile, step_terms, step_time
from dtlib.theory.units import format_bytes
from dtlib.theory.valid import amount, whole

from .answer import TIE, Answer, Found, effort, what_buys
from .errors import interval
from .memory import PlanMemory, fit, least_cards, margin_of, plan_memory
from .space import EVERYTHING, MOST_CARDS, PLAIN, Space, choices, larger, meshes


@dataclass(frozen=True)
class Timed:
    """The plans of one mesh: a column of each choice, their seconds, and a bound from below of their bytes.

    Seconds are infinite where the bound is above what was asked for.
    """

    mesh: Plan
    choices: dict[str, NDArray[Any]]
    seconds: NDArray[np.float64]
    least_bytes: NDArray[np.float64]

    def plan(self, index: int) -> Plan:
        """The plan in row `index`."""
        return self.mesh.changed(**{name: column[index].item() for name, column in self.choices.items()})


def default_sequences(gpus: int, seq: int) -> int:
    """Sequences of a step where nobody says: four million tokens, or 1024 a card if that is more.

    Rounded up to a multiple of the cards, or of their odd part where there are more cards than sequences.
    """
    number = max(1, max(2**22, 1024 * gpus) // seq)
    unit = gpus if number >= gpus else gpus // (gpus & -gpus)
    return -(-number // unit) * unit


def search(
    model: Architecture | str,
    machine: Machine,
    *,
    sequences: int | None = None,
    seq: int | None = None,
    recipe: str = "18-byte",
    keep: int = 5,
    degrees: Mapping[str, int] | None = None,
    imbalance: float = 1,
    constants: Constants | None = None,
    space: Space = EVERYTHING,
    framework: str = "megatron",
    like: Plan = PLAIN,
) -> Answer:
    """The fastest plans of `model` on all cards of `machine`, of `sequences` sequences of `seq` tokens a step.

    Every degree that the model divides by, every ZeRO stage, sequence parallelism (which gathers its inputs again or
    keeps them), micro-batch, schedule, number of equal chunks and recompute is timed; flash attention, no dropout.
    `degrees` holds some of dp, tp, pp, cp and ep fixed; of the other choices `space` says what is looked at. Of experts
    the busiest rank gets `imbalance` times as many tokens as the mean, or, on fewer ranks, as many as there are. A plan
    is taken where its memory fits with the margin added: ``fit.has_room``. Constants are those of `framework` where no
    others are given; what its runs were off by is the interval of a time. What none of these names is that of `like`,
    in all plans. ``ValueError`` for arguments out of range and where nothing fits: it says what is missing, and the
    nearest plan that fits, with other degrees, without what `space` holds fixed, or on more cards.
    """
    model, constants = checked_model(model), profile(framework) if constants is None else constants
    seq = model.seq if seq is None else whole("seq", seq, 1)
    number = default_sequences(machine.gpus, seq)
    sequences = number if sequences is None else whole("sequences", sequences, 1)
    keep = whole("keep", keep, 1)
    usable = machine.accelerator.memory_bytes / (1 + constants.margin)
    timed = every_plan(
        model, machine, sequences=sequences, seq=seq, recipe=recipe, degrees=degrees, imbalance=imbalance,
        constants=constants, space=space, most_bytes=_MORE * usable, like=like,
    )  # fmt: skip
    plans, too_large = _fastest(model, timed, machine, usable, keep, constants, framework)
    if not plans:
        raise ValueError(_nothing(model, timed, machine, sequences, imbalance, bool(degrees), space, constants))
    buys = what_buys(model, plans[0], machine, constants)
    buys["memory"] = (too_large or plans[0]).time.total
    simpler = _simpler(model, timed, machine, usable, plans, constants, framework) if keep > 1 else None
    looked_at = sum(len(each.seconds) for each in timed)
    return Answer(model, machine, sequences, tuple(plans), looked_at, too_large, buys, constants, framework, simpler)


def every_plan(
    model: Architecture | str,
    machine: Machine,
    *,
    sequences: int,
    seq: int,
    recipe: str = "18-byte",
    degrees: Mapping[str, int] | None = None,
    imbalance: float = 1,
    constants: Constants = FITTED,
    space: Space = EVERYTHING,
    most_bytes: float = math.inf,
    like: Plan = PLAIN,
) -> list[Timed]:
    """All plans that `search` looks at, mesh by mesh, whether they fit or not; ``ValueError`` for none.

    Those that surely need more than `most_bytes` are not timed.
    """
    model = checked_model(model)
    fixed = {name: whole(name, size, 1) for name, size in (degrees or {}).items()}
    if set(fixed) - {*AXES, "ep"}:
        raise ValueError(f"degrees must be some of dp, tp, pp, cp and ep, not {', '.join(fixed)}")
    if amount("imbalance", imbalance) < 1:
        raise ValueError(f"imbalance must be 1 or more, not {imbalance}")
    possible = list(meshes(model, machine, sequences, like.changed(seq=seq, recipe=recipe), imbalance))
    if not possible:
        raise ValueError(f"sequences must be a multiple of a dp that gpus={machine.gpus} allows, not {sequences}")
    chosen = [mesh for mesh in possible if all(getattr(mesh, name) == size for name, size in fixed.items())]
    if not chosen:
        raise ValueError(_impossible(fixed, possible, machine.gpus, sequences))
    timed = [_timed(model, mesh, sequences, machine, constants, space, most_bytes) for mesh in chosen]
    found = [each for each in timed if len(each.seconds)]
    if not found:
        asked = " and ".join(f"{name}={_some(getattr(space, name))}" for name in space.narrowed)
        raise ValueError(f"{asked} do not go together with gpus={machine.gpus}, the degrees and the batch")
    return found


def _some(values: Sequence[object]) -> str:
    return " or ".join(map(str, values))


def _impossible(fixed: Mapping[str, int], of: Sequence[Plan], gpus: int, sequences: int) -> str:
    """What to say where no mesh has these degrees: which ones each axis may have, or that they do not go together."""
    for name, size in fixed.items():
        possible = sorted({getattr(mesh, name) for mesh in of})
        if name == "ep" and possible == [1]:
            raise ValueError(f"ep must be 1 for a model without experts, not {size}")
        if size not in possible:
            batch = f" and a batch of {sequences}" if name == "dp" and sequences % size else ""
            return f"{name} must be one of {', '.join(map(str, possible))} with gpus={gpus}{batch}, not {size}"
    said = " and ".join(f"{name}={size}" for name, size in fixed.items())
    return f"{said} do not go together with gpus={gpus}, the model's sizes and the batch"


_MORE = 1.1
"""So many times what is usable a plan may need to be told as the one that more memory would let in."""


def _timed(
    model: Architecture, mesh: Plan, sequences: int, machine: Machine, k: Constants, space: Space, most_bytes: float
) -> Timed:
    columns, least = choices(model, mesh, sequences, k, space)
    seconds, maybe = np.full(len(least), math.inf), least <= most_bytes
    if maybe.any():
        some = {name: column[maybe] for name, column in columns.items()}
        seconds[maybe] = np.sum([*step_terms(model, mesh, some, machine, k).values()], axis=0)
    return Timed(mesh, columns, seconds, least)


def _fastest(
    model: Architecture,
    timed: list[Timed],
    machine: Machine,
    usable: float,
    keep: int,
    k: Constants,
    framework: str = "megatron",
) -> tuple[list[Found], Found | None]:
    """The best plans that fit with their margin, and the fastest before them that a tenth more would let in.

    Plans that surely need a tenth more than `usable` bytes are not looked at.
    """
    rows = [np.flatnonzero(each.least_bytes <= _MORE * usable) for each in timed]
    which = np.repeat(np.arange(len(timed)), [len(each) for each in rows])
    inside = np.concatenate(rows)
    seconds = np.concatenate([each.seconds[some] for each, some in zip(timed, rows, strict=True)])
    found: list[Found] = []
    seen: set[int] = set()
    too_large = None
    for index in np.argsort(seconds, kind="stable"):
        mesh = int(which[index])
        if mesh in seen:
            continue
        plan = timed[mesh].plan(int(inside[index]))
        memory = plan_memory(model, plan, k)
        needed, room = memory.total * (1 + margin_of(plan, k)), machine.accelerator.memory_bytes
        if needed > room:
            if too_large is None and not found and needed <= _MORE * room:
                too_large = _found(model, plan, memory, machine, k, framework)
            continue
        seen.add(mesh)
        found.append(_found(model, plan, memory, machine, k, framework))
        if len(found) == keep:
            break
    return found, too_large


_TRIES = 50
"""So many plans are looked at for one that is simpler and fits."""


def _simpler(
    model: Architecture,
    timed: list[Timed],
    machine: Machine,
    usable: float,
    plans: Sequence[Found],
    k: Constants,
    framework: str,
) -> Found | None:
    """The simplest plan that fits within `TIE` of the fastest, if it is simpler than all of `plans` that tie."""
    best = plans[0]
    least = min(effort(each.plan, each.plan.schedule) for each in plans if best.ties(each))
    rows = [
        (*effort(each.mesh, str(each.choices["schedule"][row])), each.seconds[row], mesh, row)
        for mesh, each in enumerate(timed)
        for row in np.flatnonzero((each.seconds < (1 + TIE) * best.time.total) & (each.least_bytes <= usable))
    ]
    for *_, mesh, row in sorted(each for each in rows if each[:2] < least)[:_TRIES]:
        plan = timed[mesh].plan(int(row))
        memory = plan_memory(model, plan, k)
        if memory.total * (1 + margin_of(plan, k)) <= machine.accelerator.memory_bytes:
            return _found(model, plan, memory, machine, k, framework)
    return None


def _found(
    model: Architecture, plan: Plan, memory: PlanMemory, machine: Machine, k: Constants, framework: str
) -> Found:
    time, off = step_time(model, plan, machine, k), interval(plan, model, machine, framework)
    if off.low is not None and off.high is not None:  # it is told of the framework's own constants
        more = time.total / step_time(model, plan, machine, profile(framework)).total
        off = replace(off, low=off.low * more, high=off.high * more)
    return Found(plan, time, memory, fit(memory, machine, k, plan=plan, model=model), off)


def _nothing(
    model: Architecture,
    timed: list[Timed],
    machine: Machine,
    sequences: int,
    imbalance: float,
    fixed: bool,
    space: Space,
    k: Constants,
) -> str:
    """What to say where nothing fits: the plan that needs the least, and the nearest machine on which one fits.

    Where degrees are `fixed`, others may do on the same cards, and where `space` leaves something out, that.
    """
    plan, needed = _least(model, timed, k)
    needed *= 1 + margin_of(plan, k)
    has, name = format_bytes(machine.accelerator.memory_bytes, digits=3), machine.accelerator.name
    said = (
        f"no plan of {model.name} fits on gpus={machine.gpus} ({name}, {has} each): the least is "
        f"{format_bytes(needed, digits=3)} with a margin of {margin_of(plan, k):.0%} (dp {plan.dp}, tp {plan.tp}, "
        f"pp {plan.pp}, cp {plan.cp}, {_ep(plan)}ZeRO {plan.zero}, recompute {plan.recompute})"
    )
    fewest = least_cards(model, machine.accelerator, plan.least_recipe, k)
    usable = machine.accelerator.memory_bytes / (1 + k.margin)
    if fewest > MOST_CARDS:
        return f"{said}; the states alone take {fewest:,} such cards"
    like, asked = timed[0].mesh, [each.mesh for each in timed]
    others = f"without {' and '.join(space.narrowed)} held fixed others"
    tried = [(others, machine, EVERYTHING)] * bool(space.narrowed) + [("other degrees", machine, space)] * fixed
    for which, more, of in tried + [(str(more.gpus), more, space) for more in larger(machine, fewest)]:
        possible = asked if which == others else meshes(model, more, sequences, like, imbalance)
        maybe = (mesh for mesh in possible if choices(model, mesh, sequences, k, of)[1].min(initial=math.inf) <= usable)
        wider = [_timed(model, mesh, sequences, more, k, of, usable) for mesh in maybe]
        plans = _fastest(model, wider, more, usable, 1, k)[0] if wider else []
        if plans:
            p = plans[0].plan
            return said + f"; {which} do (dp {p.dp}, tp {p.tp}, pp {p.pp}, cp {p.cp}, {_ep(p)}ZeRO {p.zero})"
    return f"{said}; more such cards do not help"


def _ep(plan: Plan) -> str:
    return f"ep {plan.ep}, " if plan.ep > 1 else ""


def _least(model: Architecture, timed: list[Timed], k: Constants) -> tuple[Plan, float]:
    """The plan that needs the fewest bytes, and how many: bounds from below say which need not be counted."""
    rows = [(float(bound), mesh, row) for mesh, each in enumerate(timed) for row, bound in enumerate(each.least_bytes)]
    best, needed = timed[0].mesh, math.inf
    for bound, mesh, row in sorted(rows):
        if bound >= needed:
            break
        plan = timed[mesh].plan(row)
        total = plan_memory(model, plan, k).total
        if total < needed:
            best, needed = plan, total
    return best, needed
