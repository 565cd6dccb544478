"""What n heads do to a pipeline: they stay on the last stage, which gets heavier."""

from __future__ import annotations

from collections.abc import Sequence

from dtlib.theory.formula import formula
from dtlib.theory.models import Architecture, checked_model
from dtlib.theory.pp import best_partition
from dtlib.theory.valid import amount, flag, whole

from .heads import extra_flops_per_token, layer_flops


@formula(
    "mtp.last_stage_layers",
    source="derived here",
    label="eq-mtp-weight",
    equation=r"u = \frac{n\,(f + 2Vh)}{f} \quad\text{or}\quad u = \frac{2Vh + (n-1)(f + 4h^2 + 2Vh)}{f}",
)
def last_stage_layers(
    model: Architecture | str, predicted: int, kind: str = "independent", *, seq: int | None = None, again: bool = False
) -> float:
    """What cannot leave the last stage, counted in layers as the model's last.

    u: ``"independent"`` heads read the trunk side by side, each through a layer of its own, so the first one's, the
    model's last layer, stays with them; ``"sequential"`` modules stand behind the last layer. Forward, backward and
    both alike, unless backward computes each head's product `again`, as `ranks.mtp.cut` does to hold one set of logits:
    2Vh then counts 4/3 of a step's. ``ValueError`` for a `predicted` below 1 or another `kind`.
    """
    model, n = checked_model(model), whole("predicted", predicted, 1)
    further = extra_flops_per_token(model, n, kind, seq=seq)
    head, layer = 2 * model.vocab * model.hidden, layer_flops(model, model.num_layers - 1, seq)
    first = layer if kind == "independent" else 0
    return float(first + further + head + (n * head / 3 if flag("again", again) else 0)) / layer


@formula(
    "mtp.most_stages",
    source="derived here",
    label="thm-mtp-stages",
    equation=r"p^* = 1 + \frac{l_t}{u}",
    use="With more stages the last one has more than an even share even if it has no layer of the trunk.",
)
def most_stages(trunk_layers: float, last_layers: float) -> float:
    """Stages beyond which the last one has more than an even share.

    All work is l_t layers of the trunk (`trunk_layers`; the sum of what each costs, where they differ) and u
    (`last_layers`) that cannot leave the last stage. An even share, (l_t + u)/p, is at least u up to p = 1 + l_t/u. The
    last stage is the slowest of all only if u is above the whole layers of another, too. ``ValueError`` unless u is
    positive.
    """
    return 1 + float(amount("trunk_layers", trunk_layers) / amount("last_layers", last_layers, positive=True))


def trunk_costs(
    model: Architecture | str, predicted: int, kind: str = "independent", *, seq: int | None = None, again: bool = False
) -> list[float]:
    """What a token costs in each layer of the trunk, and at last in all that cannot leave the last stage, in layers as
    the model's last.

    The trunk is what `ranks.mtp.cut` may cut: all layers but the last for ``"independent"`` heads, all for
    ``"sequential"`` modules. Layers with experts and without cost what each costs. ``ValueError`` as
    `last_stage_layers`.
    """
    model, u = checked_model(model), last_stage_layers(model, predicted, kind, seq=seq, again=again)
    unit = layer_flops(model, model.num_layers - 1, seq)
    layers = model.num_layers - (kind == "independent")
    return [*(layer_flops(model, index, seq) / unit for index in range(layers)), u]


def best_stages(costs: Sequence[float], stages: int) -> list[int]:
    """How many layers of the trunk each of `stages` stages gets, so that the slowest is as fast as possible.

    `costs` as `trunk_costs` gives them, the last number for what stays on the last stage, which may be left without a
    layer; `ranks.mtp.cut` takes the counts as they are. Found by `pp.best_partition`, to which the heads are one layer
    more. ``ValueError`` for more stages than `costs`.
    """
    counts = best_partition(costs, stages)
    return [*counts[:-1], counts[-1] - 1]


def stage_costs(costs: Sequence[float], layers: Sequence[int]) -> list[float]:
    """What each stage costs if it has so many `layers` of the trunk, the last one the heads besides: in the unit of
    `costs`, as `trunk_costs` gives them. ``ValueError`` unless `layers` are all of the trunk."""
    counts, each = [whole("layers", one, 0) for one in layers], list(amount("costs", list(costs)))
    if not counts or sum(counts) != len(each) - 1:
        raise ValueError(f"layers must add up to the {len(each) - 1} of the trunk, not {counts}")
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    ends[-1] += 1
    return [float(sum(each[start:end])) for start, end in zip([0, *ends], ends, strict=False)]


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
    for GPipe where one stage is the slowest forward and backward, and for 1F1B where that is the last one. Equal
    stages give (p − 1)/(m + p − 1), and with many micro-batches 1 − mean/max is left: no number of them hides it.
    ``ValueError`` for no stages or costs that are not positive.
    """
    each, m = [float(amount("costs", one, positive=True)) for one in costs], whole("m", m, 1)
    if not each:
        raise ValueError("costs must have a number for each stage, and has none")
    return 1 - m * sum(each) / (len(each) * (sum(each) + (m - 1) * max(each)))
