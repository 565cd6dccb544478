"""The search: every plan of a model on a machine, timed mesh by mesh, and the best of those that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.footprint import AXES, expert_layers, piece_layers
from dtlib.theory.models import Architecture, checked_model, layers_of_rank, tp_degrees
from dtlib.theory.timing import CHOICES, FITTED, Constants, Machine, Plan, kept_bytes, step_terms, step_time
from dtlib.theory.units import format_bytes
from dtlib.theory.valid import amount, whole
from dtlib.theory.zero import states

from .answer import Answer, Found, what_buys
from .memory import PlanMemory, fit, least_cards, plan_memory

LEAST_TOKENS = 512
"""Fewer tokens of a sequence on a rank of a context group are not looked at: they fill no product."""

MOST_TOKENS = 2**23
"""More tokens of a micro-batch on a rank are not looked at, but for a single sequence: no card has room for them."""


@dataclass(frozen=True)
class Timed:
    """The plans of one mesh: a column of each choice, their seconds, and a bound from below of their bytes."""

    mesh: Plan
    choices: dict[str, NDArray[Any]]
    seconds: NDArray[np.float64]
    least_bytes: NDArray[np.float64]

    def plan(self, index: int) -> Plan:
        """The plan in row `index`."""
        return self.mesh.changed(**{name: column[index].item() for name, column in self.choices.items()})


MOST_CARDS = 10**6
"""Machines with more cards are not looked at where a model fits on none that was asked for."""


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
    constants: Constants = FITTED,
) -> Answer:
    """The fastest plans of `model` on all cards of `machine`, of `sequences` sequences of `seq` tokens a step.

    Every degree that the model divides by, every ZeRO stage, sequence parallelism (which gathers its inputs again or
    keeps them), micro-batch, schedule, number of equal chunks and recompute is timed; flash attention, no dropout.
    `degrees` holds some of dp, tp, pp, cp and ep fixed. Of experts the busiest rank gets `imbalance` times as many
    tokens as the mean, or, on fewer ranks, as many as there are.
    A plan is taken where its memory fits with the margin added: ``fit.has_room``. ``ValueError`` for
    arguments out of range and where nothing fits: it says what is missing, and the nearest plan that fits, with other
    degrees or on more cards.
    """
    model = checked_model(model)
    seq = model.seq if seq is None else whole("seq", seq, 1)
    number = default_sequences(machine.gpus, seq)
    sequences = number if sequences is None else whole("sequences", sequences, 1)
    keep = whole("keep", keep, 1)
    timed = every_plan(
        model, machine, sequences=sequences, seq=seq, recipe=recipe, degrees=degrees, imbalance=imbalance,
        constants=constants,
    )  # fmt: skip
    usable = machine.accelerator.memory_bytes / (1 + constants.margin)
    plans, too_large = _fastest(model, timed, machine, usable, keep, constants)
    if not plans:
        raise ValueError(_nothing(model, timed, machine, sequences, imbalance, bool(degrees), constants))
    buys = what_buys(model, plans[0], machine, constants)
    buys["memory"] = (too_large or plans[0]).time.total
    looked_at = sum(len(each.seconds) for each in timed)
    return Answer(model, machine, sequences, tuple(plans), looked_at, too_large, buys)


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
) -> list[Timed]:
    """All plans that `search` looks at, timed, mesh by mesh, whether they fit or not; ``ValueError`` for none."""
    model = checked_model(model)
    fixed = {name: whole(name, size, 1) for name, size in (degrees or {}).items()}
    if set(fixed) - {*AXES, "ep"}:
        raise ValueError(f"degrees must be some of dp, tp, pp, cp and ep, not {', '.join(fixed)}")
    if amount("imbalance", imbalance) < 1:
        raise ValueError(f"imbalance must be 1 or more, not {imbalance}")
    meshes = list(_meshes(model, machine, sequences, Plan(seq=seq, recipe=recipe), imbalance))
    if not meshes:
        raise ValueError(f"sequences must be a multiple of a dp that gpus={machine.gpus} allows, not {sequences}")
    chosen = [mesh for mesh in meshes if all(getattr(mesh, name) == size for name, size in fixed.items())]
    if not chosen:
        raise ValueError(_impossible(fixed, meshes, machine.gpus))
    return [_timed(model, mesh, sequences, machine, constants) for mesh in chosen]


def _impossible(fixed: Mapping[str, int], meshes: Sequence[Plan], gpus: int) -> str:
    """What to say where no mesh has these degrees: which ones each axis may have, or that they do not go together."""
    for name, size in fixed.items():
        possible = sorted({getattr(mesh, name) for mesh in meshes})
        if size not in possible:
            return f"{name} must be one of {', '.join(map(str, possible))} with gpus={gpus}, not {size}"
    said = " and ".join(f"{name}={size}" for name, size in fixed.items())
    return f"{said} do not go together with gpus={gpus}, the model's sizes and the batch"


def _meshes(model: Architecture, machine: Machine, sequences: int, like: Plan, imbalance: float = 1) -> Iterator[Plan]:
    """All (dp, tp, pp, cp, ep) of the cards that divide the model and the batch, and for the rest are `like` a plan."""
    seq, experts = like.seq_of(model), 1 if model.experts is None else model.experts.num_experts
    for tp in (each for each in tp_degrees(model) if machine.gpus % each == 0):
        rest = machine.gpus // tp
        for pp in (each for each in _divisors(rest) if each <= model.num_layers):
            for cp in _divisors(rest // pp):
                dp = rest // pp // cp
                if sequences % dp == 0 and (cp == 1 or (cp <= seq // LEAST_TOKENS and seq % (2 * cp) == 0)):
                    for ep in _divisors(math.gcd(dp, experts)):
                        yield like.changed(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, imbalance=min(imbalance, ep))


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, from 1 up."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def _timed(model: Architecture, mesh: Plan, sequences: int, machine: Machine, k: Constants) -> Timed:
    choices, least = _choices(model, mesh, sequences, k)
    terms = step_terms(model, mesh, choices, machine, k)
    return Timed(mesh, choices, np.sum([*terms.values()], axis=0), least)


@lru_cache(maxsize=2048)
def _choices(
    model: Architecture, mesh: Plan, sequences: int, k: Constants
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """The plans of a mesh, a column each choice, and a bound from below of their bytes: the same on every card.

    See `_least_bytes`.
    """
    per_rank, pp, seq = sequences // mesh.dp, mesh.pp, mesh.tokens_of(model)
    batches = [b for b in _divisors(per_rank) if b == 1 or b * seq <= MOST_TOKENS]
    pieces = [(b, v, name) for b in batches for v, name in _schedules(model.num_layers, pp, per_rank // b)]
    tokens = [(False, False)] + [(True, False), (True, True)] * (mesh.tp > 1 and seq % mesh.tp == 0)
    stages = (0, 1, 2, 3) if mesh.size("dp", "cp") > 1 else (0,)
    rows = [(*piece, *how, *rest) for piece, how, *rest in product(pieces, tokens, stages, ("none", "full"))]
    b, v, name, split, keeps, zero, recompute = (np.array(column) for column in zip(*rows, strict=True))
    choices = dict(zip(CHOICES, (zero, split, keeps, b, per_rank // b, v, name, recompute), strict=True))
    return choices, _least_bytes(model, mesh, SimpleNamespace(**choices), k)


def _least_bytes(model: Architecture, mesh: Plan, c: Any, k: Constants) -> NDArray[np.float64]:
    """A bound from below of the bytes of `plan_memory`: states of the first stages and of the last, the layers that
    are surely in flight, the one computed again, and on the last stage the logits.

    Chunks of layers leave each stage as many layers as it has of one piece, but where only some have experts, perhaps
    others: then the bound is that of the cheapest mixture.
    """
    p, b = mesh.pp, c.micro_batch.astype(float)
    scores = k.logit_factor * 8 * b * mesh.tokens_of(model) * (model.vocab // mesh.tp)
    least, sparse = np.zeros(len(b)), model.num_expert_layers
    for in_order in (True, False) if 0 < sparse < model.num_layers else (True,):
        found = np.zeros(len(b))
        for stage in {0, p - 1} if not sparse else {0, min(1, p - 1), p - 1}:
            layers = sum(piece_layers(model.num_layers, p)[stage])
            mixtures = {sum(expert_layers(model, p, stage))}
            if not in_order:
                mixtures = {max(0, layers - model.num_layers + sparse), min(layers, sparse)}
            bounds = [_of_mixture(model, mesh, c, k, stage, layers - each, each) for each in mixtures]
            found = np.maximum(found, np.min(bounds, axis=0) + (scores if stage == p - 1 else 0))
        least = found if in_order else np.where(c.chunks > 1, found, least)
    return least + k.runtime_bytes


def _of_mixture(
    model: Architecture, mesh: Plan, c: Any, k: Constants, stage: int, dense: int, sparse: int
) -> NDArray[np.float64]:
    """Bytes of the states of a stage of so many layers, and of the activations that it surely has in flight."""
    last, group, b = stage == mesh.pp - 1, mesh.size("dp", "cp"), c.micro_batch.astype(float)
    held = layers_of_rank(model, mesh.tp, mesh.ep, sparse, dense, first=stage == 0, last=last)
    per_param = np.array([[_state_bytes(ranks, zero, mesh.recipe) for zero in range(4)]
                          for ranks in (group, mesh.expert_copies)])  # fmt: skip
    sizes = (held.total - held.experts) * per_param[0] + held.experts * per_param[1]
    counts = {kind: count for kind, count in ((False, dense), (True, sparse)) if count}

    def of_layers(split: bool, word: str) -> dict[bool, float]:
        return {
            kind: kept_bytes(model, mesh.tokens_of(model), mesh.tp, split, "flash", False, word, with_experts=kind,
                             imbalance=mesh.imbalance)
            for kind in counts
        }  # fmt: skip

    known = [(of_layers(split, "none"), of_layers(split, "full")) for split in (False, True)]
    kept = np.array([[sum(n * each[kind] for kind, n in counts.items()) for each in both] for both in known])
    again = np.array([max(none.values()) - max(full.values()) for none, full in known])
    split, full = c.sequence_parallel.astype(int), (c.recompute == "full").astype(int)
    activations = b * kept[split, full] * np.minimum(mesh.pp - stage, c.micro_batches) + b * again[split] * full
    return np.asarray(sizes[c.zero] + k.activation_factor * activations)


@lru_cache(maxsize=4096)
def _state_bytes(ranks: int, zero: int, recipe: Any) -> float:
    """Bytes of the states of one parameter."""
    return float(states(1, ranks, zero, recipe).total)


def _schedules(num_layers: int, pp: int, micro_batches: int) -> list[tuple[int, str]]:
    """Chunks and schedule: chunks of equal size, the ends of which may be without a layer."""
    if pp == 1:
        return [(1, "1F1B")]
    found = [(1, "1F1B")] + [(1, "ZB-H1")] * (micro_batches >= pp)
    if micro_batches % pp == 0:
        most = (num_layers + 2) // pp
        found += [
            (v, "interleaved") for v in range(2, most + 1) if 0 in (num_layers % (pp * v), (num_layers + 2) % (pp * v))
        ]
    return found


def _fastest(
    model: Architecture, timed: list[Timed], machine: Machine, usable: float, keep: int, k: Constants
) -> tuple[list[Found], Found | None]:
    """The best plans that fit `usable` bytes, and the fastest before them that a tenth more would let in."""
    which = np.repeat(np.arange(len(timed)), [len(each.seconds) for each in timed])
    inside = np.concatenate([np.arange(len(each.seconds)) for each in timed])
    seconds = np.concatenate([each.seconds for each in timed])
    least = np.concatenate([each.least_bytes for each in timed])
    found: list[Found] = []
    seen: set[int] = set()
    too_large = None
    order = np.argsort(seconds, kind="stable")
    for index in order[least[order] <= 1.1 * usable]:
        mesh = int(which[index])
        if mesh in seen:
            continue
        plan = timed[mesh].plan(int(inside[index]))
        memory = plan_memory(model, plan, k)
        if memory.total > usable:
            if too_large is None and not found and memory.total <= 1.1 * usable:
                too_large = _found(model, plan, memory, machine, k)
            continue
        seen.add(mesh)
        found.append(_found(model, plan, memory, machine, k))
        if len(found) == keep:
            break
    return found, too_large


def _found(model: Architecture, plan: Plan, memory: PlanMemory, machine: Machine, k: Constants) -> Found:
    return Found(plan, step_time(model, plan, machine, k), memory, fit(memory, machine, k, plan=plan, model=model))


def _nothing(
    model: Architecture,
    timed: list[Timed],
    machine: Machine,
    sequences: int,
    imbalance: float,
    fixed: bool,
    k: Constants,
) -> str:
    """What to say where nothing fits: the plan that needs the least, and the nearest machine on which one fits.

    Where degrees are `fixed`, others may do on the same cards.
    """
    plan, needed = _least(model, timed, k)
    needed *= 1 + k.margin
    has, name = format_bytes(machine.accelerator.memory_bytes, digits=3), machine.accelerator.name
    said = (
        f"no plan of {model.name} fits on gpus={machine.gpus} ({name}, {has} each): the least is "
        f"{format_bytes(needed, digits=3)} with a margin of {k.margin:.0%} (dp {plan.dp}, tp {plan.tp}, pp {plan.pp}, "
        f"cp {plan.cp}, {_ep(plan)}ZeRO {plan.zero}, recompute {plan.recompute})"
    )
    fewest, usable = (
        least_cards(model, machine.accelerator, plan.recipe, k),
        machine.accelerator.memory_bytes / (1 + k.margin),
    )
    if fewest > MOST_CARDS:
        return f"{said}; the states alone take {fewest:,} such cards"
    for more in ([machine] if fixed else []) + _larger(machine, fewest):
        meshes = _meshes(model, more, sequences, Plan(seq=plan.seq, recipe=plan.recipe), imbalance)
        maybe = (mesh for mesh in meshes if _choices(model, mesh, sequences, k)[1].min() <= usable)
        wider = [_timed(model, mesh, sequences, more, k) for mesh in maybe]
        plans = _fastest(model, wider, more, usable, 1, k)[0] if wider else []
        if plans:
            p = plans[0].plan
            which = "other degrees" if more is machine else f"{more.gpus}"
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


def _larger(machine: Machine, least: int) -> list[Machine]:
    """Machines with more cards, at least `least` of them, each about a tenth larger than the one before."""
    node, gpus, found = max(machine.node, 8) if machine.gpus <= machine.node else machine.node, machine.gpus, []
    while gpus < min(100 * max(machine.gpus, least), MOST_CARDS):
        gpus = max(gpus + 1, least, round(1.1 * gpus))
        gpus = gpus if gpus <= node else -(-gpus // node) * node
        found.append(replace(machine, gpus=gpus, node=node))
    return found
