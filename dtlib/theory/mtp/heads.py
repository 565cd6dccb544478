"""What predicting n tokens costs beside predicting one: parameters, operations, and the logits that are held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import forward_flops_per_token
from dtlib.theory.models import (
    Architecture,
    checked_model,
    last_has_experts,
    layer_parameters,
    mtp_parameters,
    norm_parameters,
)
from dtlib.theory.valid import flag, whole

KINDS = ("independent", "sequential")
"""Heads beside each other on one trunk, or modules behind each other."""


def checked_kind(kind: Any) -> str:
    """`kind`, or ``ValueError`` unless it is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return str(kind)


def layer_flops(model: Architecture, index: int, seq: int | None = None) -> float:
    """Forward operations of a token in layer `index` of `model`, 0 the first: with experts where that one has them."""
    experts = model.experts
    if experts is not None:
        experts = replace(experts, first_dense=0, every=1) if experts.layers(index, index + 1) else None
    forward = forward_flops_per_token(replace(model, num_layers=1, experts=experts, mtp_modules=0), seq=seq)
    return forward.total - forward.head


@formula(
    "mtp.extra_parameters",
    source="gloeckle2024",
    label="eq-mtp-parameters",
    equation=r"(n-1)(\Psi_{\text{layer}} + \Psi_{\text{norm}}) \quad\text{or}\quad "
    r"(n-1)(\Psi_{\text{layer}} + 2h^2 + 3\,\Psi_{\text{norm}})",
)
def extra_parameters(model: Architecture | str, predicted: int, kind: str = "independent") -> int:
    """Parameters that n − 1 further heads add to the layers of `model`.

    The embedding and the matrix of the head are shared. An ``"independent"`` head has a layer and a norm of its own; a
    ``"sequential"`` module a layer, a projection from 2h to h without a bias, a norm for each of the two things that it
    joins, and one in front of the head (`models.mtp_parameters`). The layer is one as the model's last: with its
    experts, if it has some. The model's own `mtp_modules` are not looked at. ``ValueError`` for a `predicted` below 1
    or another `kind`. Sources: Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-AI 2024, arXiv 2412.19437, section 2.2.
    """
    model, n = checked_model(model), whole("predicted", predicted, 1)
    if checked_kind(kind) == "sequential":
        return (n - 1) * mtp_parameters(model).total
    return (n - 1) * (layer_parameters(model, with_experts=last_has_experts(model)).total + norm_parameters(model))


@formula(
    "mtp.extra_flops_per_token",
    source="derived here",
    label="eq-mtp-flops",
    equation=r"(n-1)\,(f + 2Vh) \quad\text{or}\quad (n-1)\,(f + 4h^2 + 2Vh)",
)
def extra_flops_per_token(
    model: Architecture | str, predicted: int, kind: str = "independent", *, seq: int | None = None
) -> float:
    """Forward operations that n − 1 further heads add for a token.

    Each a layer as the model's last (f; of experts those that the token goes through) and the head's product with all V
    words; a ``"sequential"`` module the projection besides, 2 · 2h · h. Times 3 for training. As
    `memory.forward_flops_per_token` counts: products alone, attention to all s tokens. The matrix of the head is
    shared, its product is not. ``ValueError`` as `extra_parameters`.
    """
    model, n = checked_model(model), whole("predicted", predicted, 1)
    projection = 4 * model.hidden**2 if checked_kind(kind) == "sequential" else 0
    return (n - 1) * (layer_flops(model, model.num_layers - 1, seq) + projection + 2 * model.vocab * model.hidden)


@formula(
    "mtp.logits_bytes", source="gloeckle2024", label="thm-mtp-in-turn", equation=r"n\,b\,s\,V\,w \;\to\; b\,s\,V\,w"
)
def logits_bytes(
    micro_batch: int, seq: int, vocab: int, predicted: int, *, in_turn: bool = False, element_bytes: int = 4
) -> int:
    """Logits that are kept for backward.

    One graph of all losses keeps a set of bsV numbers for each of n heads: n·bsV·w bytes. `in_turn`, each head goes
    backward before the next goes forward, and one set is there at a time, whatever n: bsV·w. What a loss holds besides
    while it is computed (the scores themselves, a gradient as large) comes once, both ways. ``ValueError`` for sizes
    below 1.
    """
    b, s, vocab = whole("micro_batch", micro_batch, 1), whole("seq", seq, 1), whole("vocab", vocab, 1)
    sets = 1 if flag("in_turn", in_turn) else whole("predicted", predicted, 1)
    whole("predicted", predicted, 1)
    return sets * b * s * vocab * whole("element_bytes", element_bytes, 1)
