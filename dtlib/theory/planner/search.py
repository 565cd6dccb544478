"""The search: every plan of a model on a machine, timed mesh by mesh, and the best of those that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from heapq import heappop, heappush

import numpy as np

from dtlib.theory.footprint import AXES, DEGREES
from dtlib.theory.models import Architecture, checked_model
from dtlib.theory.timing import FITTED, Constants, Machine, Plan, profile, step_terms, step_time
from dtlib.theory.timing.space import EVERYTHING, PLAIN, Space, choices, is_size, meshes
from dtlib.theory.valid import at_least, whole

from .answer import TIE, Answer, Found, effort, what_buys
from .errors import interval
from .memory import PlanMemory, fit, margin_of, plan_memory
from .partial import Timed, fewest, partly_again
from .refusal import impossible, nothing_fits

_MOST = {"gpus": 10**7, "seq": 10**9, "sequences": 10**9}
"""The most that is looked at: all that divides them is."""


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
    keeps them), micro-batch, schedule, number of equal chunks and recompute (of some layers: as few as fit) is timed;
    flash attention, no dropout. `degrees` holds some of dp, tp, pp, cp and ep fixed; of the other choices `space` says
    what is looked at. Of experts the busiest rank gets `imbalance` times as many tokens as the mean, or, on fewer
    ranks, as many as there are. A plan is taken where its memory fits with the margin added: ``fit.has_room``.
    Constants are those of `framework` where no others are given; what its runs were off by is the interval of a time.
    What none of these names is that of `like`, in all plans. ``ValueError`` for arguments out of range and where
    nothing fits: it says what is missing, and the nearest plan that fits, with other degrees, without what `space`
    holds fixed, or on more cards.
    """
    model, constants = checked_model(model), profile(framework) if constants is None else constants
    seq = model.seq if seq is None else whole("seq", seq, 1)
    number = default_sequences(machine.gpus, seq)
    sequences = number if sequences is None else whole("sequences", sequences, 1)
    for name, size in (("gpus", machine.gpus), ("seq", seq), ("sequences", sequences)):
        if size > _MOST[name]:
            raise ValueError(f"{name} must be at most {_MOST[name]:,}, not {size}")
    if model.experts is None and at_least("imbalance", imbalance, 1) > 1:
        raise ValueError(f"imbalance must be 1 for a model without experts, not {imbalance}")
    keep = whole("keep", keep, 1)
    usable = machine.accelerator.memory_bytes / (1 + constants.margin)
    timed = every_plan(
        model, machine, sequences=sequences, seq=seq, recipe=recipe, degrees=degrees, imbalance=imbalance,
        constants=constants, space=space, most_bytes=_MORE * usable, like=like,
    )  # fmt: skip
    asked_for = timed
    if "some" in space.recompute:
        if "full" not in space.recompute:
            timed = [each.only(np.logical_not(each.whole)) for each in timed]
        plans, _ = _fastest(model, timed, machine, usable, keep, constants, framework)
        # what computes all again needs the least: where that fits on fewer meshes than asked for, no others have a plan
        last = plans[-1].time.total if len(plans) == keep else 0.0 if "full" in space.recompute else math.inf
        taken = {_degrees(each.plan): each.time.total for each in plans}
        limits = (taken.get(_degrees(each.mesh), last) for each in asked_for)
        some = (partly_again(model, each, machine, constants, usable, limit)
                for each, limit in zip(asked_for, limits, strict=True))  # fmt: skip
        timed = [*timed, *(each for each in some if each is not None)]
    plans, too_large = _fastest(model, timed, machine, usable, keep, constants, framework)
    if not plans:
        found = partial(_first, model, sequences=sequences, k=constants)
        asked = imbalance, bool(degrees), space, constants, found
        raise ValueError(nothing_fits(model, asked_for, machine, sequences, *asked))
    buys = what_buys(model, plans[0], machine, constants)
    buys["memory"] = (too_large or plans[0]).time.total
    simpler = _simpler(model, timed, machine, usable, plans, constants, framework) if keep > 1 else None
    looked_at = sum(len(each.seconds) for each in timed)
    return Answer(
        model, machine, sequences, tuple(plans), looked_at, too_large, buys, constants, framework, simpler, space
    )


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

    Those that surely need more than `most_bytes` are not timed. Of those that compute ``"some"`` layers again, which
    depend on the card, there are those that compute all.
    """
    model = checked_model(model)
    fixed = {name: whole(name, size, 1) for name, size in (degrees or {}).items()}
    if not set(fixed) <= set(DEGREES):
        raise ValueError(f"degrees must be some of {', '.join(DEGREES)}, not {', '.join(fixed)}")
    at_least("imbalance", imbalance, 1)
    for layers in filter(is_size, space.recompute):
        if layers >= model.num_layers:
            raise ValueError(
                f"recompute must be below the {model.num_layers} layers, all of which are full, not {layers}"
            )
    for name in space.without:
        usual, asked = getattr(PLAIN, name), fixed.get(name, getattr(like, name))
        if asked != usual:
            rule = f"be {usual}" if name in AXES else "be absent"
            why = ": Ulysses is not planned, and a ring it has not" if name == "cp" else ", which has none of it"
            raise ValueError(f"{name} must {rule} with framework={space.framework}{why}")
    possible = list(meshes(model, machine, sequences, like.changed(seq=seq, recipe=recipe), imbalance, space))
    if not possible:
        raise ValueError(f"sequences must be a multiple of a dp that gpus={machine.gpus} allows, not {sequences}")
    chosen = [mesh for mesh in possible if all(getattr(mesh, name) == size for name, size in fixed.items())]
    if not chosen:
        raise ValueError(impossible(model, fixed, possible, machine.gpus, sequences))
    timed = [_timed(model, mesh, sequences, machine, constants, space, most_bytes) for mesh in chosen]
    found = [each for each in timed if len(each.seconds)]
    if not found:
        words = {name: getattr(space, name) for name in space.narrowed} | {"framework": (space.framework,)}
        asked = " and ".join(f"{name}={' or '.join(map(str, words[name]))}" for name in space.narrowed)
        far = "node" in space.shard and "shard" in space.narrowed and not any(map(machine.near, chosen))
        why = ": no ranks that share states are on several nodes, with several on each" * far
        do = "does" if len(space.narrowed) == 1 else "do"
        raise ValueError(f"{asked} {do} not go together with gpus={machine.gpus}, the degrees and the batch{why}")
    return found


def _degrees(plan: Plan) -> tuple[int, ...]:
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.ep


_MORE = 1.1
"""So many times what is usable a plan may need to be told as the one that more memory would let in."""


def _timed(
    model: Architecture, mesh: Plan, sequences: int, machine: Machine, k: Constants, space: Space, most_bytes: float
) -> Timed:
    columns, least = choices(model, mesh, sequences, k, space, machine.near(mesh))
    seconds, maybe = np.full(len(least), math.inf), least <= most_bytes
    terms = None
    if maybe.any():
        some = {name: column[maybe] for name, column in columns.items()}
        terms = step_terms(model, mesh, some, machine, k)
        seconds[maybe] = np.sum([*terms.values()], axis=0)
    return Timed(mesh, columns, seconds, least, terms=terms)


def _fastest(
    model: Architecture, timed: list[Timed], machine: Machine, usable: float, keep: int, k: Constants,
    framework: str = "megatron",
) -> tuple[list[Found], Found | None]:  # fmt: skip
    """The best plans that fit with their margin, and the fastest before them that a tenth more would let in.

    Plans that surely need a tenth more than `usable` bytes are not looked at. One of `at_least` so many layers that
    needs too much comes back with as many as fit, at its time.
    """
    rows = [np.flatnonzero(each.least_bytes <= _MORE * usable) for each in timed]
    which = np.repeat(np.arange(len(timed)), [len(each) for each in rows])
    inside = np.concatenate(rows)
    seconds = np.concatenate([each.seconds[some] for each, some in zip(timed, rows, strict=True)])
    found: list[Found] = []
    seen: set[int] = set()
    later: list[tuple[float, int, Timed, Plan]] = []
    too_large, room = None, machine.accelerator.memory_bytes
    order, turn = np.argsort(seconds, kind="stable").tolist(), 0
    while turn < len(order) or later:
        grown = bool(later) and (turn == len(order) or later[0][0] < seconds[order[turn]])
        if grown:
            *_, of, plan = heappop(later)
        else:
            of, row = timed[which[order[turn]]], int(inside[order[turn]])
            turn += 1
        if id(of.mesh) in seen:
            continue
        plan = plan if grown else of.plan(row)
        memory = _memory(model, plan, k)
        needed = memory.total * (1 + margin_of(plan, k))
        if needed > room:
            if of.at_least:
                more = fewest(model, plan, room, k)
                if more is not None:
                    heappush(later, (step_time(model, more, machine, k).total, turn, of, more))
            elif too_large is None and not found and needed <= _MORE * room:
                too_large = _found(model, plan, memory, machine, k, framework)
            continue
        seen.add(id(of.mesh))
        found.append(_found(model, plan, memory, machine, k, framework))
        if len(found) == keep:
            break
    return found, too_large


def _first(
    model: Architecture, of: Iterable[Plan], machine: Machine, space: Space, *, sequences: int, k: Constants
) -> Plan | None:
    """The fastest plan on the meshes `of` that fits, or None."""
    usable = machine.accelerator.memory_bytes / (1 + k.margin)
    maybe = (
        mesh for mesh in of
        if choices(model, mesh, sequences, k, space, machine.near(mesh))[1].min(initial=math.inf) <= usable
    )  # fmt: skip
    timed = [_timed(model, mesh, sequences, machine, k, space, usable) for mesh in maybe]
    plans = _fastest(model, timed, machine, usable, 1, k)[0] if timed else []
    return plans[0].plan if plans else None


_memory = lru_cache(maxsize=4096)(plan_memory)

_TRIES = 50
"""So many plans are looked at for one that is simpler and fits."""


def _simpler(
    model: Architecture, timed: list[Timed], machine: Machine, usable: float, plans: Sequence[Found], k: Constants,
    framework: str,
) -> Found | None:  # fmt: skip
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
        memory = _memory(model, plan, k)
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
