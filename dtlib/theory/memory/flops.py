"""Floating point operations of a training step, and the share of a device's peak that they use.

A matrix product of (m, k) and (k, n) costs 2mkn operations; the backward pass costs two such products for each of the
forward pass. Norms, activations and the softmax are not counted: they are bound by memory, not by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.formula import formula
from dtlib.theory.models import Architecture, checked_model, last_has_experts, layer_parameters
from dtlib.theory.valid import amount, whole

RECOMPUTE = ("none", "selective", "full")
"""What is computed again in the backward pass: nothing, the attention core, or every layer."""


def checked_recompute(recompute: Any) -> str:
    """`recompute`, or ``ValueError`` unless it is one of `RECOMPUTE`."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    return str(recompute)


@dataclass(frozen=True)
class TokenFlops(Breakdown):
    """Operations for one token: the `dense` matrices, the `attention` between tokens, and what is done again."""

    dense: float
    attention: float
    recomputed: float = 0

    @property
    def model(self) -> float:
        """What the model needs; a second computation of the same thing does not count."""
        return self.dense + self.attention


@formula(
    "memory.training_flops_per_token", source="chowdhery2022", label="eq-memory-flops", equation=r"6\Psi + 12\, l h s"
)
def training_flops_per_token(
    num_params: float,
    num_layers: int,
    hidden: int,
    seq: int,
    *,
    causal: bool = False,
    recompute: str = "none",
) -> TokenFlops:
    """Operations to train on one token.

    6Ψ + 12 l h s: each parameter multiplies and adds once forward and twice backward, and every layer compares the
    token with all s of its sequence (2hs for the scores, 2hs for the weighted values, three times). Where the heads are
    not h wide together, `hidden` is their width, a·d (``model.query_width``). The published
    rates of utilisation count all s; with `causal` only the half that a causal mask leaves counts: 6 l h s. Recompute
    adds a forward pass of everything (``"full"``: 2Ψ + 4 l h s, so 8Ψ in all) or of the attention between tokens
    (``"selective"``: 4 l h s).

    Of a model with experts, Ψ is what is active (`models.active_parameters`).
    Ψ counts every parameter, embeddings too, as the PaLM paper and llm-foundry do; `forward_flops_per_token` counts the
    products one by one. ``ValueError`` for sizes below 1 or another `recompute`. Source: Chowdhery et al. 2022, arXiv
    2204.02311, appendix B.
    """
    num_params = amount("num_params", num_params)
    l, h, s = whole("num_layers", num_layers, 1), whole("hidden", hidden, 1), whole("seq", seq, 1)
    forward_dense, forward_attention = 2 * num_params, (2 if causal else 4) * l * h * s
    again = {"none": 0, "selective": forward_attention, "full": forward_dense + forward_attention}
    return TokenFlops(3 * forward_dense, 3 * forward_attention, again[checked_recompute(recompute)])


@formula(
    "memory.paper_flops_per_step",
    source="narayanan2021",
    label="eq-memory-flops",
    equation=r"72\, S s\, l h^2 \Bigl(1 + \frac{s}{6h} + \frac{V}{12\, l h}\Bigr)",
)
def paper_flops_per_step(
    sequences: int, num_layers: int, hidden: int, seq: int, vocab: int, *, full_recompute: bool = False
) -> float:
    """Operations of a whole step, as the Megatron papers count.

    72 S s l h² (1 + s/(6h) + V/(12 l h)) for a batch of S `sequences`; with a full recompute of the layers
    96 S s l h² (1 + s/(6h) + V/(16 l h)). These are the 6 (or 8) operations for each weight of the layers' matrices,
    always 6 for those of the head, none for biases, norms and the embedding, and attention to all s tokens.
    ``ValueError`` for sizes below 1. Source: Narayanan et al. 2021, arXiv 2104.04473, equation 3.
    """
    b, l, h = whole("sequences", sequences, 1), whole("num_layers", num_layers, 1), whole("hidden", hidden, 1)
    s, v = whole("seq", seq, 1), whole("vocab", vocab, 1)
    passes = 4 if full_recompute else 3
    return b * s * (passes * (24 * l * h * h + 4 * l * h * s) + 6 * v * h)


@dataclass(frozen=True)
class ForwardFlops(Breakdown):
    """Operations of one token's forward pass, product by product: the projections of attention (queries, keys, values,
    output), its scores and weighted values, the MLP (of experts those that the token goes through, with their router),
    and the head. A look-up in the embedding costs none."""

    projections: float
    scores: float
    weighted_values: float
    mlp: float
    head: float


@formula(
    "memory.forward_flops_per_token",
    source="derived here",
    label="eq-memory-flops",
    equation=r"2 \sum_{\text{products}} (\text{inputs}) (\text{outputs})",
)
def forward_flops_per_token(model: Architecture | str, *, seq: int | None = None, causal: bool = False) -> ForwardFlops:
    """Operations of the forward pass for one token, product by product.

    For sequences of `seq` tokens, those of `model` by default. Exact for matrix products: 2·inputs·outputs each. With
    `causal`, a token looks at itself and what came before, (s + 1)/2 tokens in the mean instead of s. A window leaves
    the share that `Architecture.score_share` says. A module that predicts a further token costs a layer, its matrix
    from 2h to h, and the head once more. Times 3 for training. ``ValueError`` for a `seq` below 1.
    """
    model = checked_model(model)
    s = model.seq if seq is None else whole("seq", seq, 1)
    h, n, matrices = model.hidden, model.mtp_modules, 3 if model.gated else 2
    seen = ((s + 1) / 2 if causal else s) * model.score_share(s)
    sparse = model.num_expert_layers + n * last_has_experts(model)
    l, experts, width, routed = model.num_layers + n, model.experts, 0, 0
    if experts is not None:
        width = experts.top_k * experts.hidden + experts.shared_hidden
        routed = h * (experts.num_experts + experts.shared_gate)
    projected = 2 * h * model.query_width + 2 * h * model.kv_width
    if model.latent is not None:
        projected = layer_parameters(model, with_experts=False).attention
    return ForwardFlops(
        projections=2 * (l * projected + n * 2 * h * h),
        scores=l * 2 * model.query_width * seen,
        weighted_values=l * 2 * model.output_width * seen,
        mlp=2 * ((l - sparse) * matrices * h * model.ffn_hidden + sparse * (matrices * h * width + routed)),
        head=(1 + n) * 2 * model.vocab * h,
    )


def utilisation(tokens_per_s: float, flops_per_token: float, peak_flop_per_s: float) -> float:
    """The share of the peak that training uses, 0 to 1.

    tokens a second · operations a token / peak, where tokens and peak are those of one device or both those of the
    whole machine. With the operations that the model needs (`TokenFlops.model`) it is the **model** FLOPs utilisation,
    MFU; with those that are done (`TokenFlops.total`, recompute included) the **hardware** FLOPs utilisation, HFU.
    ``ValueError`` for negative amounts or a peak that is not positive. Source: Chowdhery et al. 2022, arXiv 2204.02311.
    """
    tokens_per_s = amount("tokens_per_s", tokens_per_s)
    flops_per_token = amount("flops_per_token", flops_per_token)
    peak_flop_per_s = amount("peak_flop_per_s", peak_flop_per_s, positive=True)
    return tokens_per_s * flops_per_token / peak_flop_per_s


@formula(
    "memory.mfu",
    source="chowdhery2022",
    label="eq-memory-mfu",
    equation=r"\frac{(6\Psi + 12\, l h s) \cdot \text{tokens/s}}{F}",
)
def mfu(tokens_per_s: float, flops: TokenFlops, peak_flop_per_s: float) -> float:
    """Model FLOPs utilisation.

    0 to 1: `utilisation` by what the model needs; recompute earns nothing.
    """
    return utilisation(tokens_per_s, flops.model, peak_flop_per_s)


@formula(
    "memory.hfu",
    source="chowdhery2022",
    label="eq-memory-mfu",
    equation=r"\frac{(8\Psi + 16\, l h s) \cdot \text{tokens/s}}{F} \quad \text{with a full recompute}",
)
def hfu(tokens_per_s: float, flops: TokenFlops, peak_flop_per_s: float) -> float:
    """Hardware FLOPs utilisation.

    0 to 1: `utilisation` by what is computed; at least `mfu`, 4/3 of it with a full recompute.
    """
    return utilisation(tokens_per_s, flops.total, peak_flop_per_s)
