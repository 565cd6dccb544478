"""What a search looks at: meshes of the cards, on each of them every choice, and a bound from below of its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dtlib.theory.footprint import expert_layers, piece_layers
from dtlib.theory.models import Adapters, Architecture, layers_of_rank, tp_degrees
from dtlib.theory.zero import states

from .constants import Constants
from .layer import kept_bytes
from .plan import SCHEDULES, Machine, Plan
from .step import CHOICES

LEAST_TOKENS = 512
"""Fewer tokens of a sequence on a rank of a context group are not looked at: they fill no product."""

MOST_TOKENS = 2**23
"""More tokens of a micro-batch on a rank are not looked at, but for a single sequence: no card has room for them."""

MOST_CARDS = 10**6
"""Machines with more cards are not looked at where a model fits on none that was asked for."""

SPLITS = {"none": (False, False), "again": (True, False), "keep": (True, True)}
"""Words for sequence parallelism: whether it splits tokens, and whether it keeps what it gathered."""


OPEN = ("zero", "shard", "schedule", "recompute", "sequence_parallel")
"""The choices that a search has on a mesh."""

SIZED = ("shard", "recompute")
"""The choices of which a number may be asked for."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is looked at on a mesh: everything, or of each choice a part.

    `sequence_parallel` has the words of `sp.phases`: ``"none"``, ``"again"`` for inputs that are gathered again, and
    ``"keep"``. `shard` says what ZeRO splits states among: ``"all"`` ranks, at stages 2 and 3 those of one ``"node"``
    alone (hybrid sharding), or a number of ranks, from stage 1 on. `recompute` may be of ``"some"`` layers, as few of
    each piece as fit, or of a number of them where a piece has more: all are ``"full"``. What makes no difference
    stays: a rank alone has no stage of ZeRO, one stage no schedule, one rank of tp no tokens to split. A selective
    recompute is looked at where attention is kept as a matrix: flash attention leaves it nothing to save.
    ``ValueError`` for what is not among the choices, and for none of them.

    What a `framework` runs (`FRAMEWORKS`) is such a part. With a pipeline it may have no stage of ZeRO above
    `staged_zero`, hybrid shards from `hybrid_zero` on alone, and it has none of what `without` names: axes and habits
    of a `Plan`.
    """

    zero: tuple[int, ...] = (0, 1, 2, 3)
    shard: tuple[str | int, ...] = ("all", "node")
    schedule: tuple[str, ...] = SCHEDULES
    recompute: tuple[str | int, ...] = ("none", "selective", "some", "full")
    sequence_parallel: tuple[str, ...] = tuple(SPLITS)
    framework: str = ""
    staged_zero: int = 3
    hybrid_zero: int = 1
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in OPEN:
            chosen, known = getattr(self, name), getattr(Space, name)
            wrong = [value for value in chosen if value not in known and not (name in SIZED and is_size(value))]
            if wrong or not chosen:
                found = wrong[0] if wrong else "none of them"
                raise ValueError(f"{name} must be some of {', '.join(map(str, known))}, not {found}")

    @property
    def narrowed(self) -> tuple[str, ...]:
        """The choices that are not open, the framework before those that are left by it."""
        of = FRAMEWORKS.get(self.framework, EVERYTHING)
        closed = (name for name in OPEN if set(getattr(self, name)) != set(getattr(of, name)))
        return ("framework",) * bool(self.framework) + tuple(closed)


def is_size(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number above 0."""
    return type(value) is int and value > 0


EVERYTHING = Space()
PLAIN = Plan()

FRAMEWORKS: Mapping[str, Space] = MappingProxyType(
    {
        # Megatron-LM: its documentation lists TP, EP and CP with FSDP, not PP; sequence parallelism gathers again
        "megatron": Space(
            framework="megatron", schedule=("1F1B", "interleaved"), sequence_parallel=("none", "again"), staged_zero=1
        ),
        # all layers are computed again, or none, or the core of attention; ZeRO 1 at most
        "nanotron": Space(
            framework="nanotron", zero=(0, 1), shard=("all",), schedule=("1F1B",),
            recompute=("none", "selective", "full"), without=("offload", "adapters"),
        ),
        # PyTorch's FSDP 2 with its pipelines and tensor parallelism, as in torchtitan; 0 is its DDP (replicate)
        "fsdp": Space(framework="fsdp", zero=(0, 2, 3)),
        # its engine of pipelines refuses ZeRO 2 and 3; MiCS shards at stage 3; Ulysses, its cp, is not planned
        "deepspeed": Space(
            framework="deepspeed", schedule=("1F1B",), sequence_parallel=("none", "again"), staged_zero=1,
            hybrid_zero=3, without=("cp",),
        ),
    }
)  # fmt: skip
"""What is looked at of each framework of `profiles`: all but what its documentation says that it does not run."""


def meshes(
    model: Architecture, machine: Machine, sequences: int, like: Plan, imbalance: float = 1, space: Space = EVERYTHING
) -> Iterator[Plan]:
    """All (dp, tp, pp, cp, ep) of the cards that divide the model and the batch, and for the rest are `like` a plan."""
    seq, experts = like.seq_of(model), 1 if model.experts is None else model.experts.num_experts
    for tp in (each for each in tp_degrees(model) if machine.gpus % each == 0):
        rest = machine.gpus // tp
        for pp in (each for each in divisors(rest) if each <= model.num_layers):
            for cp in divisors(rest // pp) if "cp" not in space.without else (1,):
                dp = rest // pp // cp
                if sequences % dp == 0 and (cp == 1 or (cp <= seq // LEAST_TOKENS and seq % (2 * cp) == 0)):
                    for ep in divisors(math.gcd(dp, experts)):
                        yield like.changed(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, imbalance=min(imbalance, ep))


def larger(machine: Machine, least: int) -> list[Machine]:
    """Machines with more cards, at least `least` of them, each about a tenth larger than the one before."""
    node, gpus, found = max(machine.node, 8) if machine.gpus <= machine.node else machine.node, machine.gpus, []
    while gpus < min(100 * max(machine.gpus, least), MOST_CARDS):
        gpus = max(gpus + 1, least, round(1.1 * gpus))
        gpus = gpus if gpus <= node else -(-gpus // node) * node
        found.append(replace(machine, gpus=gpus, node=node))
    return found


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, from 1 up."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


@lru_cache(maxsize=2048)
def choices(
    model: Architecture, mesh: Plan, sequences: int, k: Constants, space: Space = EVERYTHING, near: int = 0
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """The plans of a mesh, a column each choice, and a bound from below of their bytes: the same on every card.

    `near` is `Machine.near` of the mesh; the bound is that of `least_bytes`. No rows where `space` leaves none.
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
    stages = _stages(mesh, space, near)
    gone = {"some", "selective"} if mesh.attention == "flash" else {"some"}
    words = [("full", each) if is_size(each) else (each, 0) for each in space.recompute if each not in gone]
    words += [("full", 0)] if "some" in space.recompute and "full" not in space.recompute else []
    inner = [(stage, *split, *again) for split, stage, again in product(splits, range(len(stages)), words)]
    if not outer or not inner:
        return {name: np.array([]) for name in CHOICES}, np.array([])
    b, m, v, name = (np.repeat(np.array(column), len(inner)) for column in zip(*outer, strict=True))
    stage, split, keeps, again, layers = (np.tile(np.array(column), len(outer)) for column in zip(*inner, strict=True))
    zero, shard = np.array(stages).T
    found = dict(zip(CHOICES, (zero[stage], shard[stage], split, keeps, b, m, v, name, again, layers), strict=True))
    has = layers < -(-model.num_layers // (pp * v))  # of a piece: so many are a full recompute
    found = {each: column[has] for each, column in found.items()}
    return found, least_bytes(model, mesh, found, k, (stages, stage[has]))


def _stages(mesh: Plan, space: Space, near: int) -> list[tuple[int, int]]:
    """Stages of ZeRO, each with the ranks that share states; 0 for all of them."""
    ranks, stages = mesh.size("dp", "cp"), [each for each in space.zero if mesh.pp == 1 or each <= space.staged_zero]
    if ranks == 1:
        return [(min(stages), 0)] if stages and {"all", 1} & set(space.shard) else []
    found = [(zero, 0) for zero in stages if "all" in space.shard or (ranks in space.shard and zero > 0)]
    least = space.hybrid_zero
    sizes = {(each, least) for each in space.shard if is_size(each) and 1 < each < ranks and ranks % each == 0}
    sizes |= {(near, max(2, least))} if near and "node" in space.shard else set()
    fitting = [(size, least) for size, least in sorted(sizes) if size % mesh.least_shard == 0]
    return found + sorted({(zero, size) for size, least in fitting for zero in stages if zero >= least})


def least_bytes(
    model: Architecture, mesh: Plan, of: dict[str, NDArray[Any]], k: Constants, zero_of: Any = None
) -> NDArray[np.float64]:
    """A bound from below of the bytes of `plan_memory`: states of the first stages and of the last, the layers that
    are surely in flight, the one computed again, and on the last stage the logits.

    Chunks of layers leave each stage as many layers as it has of one piece, but where only some have experts, perhaps
    others: then the bound is that of the cheapest mixture.
    """
    c, p, cases = SimpleNamespace(**of), mesh.pp, _cases(model, mesh.tp, mesh.pp, mesh.ep)
    b = c.micro_batch.astype(float)
    dense, sparse, others, experts, stage = (np.array(column) for column in list(zip(*cases, strict=True))[1:])
    if zero_of is None:
        pairs, which = np.unique(np.stack([c.zero, c.shard]), axis=1, return_inverse=True)
        zero_of = pairs.T.tolist(), which.ravel()
    stages, which = zero_of
    per_param = [[_state_bytes((size or mesh.size("dp", "cp")) // ep, zero, mesh.least_recipe) for zero, size in stages]
                 for ep in (1, mesh.ep)]  # fmt: skip
    states_of = np.outer(others, per_param[0]) + np.outer(experts, per_param[1])
    of_kinds = _kept(model, mesh.tokens_of(model), mesh.tp, mesh.imbalance, mesh.adapters, mesh.attention)
    kept = np.tensordot(np.stack([dense, sparse], axis=1), of_kinds, 1)
    there = of_kinds * np.stack([dense > 0, sparse > 0], axis=1)[:, :, None, None]
    again = there[..., :1].max(axis=1) - there.max(axis=1)
    split, word = c.sequence_parallel.astype(int), (c.recompute == "full").astype(int)
    if mesh.attention != "flash":
        word = np.where(c.recompute == "selective", 2, word)
    in_flight = np.minimum(p - stage[:, None], c.micro_batches)
    layers, once = kept[:, split, word], again[:, split, word]
    if (partly := c.recompute_layers > 0).any():  # those that save the most, and none is computed again at the peak
        saved = (there[..., 0] - there[..., 1]).max(axis=1)[:, split] * np.minimum(
            c.recompute_layers * c.chunks, (dense + sparse)[:, None]
        )
        layers = np.where(partly, np.maximum(layers, kept[:, split, 0] - saved), layers)
        once = once * ~partly
    bounds = states_of[:, which] + k.activation_factor * b * (layers * in_flight + once)
    scores = k.logit_factor * 8 * b * mesh.tokens_of(model) * (model.vocab // mesh.tp)
    bounds = bounds + scores * (stage == p - 1)[:, None]
    least = np.zeros(len(b))
    for in_order in (True, False):
        found = np.zeros(len(b))
        for here in set(stage.tolist()):
            those = [place for place, case in enumerate(cases) if case[0] is in_order and case[-1] == here]
            if those:
                found = np.maximum(found, bounds[those].min(axis=0))
        least = found if in_order else np.where((c.chunks > 1) & (found > 0), found, least)
    return np.asarray(least + k.runtime_bytes)


@lru_cache(maxsize=4096)
def _cases(model: Architecture, tp: int, pp: int, ep: int) -> list[tuple[bool, int, int, int, int, int]]:
    """Mixtures of layers that a stage may have: whether pieces are in order, layers without and with experts, the
    parameters of a rank that are no experts' and that are, and the stage."""
    found, sparse = [], model.num_expert_layers
    for stage in {0, pp - 1} if not sparse else {0, min(1, pp - 1), pp - 1}:
        layers = sum(piece_layers(model.num_layers, pp)[stage])
        mixtures = [(True, sum(expert_layers(model, pp, stage)))]
        if 0 < sparse < model.num_layers:
            mixtures += [(False, each) for each in {max(0, layers - model.num_layers + sparse), min(layers, sparse)}]
        for in_order, each in mixtures:
            held = layers_of_rank(model, tp, ep, each, layers - each, first=stage == 0, last=stage == pp - 1)
            found.append((in_order, layers - each, each, held.total - held.experts, held.experts, stage))
    return found


@lru_cache(maxsize=4096)
def _kept(
    model: Architecture, tokens: int, tp: int, imbalance: float, adapters: Adapters | None, attention: str
) -> NDArray[np.float64]:
    """Bytes that a layer keeps of a sequence: without and with experts, tokens whole and split, recompute none,
    full and selective; 0 for a kind of layer that the model has not."""
    kinds = (model.num_expert_layers < model.num_layers, model.num_expert_layers > 0)
    return np.array([
        [[kept_bytes(model, tokens, tp, split, attention, False, word, with_experts=kind, imbalance=imbalance,
                     adapters=adapters)
          if has else 0 for word in ("none", "full", "selective")] for split in (False, True)]
        for kind, has in zip((False, True), kinds, strict=True)
    ])  # fmt: skip


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
