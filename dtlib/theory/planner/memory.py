"""The memory of a plan's fullest rank: what `footprint` counts, and what it leaves to a margin."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dtlib.theory import pp, sp
from dtlib.theory.breakdown import Breakdown
from dtlib.theory.footprint import RankMemory, chunks_in_flight, expert_layers, rank_memory
from dtlib.theory.formula import formula
from dtlib.theory.hardware import Accelerator
from dtlib.theory.memory import Recipe
from dtlib.theory.memory import recipe as as_recipe
from dtlib.theory.models import Architecture, checked_model, model_parameters
from dtlib.theory.timing import FITTED, Constants, Machine, Plan
from dtlib.theory.units import format_bytes

from .regime import outside, regime


@dataclass(frozen=True)
class PlanMemory(Breakdown):
    """Bytes of the fullest rank: model `states`, `activations`, and `logits` with their gradient.

    `gathered` is what is whole for a moment: units of ZeRO, a layer's inputs where tokens are split (less the logits,
    gone by then), gradients that a library adds late. `pipeline_buffers` are a micro-batch's input and gradient, each
    received while another is worked on, `fixed` what the runtime, the communication library and the allocator take, and
    `all_to_all` the copies of tokens that one exchange between experts sends and receives, and
    `fp8_copies` those of weights in 8 bits.
    """

    states: float
    activations: float
    logits: float
    gathered: float
    pipeline_buffers: float
    fixed: float
    all_to_all: float = 0
    fp8_copies: float = 0


SURELY = 3
"""No published run that ran needs by the count so many times its card: what does is too large, whatever the error."""


@dataclass(frozen=True)
class Fit:
    """How a need compares with a card: `needed_bytes` and `usable_bytes`, and the error that is left to `margin_bytes`.

    `free_bytes` is what remains, negative where the plan needs too much. `verdict` is ``"yes"`` where the need plus the
    margin stays below the card, ``"no"`` where the need minus the margin is above it, ``"unsure"`` in between. What is
    `outside` of the runs that the margin was seen on makes it ``"unknown"``, but for ``"no"`` where the states alone,
    `states_bytes` that no library saves, are larger than the card, or the need is `SURELY` times the card.
    """

    needed_bytes: float
    usable_bytes: float
    margin_bytes: float
    states_bytes: float = 0
    outside: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> float:
        """Usable minus needed."""
        return self.usable_bytes - self.needed_bytes

    @property
    def verdict(self) -> str:
        """``"yes"``, ``"no"``, ``"unsure"`` or ``"unknown"``."""
        if max(self.states_bytes, self.needed_bytes / SURELY) > self.usable_bytes:
            return "no"
        if self.outside:
            return "unknown"
        if abs(self.free_bytes) < self.margin_bytes:
            return "unsure"
        return "yes" if self.free_bytes > 0 else "no"

    @property
    def has_room(self) -> bool:
        """Whether the need plus the margin stays below the card."""
        return self.needed_bytes + self.margin_bytes <= self.usable_bytes

    def as_dict(self) -> dict[str, Any]:
        """The bytes and the verdict, by name."""
        return {**asdict(self), "free_bytes": self.free_bytes, "verdict": self.verdict}


@formula(
    "planner.plan_memory",
    source="derived here",
    label="eq-planner-memory",
    equation=r"M_\text{rank} = M_\text{states} + \gamma_a M_\text{activations} + \gamma_z M_\text{logits} "
    r"+ M_\text{gathered} + M_\text{buffers} + R",
)
def plan_memory(model: Architecture | str, plan: Plan, constants: Constants = FITTED) -> PlanMemory:
    """Bytes of the fullest rank, part by part.

    What `footprint` counts for `plan`, times what libraries add. ``ValueError`` where the model is not cut like this.
    """
    model = checked_model(model)
    plan.check(model)
    stages = {0, min(1, plan.pp - 1), plan.pp - 1}  # the first, one without ends, the last
    if model.experts is not None or plan.balance == "cost":  # of those with as many layers the earliest has most
        pieces = plan.pieces(model)
        sparse = [[0]] * plan.pp
        if model.experts is not None:
            sparse = [expert_layers(model, plan.pp, each, plan.chunks) for each in range(plan.pp)]
        kinds = {(*pieces[each], *sparse[each]): each for each in range(plan.pp - 2, 0, -1)}
        stages |= set(kinds.values())
    by_stage = [_of_stage(model, plan, rank_memory(model, plan, stage), stage, constants) for stage in sorted(stages)]
    return max(by_stage, key=lambda memory: memory.total)


def fit(
    memory: PlanMemory,
    machine: Machine,
    constants: Constants = FITTED,
    *,
    plan: Plan | None = None,
    model: Architecture | str | None = None,
) -> Fit:
    """`memory` against a card of `machine`, with a margin for the error of the estimate.

    With `plan` and `model` the margin is that of the plan's `regime`, at least the constants' own, and the verdict is
    ``"unknown"`` for what none of the runs of `regime.SEEN` had, or another card; without, it is the constants', and
    taken at its word. ``ValueError`` for one without the other.
    """
    if (plan is None) != (model is None):
        raise ValueError("plan and model must be given together: what was seen depends on both")
    unseen: tuple[str, ...] = ()
    if plan is not None and model is not None:
        unseen = outside(plan, checked_model(model), machine.accelerator)
    margin = memory.total * (constants.margin if plan is None else margin_of(plan, constants))
    return Fit(memory.total, machine.accelerator.memory_bytes, margin, memory.states, unseen)


def margin_of(plan: Plan, constants: Constants = FITTED) -> float:
    """The margin of a plan's memory: its regime's, at least the constants' own."""
    return max(constants.margin, regime(plan).margin)


@formula(
    "planner.least_cards",
    source="derived here",
    label="thm-planner-least",
    equation=r"N \ge \frac{k\,\Psi}{M/(1+\mu) - R}",
    use="With fewer cards no plan that trains all parameters on them fits, whatever its degrees.",
)
def least_cards(
    model: Architecture | str, accelerator: Accelerator, recipe: str | Recipe = "18-byte", constants: Constants = FITTED
) -> int:
    """Cards below which no plan fits a model, all parameters of which have the states of `recipe` on a card.

    The states of all Ψ parameters, k bytes each, exist at least once, so some card has k Ψ/N of them; beside them it
    has what the runtime takes (R), and a margin μ is left. Activations are not counted, so more may be needed.
    ``ValueError`` where a card has no room beside the runtime.
    """
    psi, per_param = model_parameters(checked_model(model)).total, as_recipe(recipe).bytes_per_param
    room = accelerator.memory_bytes / (1 + constants.margin) - constants.runtime_bytes
    if room <= 0:
        raise ValueError(f"accelerator must have room beside the runtime's {format_bytes(constants.runtime_bytes)}")
    return math.ceil(per_param * psi / room)


def _of_stage(model: Architecture, plan: Plan, found: RankMemory, stage: int, constants: Constants) -> PlanMemory:
    again, kept = _kept_gathered(model, plan, stage)
    factor = constants.activation_factor if plan.pp == 1 else constants.staged_activation_factor
    layers = factor * found.layer_activations
    layers += kept * (factor if plan.pp == 1 else constants.staged_kept_share)
    layers *= more_in_flight(plan, stage)
    logits = constants.logit_factor * (found.logits + found.logits_gradient)
    others = found.activations - found.logits - found.layer_activations
    entries = plan.micro_batch * plan.tokens_of(model) * model.hidden
    split = plan.sequence_parallel and plan.tp > 1
    whole = max(0, 2 * constants.whole_inputs * entries - logits) if split else 0  # when logits are gone
    if plan.sums_late and plan.zero < 2:
        whole += 2 * found.weights / as_recipe(plan.recipe).per_param.weights
    return PlanMemory(
        states=found.states,
        activations=layers + factor * (others + again),
        logits=logits,
        gathered=found.gathered_weights + found.unsharded_gradients + whole,
        pipeline_buffers=2 * 2 * 2 * entries / (plan.tp if split else 1) if plan.pp > 1 else 0,
        fixed=constants.runtime_bytes,
        all_to_all=found.all_to_all,
        fp8_copies=found.fp8_copies,
    )


def more_in_flight(plan: Plan, stage: int) -> float:
    """How many times what `footprint` counts of its layers `stage` keeps: with ZB-H1 each as much as the first."""
    if plan.schedule != "ZB-H1":
        return 1
    held = [pp.most_in_flight(each, plan.pp, plan.micro_batches, stage) for each in ("ZB-H1", "1F1B")]
    return held[0] / held[1]


def _kept_gathered(model: Architecture, plan: Plan, stage: int) -> tuple[float, float]:
    """Bytes of the gathered inputs, where sequence parallelism keeps them, above its own plan: of the layer that is
    computed again, or of all layers in flight."""
    if not (plan.keep_gathered and plan.sequence_parallel):
        return 0, 0
    sizes = (plan.tokens_of(model), plan.micro_batch, model.hidden, model.num_heads, plan.tp)
    more = sp.kept_bytes(*sizes, "keep", core=False) - sp.kept_bytes(*sizes, "again", core=False)
    again = (plan.recompute_layers or model.num_layers) if plan.recompute == "full" else 0
    layers = max(max(0, layers - again) for layers in plan.pieces(model)[stage])
    flying = chunks_in_flight(plan.pp, stage, plan.micro_batches, plan.chunks)
    return more if again and not layers else 0, more * layers * flying
