"""What a layer of experts keeps between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.valid import amount, flag, whole

from .traffic import expected_visits

_INDEX_BYTES = 8
_WIDE_BYTES = 4
"""A router computes in float32 at least, and what points to a row is int64."""


@dataclass(frozen=True)
class KeptBytes(Breakdown):
    """Bytes that a rank keeps of a layer of experts, its input apart.

    `router` are all scores, and input and matrix in float32 where they are narrower; `choices` what says of each
    choice, sent and arrived, its row and its weight; `rows` the tokens that came from all ranks, this one too; `hidden`
    what the experts' first matrices put out; `shared` the same of the shared ones, with their rows.
    """

    router: float
    choices: float
    rows: float
    hidden: float
    shared: float


@formula(
    "ep.kept_bytes",
    source="derived here",
    equation=r"t\,\bigl(4E + V h\,w + k\,(2 f\,w + i)\bigr)",
)
def kept_bytes(
    tokens: int,
    hidden: int,
    expert_hidden: int,
    num_experts: int,
    top_k: int,
    ep: int = 1,
    *,
    tp: int = 1,
    gated: bool = True,
    shared_hidden: int = 0,
    normalised: bool = True,
    imbalance: float = 1,
    element_bytes: float = 2,
) -> KeptBytes:
    """Bytes that a rank keeps of a layer of experts for its backward pass, beside the layer's input.

    Of t tokens a rank with k choices each it keeps the scores of all E experts, a row for each of the V ranks that a
    token visits, and for each choice what the first matrices put out, 2f entries (f where it is not `gated`), over the
    `tp` ranks that split the width: what lies behind is computed again, and the answers are weighted before they are
    added up, so no copy of them is kept. i bytes point to rows. With `ep` 1 rows are the input. The busiest rank gets
    `imbalance` times the mean. A layer that is written out plainly keeps more: a copy of a token for each choice, the
    non-linearity's outputs, and k answers (`activations.layer_activations`).

    Uniform routing. ``ValueError`` for sizes below 1, more choices than experts, or an `imbalance` below 1.
    """
    t, h, f = whole("tokens", tokens, 0), whole("hidden", hidden, 1), whole("expert_hidden", expert_hidden, 1)
    n, parts, gates = whole("ep", ep, 1), whole("tp", tp, 1), 2 if flag("gated", gated) else 1
    visits, w = expected_visits(num_experts, top_k, n), amount("element_bytes", element_bytes, positive=True)
    wide, more = max(w, _WIDE_BYTES), amount("imbalance", imbalance)
    if more < 1:
        raise ValueError(f"imbalance must be at least 1, not {imbalance!r}")
    chosen = t * (2 * _INDEX_BYTES * top_k + (wide * (top_k + 2) if flag("normalised", normalised) else 0))
    arrived = more * t * top_k * ((1 if n == 1 else 2) * _INDEX_BYTES + wide)
    s = whole("shared_hidden", shared_hidden, 0)
    return KeptBytes(
        router=wide * (t * num_experts + (h * (t + num_experts) if w < wide else 0)),
        choices=chosen + arrived + (_INDEX_BYTES * t * visits if n > 1 else 0),
        rows=more * t * visits * h * w if n > 1 else 0,
        hidden=more * t * top_k * gates * f / parts * w,
        shared=t * (gates * s / parts * w + _INDEX_BYTES + w) if s else 0,
    )
