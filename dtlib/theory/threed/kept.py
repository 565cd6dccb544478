"""What a rank of a mesh keeps of its layers between forward and backward."""

from __future__ import annotations

from dtlib.theory import pp, sp
from dtlib.theory.activations import PAPER, Widths, layer_activations
from dtlib.theory.footprint import Setup
from dtlib.theory.formula import formula
from dtlib.theory.models import Architecture, checked_dense
from dtlib.theory.valid import whole


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

    Of pipeline stage `stage`, r: its layers, l/p in equal pieces, times the micro-batches in flight, the k of
    `pp.most_in_flight` (of `schedule`, or of the interleaved one where there are `setup.chunks`), times M, what a
    rank of tp keeps of a layer for b sequences (`setup.micro_batch`) of s/c tokens, as the `setup.cp` ranks of a
    ring share them: `activations.layer_activations` in the entries of `widths`. dp does not occur: it shares
    sequences, not a sequence. Sequence parallelism divides all of M by t, but for the gathered inputs of matrices
    where they stay (`gather_again` False; `sp.kept_bytes`). Left out are embedding, head and loss, and what a
    backward pass needs while it runs or, if it is split, until the weights have had their turn. ``ValueError``
    where the model cannot be cut like that.
    """
    model = checked_dense(model, "what a mesh keeps")
    setup.check(model)
    tokens, b, t = setup.tokens_of(model), setup.micro_batch, setup.tp
    a_layer = layer_activations(
        model, b, seq=tokens, tp=t, sequence_parallel=setup.sequence_parallel, recompute=setup.recompute,
        attention=setup.attention, dropout=setup.dropout, widths=widths,
    ).total  # fmt: skip
    if setup.sequence_parallel and not gather_again and setup.recompute != "full":
        sizes = tokens, b, model.hidden, model.num_heads, t
        a_layer += (sp.kept_bytes(*sizes, "keep") - sp.kept_bytes(*sizes, "again")) * widths.element / 2
    if whole("stage", stage, 0) >= setup.pp:
        raise ValueError(f"stage must be from 0 to {setup.pp - 1}, not {stage}")
    layers = sum(setup.pieces(model)[stage])
    name = "interleaved" if setup.chunks > 1 else schedule
    return pp.most_in_flight(name, setup.pp, setup.num_micro_batches, stage, setup.chunks) * layers * a_layer
