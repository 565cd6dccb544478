"""What a rank of a mesh keeps of its layers between forward and backward."""

from __future__ import annotations

from dtlib.theory import ep, pp
from dtlib.theory.activations import PAPER, Widths, layer_activations
from dtlib.theory.footprint import Setup, expert_layers
from dtlib.theory.formula import formula
from dtlib.theory.models import Architecture, checked_dense
from dtlib.theory.valid import whole

_IN_PLACE = (
    "router_scores", "expert_inputs", "expert_hidden", "expert_activation", "expert_product", "expert_outputs",
    "mlp_hidden", "mlp_activation", "mlp_product",
)  # fmt: skip
"""Of a layer that is written out, what `ranks.experts` keeps in another way."""


@formula(
    "threed.activation_bytes",
    source="derived here",
    label="the-measurement",
    equation=r"\min(m,\; p - r) \cdot \frac{l}{p} \cdot M\Bigl(b,\, \frac{s}{c},\, t\Bigr)",
)
def activation_bytes(
    model: Architecture | str,
    setup: Setup,
    *,
    stage: int = 0,
    schedule: str = "1F1B",
    gather_again: bool = True,
    widths: Widths = PAPER,
) -> float:
    """Activations that a rank keeps of its layers at its fullest, bytes.

    Of pipeline stage `stage`, r: its layers, l/p, times the micro-batches in flight, the k of `pp.most_in_flight` (of
    `schedule`, or with `setup.chunks` what the interleaved one has in flight of each), times M, what a rank of tp
    keeps of a layer for b sequences (`setup.micro_batch`) of s/c tokens, as the `setup.cp` ranks of a ring share them:
    `activations.layer_activations` in the entries of `widths`, and in the place of an MLP `ep.kept_bytes`. dp does not
    occur: it shares sequences, not a sequence. Sequence parallelism divides all of M by t, but for the gathered inputs
    of matrices where they stay (`gather_again` False; `sp.kept_bytes`), and for experts, which get all tokens. Left out
    are embedding, head and loss, and what a backward pass needs while it runs or, if it is split, until the weights
    have had their turn. ``ValueError`` where the model cannot be cut like that.
    """
    model = checked_dense(model, "what a mesh keeps", but_experts=True)
    setup.check(model)
    if setup.recompute_layers is not None:
        raise ValueError(f"recompute_layers must be absent for what a mesh keeps, not {setup.recompute_layers}")
    if whole("stage", stage, 0) >= setup.pp:
        raise ValueError(f"stage must be from 0 to {setup.pp - 1}, not {stage}")
    p, v = setup.pp, setup.chunks
    kept = [
        sum(count * layer_bytes(model, setup, kind, gather_again=gather_again, widths=widths)
            for kind, count in ((False, layers - sparse), (True, sparse)) if count)
        for layers, sparse in zip(setup.pieces(model)[stage], expert_layers(model, p, stage, v), strict=True)
    ]  # fmt: skip
    if v == 1:
        return pp.most_in_flight(schedule, p, setup.num_micro_batches, stage) * kept[0]
    actions = pp.interleaved(p, setup.num_micro_batches, v).actions[stage]
    return pp.most_held(actions, sizes={stage + p * place: size for place, size in enumerate(kept)})


def layer_bytes(
    model: Architecture, setup: Setup, with_experts: bool, *, gather_again: bool = True, widths: Widths = PAPER
) -> float:
    """The M of `activation_bytes`: what a rank keeps of one layer and micro-batch, dense or `with_experts`, bytes.

    Where experts are written out, `activations.layer_activations` counts more: a copy of a token for each, what the
    bend puts out, and the answers.
    """
    tokens, b, t = setup.tokens_of(model), setup.micro_batch, setup.tp
    found = layer_activations(
        model, b, seq=tokens, tp=t, sequence_parallel=setup.sequence_parallel, recompute=setup.recompute,
        attention=setup.attention, dropout=setup.dropout, widths=widths, with_experts=with_experts,
    )  # fmt: skip
    if setup.recompute == "full":
        return found.total
    a_gathered = widths.element * b * tokens * model.hidden * (1 - 1 / t) if setup.sequence_parallel else 0
    kept, gathered = found.total, 0 if gather_again else 2
    if with_experts and model.experts is not None:
        experts, gathered = model.experts, 1 if gather_again else 2
        kept -= sum(size for name, size in found.parts.items() if name in _IN_PLACE)
        kept += ep.kept_bytes(
            b * tokens, model.hidden, experts.hidden, experts.num_experts, experts.top_k, setup.ep, t,
            gated=model.gated, shared_hidden=experts.shared_hidden, imbalance=setup.imbalance,
            element_bytes=widths.element,
        ).total  # fmt: skip
    return kept + gathered * a_gathered
