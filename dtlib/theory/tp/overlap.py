"""What of an all-reduce can hide: behind the gradient of the weights, or behind the next piece of the product."""

from __future__ import annotations

from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, whole


@formula("tp.exposed_seconds", source="derived here", label="eq-tp-chunks", equation=r"\max(0,\; R - G)")
def exposed_seconds(all_reduce_seconds: float, weight_gradient_seconds: float) -> float:
    """What is left of the backward all-reduce of a column-parallel layer.

    The gradient of its input is all-reduced (R seconds) while the gradient of its weights is computed (G), which does
    not need the sum.
    """
    travel = amount("all_reduce_seconds", all_reduce_seconds)
    return max(0.0, travel - amount("weight_gradient_seconds", weight_gradient_seconds))


@formula("tp.chunked_seconds", source="derived here", label="eq-tp-chunks", equation=r"\max(P, R) + \frac1k \min(P, R)")
def chunked_seconds(product_seconds: float, all_reduce_seconds: float, chunks: int) -> float:
    """A row-parallel product in k pieces, each all-reduced while the next one is computed.

    A pipeline of two stations: the first piece's product, then k − 1 times the slower of the two, then the last piece's
    all-reduce: P/k + (k−1) max(P, R)/k + R/k. Latency, which more pieces pay more often, is left out.
    """
    product = amount("product_seconds", product_seconds)
    travel = amount("all_reduce_seconds", all_reduce_seconds)
    return max(product, travel) + min(product, travel) / whole("chunks", chunks, 1)


def hiding_width(
    tp: int, flops_per_s: float, link_bytes_per_s: float, *, columns: float = 4, element_bytes: float = 2
) -> float:
    """The width h from which the gradient of a layer's weights hides the all-reduce of its input's gradient.

    The weights are h × `columns`·h, split over t ranks: 2bsh · columns · h/(tF) seconds, against
    2(t−1)/t · bshw/B. So h ≥ (t−1) wF/(columns · B): 4 columns for the MLP, 3 for queries, keys and values.
    """
    t = whole("tp", tp, 1)
    rate = amount("flops_per_s", flops_per_s, positive=True)
    link = amount("link_bytes_per_s", link_bytes_per_s, positive=True)
    many = amount("columns", columns, positive=True)
    return (t - 1) * amount("element_bytes", element_bytes, positive=True) * rate / (many * link)
