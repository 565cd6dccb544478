"""What a search looks at: meshes of the cards, on each of them every choice, and a bound from below of its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.footprint import expert_layers, piece_layers
from dtlib.theory.models import Architecture, layers_of_rank, tp_degrees
from dtlib.theory.timing import CHOICES, SCHEDULES, Constants, Machine, Plan, kept_bytes
from dtlib.theory.zero import states

LEAST_TOKENS = 512
"""Fewer tokens of a sequence on a rank of a context group are not looked at: they fill no product."""

MOST_TOKENS = 2**23
"""More tokens of a micro-batch on a rank are not looked at, but for a single sequence: no card has room for them."""

SPLITS = {"none": (False, False), "again": (True, False), "keep": (True, True)}
"""Words for sequence parallelism: whether it splits tokens, and whether it keeps what it gathered."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is looked at on a mesh: everything, or of each choice a part.

    `sequence_parallel` has the words of `sp.phases`: ``"none"``, ``"again"`` for inputs that are gathered again, and
    ``"keep"``. What makes no difference stays: a rank alone has no stage of ZeRO, one stage no schedule, one rank of tp
    no tokens to split. A selective recompute is not among the choices, since flash attention leaves it nothing to save.
    ``ValueError`` for what is not among the choices, and for none of them.
    """

    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedule: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = ("none", "full")
    sequence_parallel: tuple[str, ...] = tuple(SPLITS)

    def __post_init__(self) -> None:
        for each in fields(self):
            chosen, known = getattr(self, each.name), _known(each)
            wrong = [value for value in chosen if value not in known]
            if wrong or not chosen:
                found = wrong[0] if wrong else "none of them"
                raise ValueError(f"{each.name} must be some of {', '.join(map(str, known))}, not {found}")

    @property
    def narrowed(self) -> tuple[str, ...]:
        """The choices that are not open."""
        return tuple(each.name for each in fields(self) if set(getattr(self, each.name)) != set(_known(each)))


def _known(each: Field[Any]) -> tuple[Any, ...]:
    return tuple(each.default)  # type: ignore[arg-type]


EVERYTHING = Space()


def meshes(model: Architecture, machine: Machine, sequences: int, like: Plan, imbalance: float = 1) -> Iterator[Plan]:
    """All (dp, tp, pp, cp, ep) of the cards that divide the model and the batch, and for the rest are `like` a plan."""
    seq, experts = like.seq_of(model), 1 if model.experts is None else model.experts.num_experts
    for tp in (each for each in tp_degrees(model) if machine.gpus % each == 0):
        rest = machine.gpus // tp
        for pp in (each for each in divisors(rest) if each <= model.num_layers):
            for cp in divisors(rest // pp):
                dp = rest // pp // cp
                if sequences % dp == 0 and (cp == 1 or (cp <= seq // LEAST_TOKENS and seq % (2 * cp) == 0)):
                    for ep in divisors(math.gcd(dp, experts)):
                        yield like.changed(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, imbalance=min(imbalance, ep))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, from 1 up."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


@lru_cache(maxsize=2048)
def choices(
    model: Architecture, mesh: Plan, sequences: int, k: Constants, space: Space = EVERYTHING
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """The plans of a mesh, a column each choice, and a bound from below of their bytes: the same on every card.

    See `_least_bytes`. No rows where `space` leaves none.
    """
    per_rank, pp, seq = sequences // mesh.dp, mesh.pp, mesh.tokens_of(model)
    batches = [b for b in divisors(per_rank) if b == 1 or b * seq <= MOST_TOKENS]
    outer = [
        (b, per_rank // b, v, name)
        for b in batches
        for v, name in _schedules(model.num_layers, pp, per_rank // b, space.schedule)
    ]
    splits = [SPLITS[word] for word in (space.sequence_parallel if mesh.tp > 1 else ("none",))]
    splits = [each for each in splits if not each[0] or seq % mesh.tp == 0]
    stages = space.zero if mesh.size("dp", "cp") > 1 else (min(space.zero),)
    inner = [(zero, *split, again) for split, zero, again in product(splits, stages, space.recompute)]
    if not outer or not inner:
        return {name: np.array([]) for name in CHOICES}, np.array([])
    b, m, v, name = (np.repeat(np.array(column), len(inner)) for column in zip(*outer, strict=True))
    zero, split, keeps, again = (np.tile(np.array(column), len(outer)) for column in zip(*inner, strict=True))
    found = dict(zip(CHOICES, (zero, split, keeps, b, m, v, name, again), strict=True))
    return found, _least_bytes(model, mesh, SimpleNamespace(**found), k)


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


def _schedules(num_layers: int, pp: int, micro_batches: int, allowed: tuple[str, ...]) -> list[tuple[int, str]]:
    """Chunks and schedule: chunks of equal size, the ends of which may be without a layer."""
    if pp == 1:
        return [(1, "1F1B")]
    found = [(1, "1F1B")] + [(1, "ZB-H1")] * (micro_batches >= pp)
    if micro_batches % pp == 0:
        most = (num_layers + 2) // pp
        found += [
            (v, "interleaved") for v in range(2, most + 1) if 0 in (num_layers % (pp * v), (num_layers + 2) % (pp * v))
        ]
    return [each for each in found if each[1] in allowed]
