"""The seconds of one layer on a rank, dense or with experts, and what a rank keeps of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory import cluster, cp, ep
from dtlib.theory.activations import layer_activations
from dtlib.theory.cluster import Cluster
from dtlib.theory.models import Adapters, Architecture, Experts

from .constants import Constants
from .plan import Machine, Plan
from .products import CAST_BYTES, FP8_BYTES, product_seconds

Column = NDArray[Any]


@lru_cache(maxsize=4096)
def kept_bytes(
    model: Architecture, seq: int, tp: int, split: bool, attention: Any, dropout: bool, recompute: str = "none",
    *, with_experts: bool = False, imbalance: float = 1, adapters: Adapters | None = None,
) -> float:  # fmt: skip
    """Bytes that a layer keeps of one sequence."""
    return layer_activations(
        model, 1, seq=seq, tp=tp, sequence_parallel=split, attention=attention, dropout=dropout, recompute=recompute,
        with_experts=with_experts, imbalance=imbalance, adapters=adapters,
    ).total  # fmt: skip


def rates(machine: Machine, k: Constants) -> tuple[float, float]:
    """Operations a second of large products, and bytes a second of memory.

    Where nobody has measured a card's products, 0.8 of its peak stands in, as on an H100.
    """
    card = machine.accelerator
    measured = card.measured_half_flop_per_s or 0.8 * card.half_flop_per_s
    return measured * k.matmul_share, card.memory_bytes_per_s


def fp8_speedup(machine: Machine) -> float:
    """How many times as fast as in 16 bits products are in fp8: by the card's sheet, of which as large a share is taken
    to be reached. ``ValueError`` for a card without."""
    card = machine.accelerator
    if card.fp8_flop_per_s is None:
        raise ValueError(f"precision must be bf16 on {card.name}, not 'fp8': its data sheet has no products in fp8")
    return card.fp8_flop_per_s / card.half_flop_per_s


def link_shares(k: Constants) -> tuple[float, float, float]:
    """What collectives reach of each link's rate, and the seconds of a message across."""
    return k.inside_share, k.across_share, k.across_alpha_seconds


def half_all_reduce(of: Cluster | None, full_bytes: Any, messages: int = 1) -> Any:
    """Seconds of half an all-reduce of `full_bytes` in so many equal messages over a group; 0 for a rank alone."""
    if of is None or of.world_size == 1:
        return 0 * full_bytes
    return messages * cluster.two_level(of, full_bytes / messages, 1)


def layer_seconds(
    model: Architecture, mesh: Plan, b: Column, split: Column, machine: Machine, k: Constants, with_experts: bool
) -> dict[str, Any]:
    """Seconds of one layer's forward pass on a rank: its products, the last of them, its attention, and the rest.

    `adapters` have two products of their own for each matrix, in 16 bits. In fp8, products of layers are as much
    faster as the card's sheets say, and `casts` a third of what is cast in a micro-batch: times three, as the products,
    it is all.
    """
    rate, memory = rates(machine, k)
    operands = memory / k.operand_passes
    s, t = mesh.tokens_of(model), mesh.tp
    tokens = b * s
    sizes: list[tuple[Any, Any, Any, Any]] = [(1, tokens, *each) for each in _matrices(model, t, with_experts)]
    if with_experts and model.experts is not None:
        sizes += _expert_products(model, model.experts, mesh, tokens)
    fast, width = rate, 2.0
    casts: Any = 0.0
    if mesh.precision == "fp8":
        fast, width = rate * fp8_speedup(machine), FP8_BYTES
        entries = [np.asarray(n * (x * y + y * z + x * z)) for n, x, y, z in sizes]
        casts = CAST_BYTES / 3 * np.sum(entries, axis=0) / memory
    products = [n * product_seconds(x, y, z, fast, operands, width) for n, x, y, z in sizes]
    of = mesh.adapters
    adapters = [] if of is None else [each for x, y in of.matrices(model, t) for each in ((x, of.rank), (of.rank, y))]
    adapted = sum(np.asarray(product_seconds(tokens, *each, rate, operands)) for each in adapters)
    kept = {
        each: kept_bytes(model, s, t, each, mesh.attention, mesh.dropout, with_experts=with_experts,
                         imbalance=mesh.imbalance)
        for each in (False, True)
    }  # fmt: skip
    elementwise = b * np.where(split, kept[True], kept[False]) * k.kept_passes / memory
    # a rank of a context group has s queries of s · cp keys, of which a causal mask leaves half, a window fewer
    scores = cp.forward_flops(1, s * s * mesh.cp, model.num_heads, model.head_dim) / t * b
    scores = scores * model.score_share(s * mesh.cp)
    if model.latent is not None:  # values are narrower than keys
        scores = scores * (1 + model.latent.value_dim / model.head_dim) / 2
    if mesh.attention == "flash":
        reached = rate / k.matmul_share * k.attention_share
        attention = scores / 2 / (min(reached, k.attention_flop_per_s) if k.attention_flop_per_s else reached)
    else:
        attention = b * model.num_heads / t * 2 * product_seconds(s, model.head_dim, s, rate, operands)
    return {
        "matmuls": sum(products), "last": products[-1], "casts": casts, "adapters": adapted,
        "attention": attention, "elementwise": elementwise,
    }  # fmt: skip


def _matrices(model: Architecture, t: int, with_experts: bool) -> list[tuple[float, float]]:
    """Rows and columns of the matrices that all tokens meet, those of the MLP or of the shared experts last."""
    h, q, width, first = model.hidden, model.query_width / t, model.ffn_hidden / t, 2 if model.gated else 1
    if model.latent is None:
        found = [(h, q + 2 * max(model.kv_width / t, model.head_dim)), (q, h)]
    else:  # what leads to the latent vectors is on every rank
        of, values = model.latent, model.value_width / t
        found = [(h, of.kv_rank + of.rope_dim), (of.kv_rank, model.num_heads / t * of.nope_dim + values), (values, h)]
        found += [(h, q)] if of.q_rank is None else [(h, of.q_rank), (of.q_rank, q)]
    if with_experts and model.experts is not None:
        found.append((h, model.experts.num_experts))
        width = model.experts.shared_hidden / t
    return found + ([(h, width * first), (width, h)] if width else [])


def _expert_products(
    model: Architecture, experts: Experts, mesh: Plan, tokens: Column
) -> list[tuple[Column, Column, float, float]]:
    """How many products the experts of the busiest rank have, which share its copies alike, and their sides."""
    h, width, first = model.hidden, experts.hidden / mesh.tp, 2 if model.gated else 1
    copies = tokens * experts.top_k * mesh.imbalance
    at_work = np.minimum(copies, experts.num_experts / mesh.ep)  # an expert without a token reads no weights
    shapes = ((h, width * first), (width, h))
    return [(at_work, copies / at_work, rows, columns) for rows, columns in shapes]


def exchange_seconds(model: Architecture, mesh: Plan, b: Column, split: Column, machine: Machine, k: Constants) -> Any:
    """Seconds that the tokens of a layer take to their experts and back, forward: nothing hides them.

    With the cheapest of `ep.COPIES`, and `imbalance` times as long as in the mean, since all wait for the rank that
    most are sent to. In 16 bits, both ways.
    """
    if model.experts is None or mesh.ep == 1:
        return 0.0 * b
    tokens = b * mesh.tokens_of(model) / np.where(split, mesh.tp, 1)
    ways = _ways(model.hidden, model.experts, machine.expert_group(mesh, link_shares(k)))
    return mesh.imbalance * np.min([latency + each * tokens for latency, each in ways], axis=0)


@lru_cache(maxsize=4096)
def _ways(hidden: int, experts: Experts, of: Cluster) -> tuple[tuple[float, float], ...]:
    """Of each way to send a token's copies: seconds however few they are, and what each token adds."""
    layer = ep.Layer(hidden=hidden, expert_hidden=experts.hidden, num_experts=experts.num_experts, top_k=experts.top_k)
    found, many = [], 2**20
    for copies in ep.COPIES:
        latency, seconds = (ep.all_to_all_seconds(of, layer, tokens, copies=copies) for tokens in (0, many))
        found.append((latency, (seconds - latency) / many))
    return tuple(found)
