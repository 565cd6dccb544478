"""What n heads do to a pipeline: they stand behind the last layer, so the last stage gets heavier."""

from __future__ import annotations

from collections.abc import Sequence

from dtlib.theory.formula import formula
from dtlib.theory.memory.flops import forward_flops_per_token
from dtlib.theory.models import Architecture, checked_model
from dtlib.theory.pp import best_partition
from dtlib.theory.valid import amount, whole

from .heads import extra_flops_per_token


@formula(
    "mtp.last_stage_layers",
    source="derived here",
    label="eq-mtp-weight",
    equation=r"u = \frac{2Vh + (n-1)(f_{\text{layer}} + 2Vh)}{f_{\text{layer}}}",
)
def last_stage_layers(
    model: Architecture | str, predicted: int, kind: str = "independent", *, seq: int | None = None
) -> float:
    """What stands behind the last layer, counted in layers.

    u: the operations of the head and of n − 1 further ones over those of a layer; a ``"sequential"`` module has a
    projection, 4h², besides. Forward, backward and both alike. ``ValueError`` for a `predicted` below 1 or another
    `kind`.
    """
    model = checked_model(model)
    forward = forward_flops_per_token(model, seq=seq)
    layer = (forward.total - forward.head) / model.num_layers
    return (forward.head + extra_flops_per_token(model, predicted, kind, seq=seq)) / layer


@formula(
    "mtp.most_stages",
    source="derived here",
    label="thm-mtp-stages",
    equation=r"p^* = 1 + \frac{l}{u}",
    use="With more stages the last one has more than an even share even if it has no layer at all.",
)
def most_stages(num_layers: int, last_layers: float) -> float:
    """Stages beyond which the last one has more than an even share.

    All work is l + u layers, u of which (`last_layers`) cannot leave the last stage. An even share, (l + u)/p, is at
    least u up to p = 1 + l/u. It is the slowest of all only if u is above the whole layers of another, too.
    ``ValueError`` unless u is positive.
    """
    return 1 + whole("num_layers", num_layers, 1) / amount("last_layers", last_layers, positive=True)


def best_stages(num_layers: int, stages: int, last_layers: float) -> list[int]:
    """How many of `num_layers` layers each of `stages` stages gets, so that the slowest is as fast as possible.

    The last stage has the heads besides, `last_layers` layers' worth, and may be left without a layer. Found by
    `pp.best_partition`, to which the heads are one layer more. ``ValueError`` for more stages than layers and one.
    """
    layers = whole("num_layers", num_layers, 1)
    counts = best_partition([1.0] * layers + [float(amount("last_layers", last_layers, positive=True))], stages)
    return [*counts[:-1], counts[-1] - 1]


@formula(
    "mtp.bubble_of_stages",
    source="derived here",
    label="thm-mtp-bubble",
    equation=r"1 - \frac{m \sum_j T_j}{p\,\bigl(\sum_j T_j + (m-1) \max_j T_j\bigr)}",
)
def bubble_of_stages(costs: Sequence[float], m: int) -> float:
    """Idle part of a step whose stages differ.

    `costs` are the seconds that each stage spends on a micro-batch, forward and backward. A step takes ΣT + (m − 1)·max
    T: the first micro-batch passes all stages, and each further one comes behind it by what the slowest takes. Exact
    for GPipe, and for 1F1B where the last stage is the slowest; forward and backward in the same proportion. Equal
    stages give (p − 1)/(m + p − 1), and with many micro-batches 1 − mean/max is left: no number of them hides it.
    ``ValueError`` for no stages or costs that are not positive.
    """
    each, m = [float(amount("costs", one, positive=True)) for one in costs], whole("m", m, 1)
    if not each:
        raise ValueError("costs must have a number for each stage, and has none")
    return 1 - m * sum(each) / (len(each) * (sum(each) + (m - 1) * max(each)))
