"""When the all-to-all hides behind the experts, on nodes with fast links inside and slow ones across.

Forward, of one layer, balanced: a batch has two halves of t tokens a rank, and the dispatch and the combine of one are
under way while the experts compute the other, so that two times are compared. Backward computes twice as much and
sends as many bytes, so what hides forward hides there. F operations, B bytes of a link and B_mem of memory a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dtlib.theory import cluster
from dtlib.theory.cluster import Cluster
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole

from .layer import Layer
from .traffic import COPIES, link_elements


def all_to_all_seconds(of: Cluster, layer: Layer, tokens: int, *, copies: str = "best") -> float:
    """Seconds that t `tokens` of each rank of a cluster take to their experts and back, in w_out + w_back bytes each.

    With a copy for each ``"expert"`` or ``"rank"``, twice the best plan that `cluster` knows for an all-to-all. With
    one for each ``"node"``, m − 1 messages across and g − 1 inside, one after the other. ``"best"`` is the fastest.
    """
    if copies == "best":
        return min(all_to_all_seconds(of, layer, tokens, copies=each) for each in COPIES)
    n, g = of.world_size, of.ranks_per_node
    how: dict[str, Any] = {
        "copies": copies,
        "ranks_per_node": g,
        "groups": layer.groups,
        "top_groups": layer.top_groups,
    }
    elements = link_elements(tokens, layer.hidden, layer.num_experts, layer.top_k, n, **how)
    sent = elements.scaled(layer.dispatch_bytes_per_element + layer.combine_bytes_per_element)
    if copies != "node":
        return 2 * cluster.best("all_to_all", of, sent.total / 2 * n / max(1, n - 1)).seconds
    inside = 2 * (g - 1) * of.inside_alpha_seconds + sent.inside / of.inside_bytes_per_s
    return inside + 2 * (of.num_nodes - 1) * of.across_alpha_seconds + sent.across / of.shared_bytes_per_s


def _seconds_per_token(of: Cluster, layer: Layer, copies: str) -> float:
    """What a token adds to the all-to-all: its bytes alone."""
    at_once = replace(of, inside_alpha_seconds=0.0, across_alpha_seconds=0.0)
    return all_to_all_seconds(at_once, layer, 1, copies=copies)


def _read_seconds(layer: Layer, routed: float, memory_bytes_per_s: float) -> float:
    """So many routed experts and the shared ones, read from memory."""
    memory = amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)
    return layer.expert_params * layer.weight_bytes * (routed + layer.num_shared) / memory


@formula(
    "ep.hiding_width",
    source="derived here",
    label="thm-ep-width",
    equation=r"f \ge \frac{N-1}{N} \cdot \frac{V}{k + S} \cdot \frac{(w_\text{out} + w_\text{back})\,F}{6 B}",
    use="Wider experts hide the all-to-all of any number of tokens, as far as its bytes go.",
)
def hiding_width(of: Cluster, layer: Layer, flops_per_s: float, *, copies: str = "best") -> float:
    """The width of an expert from which its products take as long as the bytes of the all-to-all.

    A token costs 6hf (k + S)/F seconds and (N − 1)/N · V h (w_out + w_back)/B: tokens and h cancel, and f decides. V is
    the copies of a token, k with one for each expert; without gates 4 for 6. The equation is that of one node; across
    nodes each kind of link adds its bytes over its rate. Latency is `hiding_tokens`. The layer's own f does not count
    here. ``ValueError`` for a rate that is not positive.
    """
    rate = amount("flops_per_s", flops_per_s, positive=True)
    return _seconds_per_token(of, layer, copies) * rate * layer.expert_hidden / layer.flops_per_token


@formula(
    "ep.reading_tokens",
    source="derived here",
    equation=r"\frac{E}{N k} \cdot \frac{w F}{2 B_\text{mem}}",
    use="With fewer tokens a rank the experts wait for their own weights.",
)
def reading_tokens(layer: Layer, ep: int, flops_per_s: float, memory_bytes_per_s: float) -> float:
    """Tokens a rank from which the routed experts compute for longer than their weights take from memory.

    E/N experts of 3hf weights of w bytes are read whatever comes; tk choices cost 6hf each: h and f cancel, and an
    expert needs wF/(2 B_mem) tokens. ``ValueError`` for rates that are not positive.
    """
    rate = amount("flops_per_s", flops_per_s, positive=True)
    memory = amount("memory_bytes_per_s", memory_bytes_per_s, positive=True)
    held = layer.num_experts / whole("ep", ep, 1)
    return held * layer.weight_bytes * rate / (2 * layer.top_k * memory)


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer's forward pass: its `experts`, the `travel` of tokens there and back, and the `dense` MLP that
    computes as much for a token, (k + S) f wide, on a rank that needs nobody else."""

    experts: float
    travel: float
    dense: float

    @property
    def exposed(self) -> float:
        """What of the travel does not hide behind the experts."""
        return max(0.0, self.travel - self.experts)

    @property
    def over_dense(self) -> float:
        """How many times as long as the dense MLP it takes, travel hidden as far as it can be: with many tokens
        max(1, f*/f), f* the `hiding_width`."""
        return (self.experts + self.exposed) / self.dense


def layer_seconds(
    of: Cluster, layer: Layer, tokens: int, flops_per_s: float, memory_bytes_per_s: float, *, copies: str = "best"
) -> LayerSeconds:
    """Seconds of a layer forward, for t `tokens` on each rank of a cluster.

    The experts take as long as their products or as reading E/N of them and the shared ones, whichever is longer; so
    does the dense MLP, which reads (k + S) of them. ``ValueError`` for no tokens, or rates that are not positive.
    """
    rate = amount("flops_per_s", flops_per_s, positive=True)
    products = whole("tokens", tokens, 1) * layer.flops_per_token / rate
    return LayerSeconds(
        experts=max(products, _read_seconds(layer, layer.num_experts / of.world_size, memory_bytes_per_s)),
        travel=all_to_all_seconds(of, layer, tokens, copies=copies),
        dense=max(products, _read_seconds(layer, layer.top_k, memory_bytes_per_s)),
    )


@formula(
    "ep.hiding_tokens",
    source="derived here",
    label="thm-ep-width",
    equation=r"t \ge \frac{2 \alpha (N-1)}{6 h f (k + S)/F - \frac{N-1}{N} V h (w_\text{out} + w_\text{back})/B}",
    use="With more tokens a rank the all-to-all hides behind experts that are wide enough.",
)
def hiding_tokens(
    of: Cluster, layer: Layer, flops_per_s: float, memory_bytes_per_s: float | None = None, *, copies: str = "best"
) -> float:
    """Tokens a rank from which the experts take as long as the all-to-all, there and back.

    What a token adds to either side is `hiding_width`'s; beside it stand N − 1 messages each way, which only tokens can
    pay. Infinite where f is below the `hiding_width`. With `memory_bytes_per_s` the experts take as long as reading
    their weights at least, which covers the travel of few tokens; where that is so until their products take longer,
    nothing is exposed with any number: 0. ``ValueError`` for rates that are not positive.
    """
    if copies == "best":
        return min(hiding_tokens(of, layer, flops_per_s, memory_bytes_per_s, copies=each) for each in COPIES)
    compute = layer.flops_per_token / amount("flops_per_s", flops_per_s, positive=True)
    latency, sent = all_to_all_seconds(of, layer, 0, copies=copies), _seconds_per_token(of, layer, copies)
    if compute <= sent:
        return math.inf
    if memory_bytes_per_s is not None:
        read = _read_seconds(layer, layer.num_experts / of.world_size, memory_bytes_per_s)
        if read >= latency + sent * read / compute:
            return 0.0
    return latency / (compute - sent)
