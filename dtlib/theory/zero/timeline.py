"""The memory of one rank through a step, module by module: what is gathered, kept, reduced and freed, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtlib.theory.breakdown import Breakdown
from dtlib.theory.collectives._valid import amount, rank_of, ranks, whole
from dtlib.theory.collectives.chunks import chunk_elements
from dtlib.theory.memory.recipes import Recipe
from dtlib.theory.memory.recipes import recipe as find_recipe

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
    saved_bytes: Sequence[int] | None = None,
    prefetched: int = 1,
    rank: int = 0,
) -> list[Moment]:
    """Play one step of rank `rank` of N: at rest, forward and backward through every module, and the update.

    `module_params` has the parameters of each module in the order of the forward pass, cut into N parts that differ by
    one element at most (`chunk_bounds`); `saved_bytes` what each keeps for backward (default: nothing). The rules:

    - forward and backward of a module need its weights whole. Stage 3 gathers them, with those of the `prefetched`
      modules that come next, and frees each module after its use, also the last one before it turns round.
    - backward first writes a module's whole gradient, while what it saved is still there; then stages 2 and 3 reduce it
      into a shard and free the rest, while stages 0 and 1 keep it whole.
    - gradients do not exist at rest, the optimizer's states always do.

    ``ValueError`` for N below 1, another stage, an unknown recipe, negative sizes, or lists of different lengths.
    """
    stage, n = checked_stage(stage), ranks(n)
    rank, ahead, per_param = rank_of("rank", rank, n), whole("prefetched", prefetched, 0), find_recipe(recipe).per_param
    sizes = [whole("module_params", size, 0) for size in module_params]
    saved = [0] * len(sizes) if saved_bytes is None else list(saved_bytes)
    if len(saved) != len(sizes):
        raise ValueError(f"saved_bytes must hold one number for each of {len(sizes)} modules, not {len(saved)}")
    for each in saved:
        amount("saved_bytes", each)
    mine = [chunk_elements(size, n, rank) for size in sizes]
    kept_weights, kept_gradients = (mine if stage >= 3 else sizes), (mine if stage >= 2 else sizes)

    def moment(phase: str, module: int, *, activations: float, done: int, whole_modules: Sequence[int]) -> Moment:
        gathered = sum(sizes[i] for i in whole_modules) if stage >= 3 and n > 1 else 0
        backward = phase == "backward" and stage >= 2 and n > 1
        held = Held(
            weights=sum(kept_weights) * per_param.weights,
            gradients=sum(kept_gradients[done:]) * per_param.gradients,
            optimizer=(sum(mine) if stage >= 1 else sum(sizes)) * per_param.optimizer,
            activations=activations,
            gathered_weights=gathered * per_param.weights,
            unsharded_gradients=sizes[module] * per_param.gradients if backward else 0,
        )
        return Moment(phase, module, held)

    last = len(sizes)
    played = [moment("rest", -1, activations=0, done=last, whole_modules=())]
    for i in range(last):
        near = range(i, min(last, i + 1 + ahead))
        played.append(moment("forward", i, activations=sum(saved[: i + 1]), done=last, whole_modules=near))
    for i in reversed(range(last)):
        near = range(max(0, i - ahead), i + 1)
        played.append(moment("backward", i, activations=sum(saved[: i + 1]), done=i, whole_modules=near))
    return [*played, moment("step", -1, activations=0, done=0, whole_modules=())]


def peak(timeline: Sequence[Moment]) -> Moment:
    """The fullest moment of a timeline, the first of equals; ``ValueError`` if it is empty."""
    if not timeline:
        raise ValueError("timeline must hold at least one moment, not none")
    return max(timeline, key=lambda moment: moment.held.total)
