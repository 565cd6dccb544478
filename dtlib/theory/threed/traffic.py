"""Bytes that a rank sends along each axis, in a step."""

from __future__ import annotations

from dataclasses import dataclass

from dtlib.theory import ep, sp, tp, zero
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.cp import ring_elements
from dtlib.theory.footprint import Setup, expert_layers, stage_parameters
from dtlib.theory.formula import formula
from dtlib.theory.models import Architecture, checked_dense, kv_width_of_rank
from dtlib.theory.valid import amount, flag

_INDEX_BYTES = 8
_SCORE_BYTES = 4
"""A router's weights travel in float32 at least, and what counts or points in int64."""


@dataclass(frozen=True)
class AxisBytes(Breakdown):
    """Bytes that one rank sends in a step: among the ranks that split matrices (`tp`) or attention's tokens (`cp`), to
    the stages in front and behind (`pp`), among those that share a batch, cp's among them (`dp`), and tokens to those
    of dp that share experts (`ep`)."""

    tp: float = 0
    cp: float = 0
    pp: float = 0
    dp: float = 0
    ep: float = 0


@formula(
    "threed.sent_bytes",
    source="derived here",
    equation=(
        r"\begin{aligned} \text{tp: } & 8\,\tfrac{t-1}{t}\,m\,\tfrac{l}{p}\,T h w &"
        r"\text{cp: } & 6\,\tfrac{c-1}{c}\,m\,\tfrac{l}{p}\,\tfrac{b s g d}{t}\,w \\"
        r" \text{pp: } & 2\,m\,T h w & \text{dp: } & 2\,\tfrac{N-1}{N}\,\tfrac{\Psi}{p\,t}\,w \\"
        r" \text{ep: } & 4\,\tfrac{q-1}{q}\,m\,\tfrac{l}{p}\,T V h w \end{aligned}"
    ),
)
def sent_bytes(
    model: Architecture | str,
    setup: Setup,
    *,
    stage: int = 0,
    element_bytes: float = 2,
    gather_again: bool = False,
) -> AxisBytes:
    """Bytes that a rank sends in a step, by axis.

    Of a rank of pipeline stage `stage`, where `setup.cp` ranks share each sequence and `setup.dp` groups of them
    the batch. The equation is that of an inner stage under ZeRO 0; the first and the last stage also add up
    embedding, loss and the head's gradient over tp, and exchange the gradient of a tied embedding; with
    `setup.sequence_parallel` a message between stages is cut into t, and norms, positions and biases behind a sum
    have their gradients summed over tp once a micro-batch; with `gather_again` the gathered inputs are not kept,
    and gathered once more (`activation_bytes` takes the same word). Under ZeRO 2 and 3 each micro-batch reduces,
    under 3 it gathers twice. Where the states are split among `setup.shard` ranks alone, these send so, and each
    reduction is followed by an all-reduce of a rank's shard with those that hold the same one.

    What `setup.recompute` repeats, layer by layer, sends again what its forward pass sent: a full one 2 of tp's
    all-reduces a layer, and it and a selective one cp's ring of keys and values. (A schedule that splits backward
    passes repeats whole stages, and sends the sums of embedding and loss again, which are not counted here.) ZeRO 3
    gathers no third time: a layer is computed again when its backward pass has gathered it. All numbers travel in
    `element_bytes`. ``ValueError`` where the model cannot be cut like that.

    Experts lie on q = `setup.ep` ranks of dp. Each layer with experts sends what `ep.step_bytes` counts with a copy a
    rank, under uniform routing to V ranks a token; beside it go, for each choice, the row (8 bytes), its weight and the
    weight's gradient (4 bytes at least), and to each rank how many rows and visits are to come (8 bytes each). A full
    recompute sends all of a forward pass again. Their gradients are summed over N/q ranks, all others over N. tp splits
    the width of each expert, and sends what it sends for an MLP, and the gradients of the weights of T·k choices; each
    of its ranks sends whole tokens over ep. What experts get is never gathered again.
    """
    model = checked_dense(model, "the traffic of a mesh", but_experts=True)
    setup.check(model)
    if setup.recompute_layers is not None:
        raise ValueError(f"recompute_layers must be absent for the traffic of a mesh, not {setup.recompute_layers}")
    w, c = amount("element_bytes", element_bytes, positive=True), setup.cp
    b, s, h, t, p, m = setup.micro_batch, setup.seq_of(model), model.hidden, setup.tp, setup.pp, setup.num_micro_batches
    first, last, v = stage == 0, stage == p - 1, setup.chunks
    pieces = setup.pieces(model)
    mine = stage_parameters(model, t, p, stage, v, setup.ep, pieces=pieces)
    l, sparse = sum(pieces[stage]), sum(expert_layers(model, p, stage, v))

    outside = tp.outside_elements(b, s // c, h)
    again = flag("gather_again", gather_again) and setup.sequence_parallel
    plan = "again" if again else "keep" if setup.sequence_parallel else "none"
    reduced = (l * sp.phases(plan, recompute=setup.recompute) - sparse * again) / 2 * b * (s // c) * h
    if model.experts is not None:
        reduced += sparse * b * (s // c) * model.experts.top_k * max(w, _SCORE_BYTES) / w
    reduced += first * outside.embedding + last * (outside.head * (3 if again else 2) / 2 + outside.loss)
    if setup.sequence_parallel:
        reduced += mine.norms + mine.positions + ((2 * l - sparse) * h if model.biases else 0)
    kv_heads = kv_width_of_rank(model, t) // model.head_dim
    cuts = (v - last) + (v - first) if p > 1 else 0
    boundary = m * cuts * b * s // c * h / (t if setup.sequence_parallel else 1)
    tied = mine.head if last else mine.embedding if first else 0
    held = ((mine.total - mine.experts, setup.shards), (mine.experts, setup.expert_copies))
    summed, copies = 0.0, setup.size("dp", "cp") // setup.shards
    for params, n in held:
        once = zero.traffic(params * w, n, setup.zero)
        across = zero.traffic(params * w / n, copies, 0).total
        repeated = (once.reduce_scatter + across) * (setup.zero > 1) + once.gather_forward + once.gather_backward
        summed += once.total + across + (m - 1) * repeated
    return AxisBytes(
        tp=2 * (t - 1) / t * m * reduced * w,
        cp=m * l * ring_elements(b, s, kv_heads, model.head_dim, c, recompute=setup.recompute) * w,
        pp=(boundary + (tied if model.tied and p > 1 else 0)) * w,
        dp=summed,
        ep=m * sparse * _exchanged(model, setup, w),
    )


def _exchanged(model: Architecture, setup: Setup, w: float) -> float:
    """Bytes that a rank sends to those of ep for one layer with experts and one micro-batch."""
    experts, n, again = model.experts, setup.ep, setup.recompute == "full"
    if experts is None or n == 1:
        return 0
    weight, count = max(w, _SCORE_BYTES), (n - 1) * (1 + experts.num_experts // n) * _INDEX_BYTES
    found = ep.step_bytes(
        setup.micro_batch * setup.tokens_of(model), model.hidden, experts.num_experts, experts.top_k, n,
        dispatch_bytes_per_element=w, combine_bytes_per_element=w,
        visit_bytes=(1 + again) * (_INDEX_BYTES + weight) + weight,
    )  # fmt: skip
    return found.total + again * (found.dispatch_forward + found.combine_forward) + (1 + again) * count
