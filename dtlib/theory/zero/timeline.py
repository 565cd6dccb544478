"""The memory of one rank through a step, module by module: what is gathered, kept, reduced and freed, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.collectives.chunks import chunk_elements
from dtlib.theory.memory.recipes import Recipe
from dtlib.theory.memory.recipes import recipe as find_recipe
from dtlib.theory.valid import amount, rank_of, ranks, whole

from .stages import checked_stage


@dataclass(frozen=True)
class Held(Breakdown):
    """Bytes that a rank holds at one moment: its share of `weights`, `gradients` and `optimizer` states, the
    `activations` kept for backward, and the modules that are whole only now (`gathered_weights`,
    `unsharded_gradients`)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered_weights: float
    unsharded_gradients: float


@dataclass(frozen=True)
class Moment:
    """One moment of a step: `phase` (``"rest"``, ``"forward"``, ``"backward"`` or ``"step"``), the index of its
    `module` (-1 for none), and what is held at its fullest."""

    phase: str
    module: int
    held: Held


def step_timeline(
    module_params: Sequence[int],
    n: int,
    stage: int,
    recipe: str | Recipe = "16-byte",
    *,
    outer_params: int = 0,
    saved_bytes: Sequence[int] | None = None,
    prefetched: int = 1,
    reshard_after_forward: bool = True,
    rank: int = 0,
) -> list[Moment]:
    """Play one step of rank `rank` of N: at rest, forward and backward through every module, and the update.

    `module_params` has the parameters of each module in the order of the forward pass, cut into N parts that differ by
    one element at most (`chunk_bounds`); `outer_params` those of no such module, like embedding and head; `saved_bytes`
    what each module keeps for backward (default: nothing). The rules:

    - forward and backward of a module need its weights whole. Stage 3 gathers them, with those of the `prefetched`
      modules that come next, and frees each module after its use; without `reshard_after_forward` only after its
      backward pass. The outer weights are whole through all of forward and all of backward.
    - backward first writes a module's whole gradient, while what it saved is still there; then stages 2 and 3 reduce it
      into a shard and free the rest, while stages 0 and 1 keep it whole. The outer gradient is complete at the end.
    - gradients do not exist at rest, the optimizer's states always do.

    It is the least that the stage needs: buckets that hold several gradients, buffers of an exchange, and reductions
    still on their way when the next gradient is written come on top. ``ValueError`` for N below 1, another stage, an
    unknown recipe, negative sizes, or lists of different lengths. Derived here.
    """
    stage, n = checked_stage(stage), ranks(n)
    rank, ahead, per_param = rank_of("rank", rank, n), whole("prefetched", prefetched, 0), find_recipe(recipe).per_param
    sizes, outer = [whole("module_params", size, 0) for size in module_params], whole("outer_params", outer_params, 0)
    saved = [0] * len(sizes) if saved_bytes is None else list(saved_bytes)
    if len(saved) != len(sizes):
        raise ValueError(f"saved_bytes must hold one number for each of {len(sizes)} modules, not {len(saved)}")
    for each in saved:
        each = amount("saved_bytes", each)
    last, split = len(sizes), n > 1
    full = [*sizes, outer]  # the outer parameters are the last entry
    mine = [chunk_elements(size, n, rank) for size in full]
    kept_weights, kept_gradients = (mine if stage >= 3 else full), (mine if stage >= 2 else full)

    def moment(phase: str, module: int, activations: float, gradients: Sequence[int], needed: Sequence[int]) -> Moment:
        gathered = sum(full[i] for i in needed) if stage >= 3 and split else 0
        unsharded = full[module] + outer if phase == "backward" and stage >= 2 and split else 0
        held = Held(
            weights=sum(kept_weights) * per_param.weights,
            gradients=sum(kept_gradients[i] for i in gradients) * per_param.gradients,
            optimizer=sum(mine if stage >= 1 else full) * per_param.optimizer,
            activations=activations,
            gathered_weights=gathered * per_param.weights,
            unsharded_gradients=unsharded * per_param.gradients,
        )
        return Moment(phase, module, held)

    early = [] if stage >= 2 and split else [last]  # where the outer gradient is kept whole, it is there from the start
    played = [moment("rest", -1, 0, (), ())]
    for i in range(last):
        first = i if reshard_after_forward else 0
        needed = [*range(first, min(last, i + 1 + ahead)), last]
        played.append(moment("forward", i, sum(saved[: i + 1]), (), needed))
    for i in reversed(range(last)):
        first = max(0, i - ahead) if reshard_after_forward else 0
        gradients = [*range(i, last), *early]
        played.append(moment("backward", i, sum(saved[: i + 1]), gradients, [*range(first, i + 1), last]))
    return [*played, moment("step", -1, 0, range(last + 1), ())]


def peak(timeline: Sequence[Moment]) -> Moment:
    """The fullest moment of a timeline, the first of equals; ``ValueError`` if it is empty."""
    if not timeline:
        raise ValueError("timeline must hold at least one moment, not none")
    return max(timeline, key=lambda moment: moment.held.total)
