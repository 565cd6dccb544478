"""Activations of one layer, tensor by tensor, for any model: what autograd keeps for the backward pass.

Shapes: b sequences (`micro_batch`), s tokens (`seq`), h width, a heads, f width of the MLP, t ranks (`tp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dtlib.theory.breakdown import Breakdown, over
from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import checked_recompute
from dtlib.theory.models import Adapters, Architecture, checked_model, checked_tp, has_experts, kv_width_of_rank
from dtlib.theory.valid import amount, whole

Attention = Literal["matrix", "flash"]
_ATTENTIONS = ("matrix", "flash")


@dataclass(frozen=True)
class Widths:
    """Bytes of one entry of each kind of tensor.

    `element` is the dtype that the layer computes in, `core` the dtype of queries, keys, values and the attention
    matrix, `mask` that of the dropout masks behind the blocks, `core_mask` that of the mask on the attention matrix,
    `statistic` that of a norm's mean and inverse deviation, `log_sum_exp` that of the one number a head and token that
    flash attention keeps. `values` is `core`, unless values are kept as a view into something wider. The defaults are
    the paper's: bf16, masks of one byte, and nothing for what is small. ``ValueError`` for a negative or broken width.
    """

    element: float = 2
    core: float = 2
    mask: float = 1
    core_mask: float = 1
    statistic: float = 0
    log_sum_exp: float = 0
    values: float | None = None

    def __post_init__(self) -> None:
        for name in ("element", "core", "mask", "core_mask", "statistic", "log_sum_exp"):
            amount(name, getattr(self, name))
        if self.values is None:
            object.__setattr__(self, "values", self.core)
        amount("values", self.values)


PAPER = Widths()


def written_out_widths(element: int = 2) -> Widths:
    """What a layer of `ranks.model` that is ``written_out`` keeps, with `element` bytes an entry: 2 as in the paper.

    Masks have one byte. The paper leaves out a norm's mean and inverse deviation, which have the layer's dtype on a
    CPU: 2 · 2 · s b entries. With flash attention in place of the matrix, its log-sum-exp is in fp32.
    """
    element = whole("element", element, 1)
    return Widths(element=element, core=element, mask=1, core_mask=1, statistic=element, log_sum_exp=4)


def torch_cpu_widths(element: int = 4, *, attention: Attention = "flash", in_one_row: bool = False) -> Widths:
    """What torch's own modules keep on a CPU for a layer of `element` bytes an entry (8: fp64, 4: fp32, 2: bf16 or
    fp16), as measured with 2.13.

    A layer norm's statistics and the masks have the layer's dtype. Flash attention keeps its log-sum-exp in fp32 (fp64
    of fp64). The plain product of matrices scales queries and keys, which makes copies, in fp32 at least. Values
    are copied too, for another dtype or because sequences and heads must lie in one row to be multiplied; with
    `in_one_row` (b, s or a is 1) they do, and from fp32 up the values remain a view that keeps queries, keys and
    values alive: three times the bytes. Not for ``nn.RMSNorm``, which a CPU computes in steps that keep more.
    """
    element = whole("element", element, 1)
    wide = max(element, 4)
    core = element if checked_attention(attention) == "flash" else wide
    view = in_one_row and attention == "matrix" and element == core
    return Widths(
        element=element, core=core, mask=element, core_mask=core, statistic=element, log_sum_exp=wide,
        values=3 * core if view else core,
    )  # fmt: skip


@dataclass(frozen=True)
class LayerActivations(Breakdown):
    """Bytes that one rank keeps of one layer and one micro-batch, tensor by tensor, in the order of the forward pass.

    `attention_input` and `mlp_input` are what the norms put out, `head_norm_inputs` are queries and keys before norms
    of their own. `softmax_output` is the attention matrix, `softmax_dropped` the same after dropout, `log_sum_exp` all
    that flash attention keeps of it. `mlp_hidden` is what the first matrix (or both, if gated) puts out,
    `mlp_activation` the non-linearity's output, `mlp_product` the gated product. `output_norm_inputs` are what
    attention and the MLP put out before norms of their own. After a full recompute only `attention_norm_input` is kept:
    the layer's input.

    `latents` are the vectors of latent attention, before their norms and behind them. Of a layer with experts, what is
    called `mlp_…` is of the shared ones. `router_scores` are in fp32, `expert_inputs` one copy of a token for each
    expert that it is sent to, `expert_hidden`, `expert_activation` and `expert_product` as those of an MLP, and
    `expert_outputs` what comes back to be weighted, a copy for each of its experts.
    """

    attention_norm_input: float = 0
    attention_norm_statistics: float = 0
    attention_input: float = 0
    head_norm_inputs: float = 0
    head_norm_statistics: float = 0
    queries: float = 0
    keys: float = 0
    values: float = 0
    softmax_output: float = 0
    softmax_mask: float = 0
    softmax_dropped: float = 0
    log_sum_exp: float = 0
    projection_input: float = 0
    projection_mask: float = 0
    mlp_norm_input: float = 0
    mlp_norm_statistics: float = 0
    mlp_input: float = 0
    mlp_hidden: float = 0
    mlp_activation: float = 0
    mlp_product: float = 0
    mlp_mask: float = 0
    latents: float = 0
    router_scores: float = 0
    expert_inputs: float = 0
    expert_hidden: float = 0
    expert_activation: float = 0
    expert_product: float = 0
    expert_outputs: float = 0
    output_norm_inputs: float = 0
    output_norm_statistics: float = 0
    adapter_inputs: float = 0

    @property
    def core(self) -> float:
        """What a selective recompute does away with."""
        return self.softmax_output + self.softmax_mask + self.softmax_dropped + self.log_sum_exp


@formula(
    "activations.layer_activations",
    equation=r"\sum_{\text{tensors } j} w_j\, n_j",
    source="korthikanti2023",
    label="thm-activations-layer",
)
def layer_activations(
    model: Architecture | str,
    micro_batch: int,
    *,
    seq: int | None = None,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    attention: Attention = "matrix",
    dropout: bool = True,
    widths: Widths = PAPER,
    with_experts: bool | None = None,
    imbalance: float = 1,
    adapters: Adapters | None = None,
) -> LayerActivations:
    """Activations of a layer, tensor by tensor.

    Bytes that one of `tp` ranks keeps of one layer of `model` for `micro_batch` sequences of `seq` tokens.
    With the defaults and a GPT they add up to `layer_bytes`, Korthikanti's closed form. Queries, keys, values, the
    attention matrix and what the MLP's first matrices put out are split by tensor parallelism; norms, their outputs and
    the two masks behind the blocks only with `sequence_parallel`. Keys and values have as many heads as the model gives
    them (torch's ``enable_gqa``). Without `dropout` there are no masks, and the attention matrix is kept once.

    A layer with experts drops no token: with k of them a token, a rank's experts get k copies of as many tokens as it
    has, `imbalance` times as many on the busiest rank. `with_experts` says which layer is meant where some have experts
    and others have none.

    Where `adapters` alone are trained, the input of a matrix W is kept for the gradient of A in x·A·B, not for that of
    x, for which W is enough. So what nothing but an unadapted matrix reads is not kept: the norms'
    outputs, what goes into the last matrix of the MLP, and the output of attention, unless flash attention keeps that
    itself. Each adapter keeps x·A, `adapter_inputs` of r entries a token. Somewhere below the layer something is
    trained, or its first norms keep less.

    ``ValueError`` for sizes below 1, a `tp` that the model does not divide by, or an unknown word.
    """
    model = checked_model(model)
    b, s = whole("micro_batch", micro_batch, 1), model.seq if seq is None else whole("seq", seq, 1)
    t, h, tokens = checked_tp(model, tp), model.hidden, b * s
    outside = t if sequence_parallel else 1
    flash, kept = checked_attention(attention) == "flash", widths.element
    norm_input = over(kept * tokens * h, outside)
    if checked_recompute(recompute) == "full":
        return LayerActivations(attention_norm_input=norm_input)
    per_norm = widths.statistic * (2 if model.norm == "layer" else 1)
    statistics = over(per_norm * tokens, outside)
    kv_entries = tokens * kv_width_of_rank(model, t)
    of_heads = model.query_width // t + kv_width_of_rank(model, t) if model.qk_norms or model.wide_qk_norms else 0
    normed, head_norms = tokens * of_heads, 2 if model.wide_qk_norms else of_heads // model.head_dim
    matrix = 0 if flash or recompute == "selective" else over(model.num_heads * s * tokens, t)
    mask = over(widths.mask * tokens * h, outside) if dropout else 0
    with_experts = has_experts(model, with_experts)
    chosen, width = model.experts if with_experts else None, model.ffn_hidden
    gates, experts = 2 if model.gated else 1, {}
    if chosen is not None:
        width, copies = chosen.shared_hidden, tokens * chosen.top_k * amount("imbalance", imbalance)
        one = over(kept * copies * chosen.hidden, t)
        experts = {
            "router_scores": over(4 * tokens * chosen.num_experts, outside),
            "expert_inputs": over(kept * copies * h, outside),
            "expert_hidden": gates * one,
            "expert_activation": one,
            "expert_product": one if model.gated else 0,
            "expert_outputs": over(kept * tokens * (chosen.top_k + chosen.shared_gate) * h, outside),
        }
    wide, value_entries = over(kept * tokens * width, t), kv_entries
    latents: float = 0
    if model.latent is not None:
        value_entries = tokens * model.value_width // t
        latents = over(kept * tokens * 2 * (model.latent.kv_rank + (model.latent.q_rank or 0)), outside)
    found = LayerActivations(
        attention_norm_input=norm_input,
        attention_norm_statistics=statistics,
        attention_input=norm_input,
        head_norm_inputs=kept * normed,
        head_norm_statistics=per_norm * tokens * head_norms,
        queries=over(widths.core * tokens * model.query_width, t),
        keys=widths.core * kv_entries,
        values=(widths.core if widths.values is None else widths.values) * value_entries,
        softmax_output=widths.core * matrix,
        softmax_mask=widths.core_mask * matrix if dropout else 0,
        softmax_dropped=widths.core * matrix if dropout else 0,
        log_sum_exp=over(widths.log_sum_exp * tokens * model.num_heads, t) if flash and recompute == "none" else 0,
        projection_input=over(kept * tokens * model.output_width, t),
        projection_mask=mask,
        mlp_norm_input=norm_input,
        mlp_norm_statistics=statistics,
        mlp_input=norm_input,
        mlp_hidden=wide * gates,
        mlp_activation=wide,
        mlp_product=wide if model.gated else 0,
        mlp_mask=mask,
        latents=latents,
        **experts,
        output_norm_inputs=norm_input * max(0, model.norms_per_layer - 2),
        output_norm_statistics=statistics * max(0, model.norms_per_layer - 2),
    )
    if adapters is None:
        return found
    adapters.check(model)
    reads = {"qkv": "attention_input", "up": "mlp_input", "down": "mlp_product" if model.gated else "mlp_activation"}
    reads |= {} if flash else {"out": "projection_input"}
    dropped = {name: 0.0 for module, name in reads.items() if module not in adapters.modules}
    return replace(found, **dropped, adapter_inputs=kept * tokens * adapters.rank * len(adapters.modules))


def checked_attention(attention: str) -> str:
    """`attention`, or ``ValueError`` unless it is ``"matrix"`` or ``"flash"``."""
    if attention not in _ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(_ATTENTIONS)}, not {attention!r}")
    return attention
