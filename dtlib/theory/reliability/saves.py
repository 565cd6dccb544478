"""Bytes of a save, who writes them, and how long that takes."""

from __future__ import annotations

import math
from dataclasses import replace

from dtlib.theory.formula import formula
from dtlib.theory.memory.recipes import ModelStates, Recipe
from dtlib.theory.memory.recipes import recipe as find_recipe
from dtlib.theory.valid import number, rank_of, ranks, whole
from dtlib.theory.zero.stages import split_parts


@formula("reliability.save_bytes", source="derived here", label="eq-reliability-bytes", equation=r"(w + o)\,\Psi")
def save_bytes(num_params: float, recipe: str | Recipe = "16-byte", *, weights: bool = True) -> float:
    """Bytes of a save of Ψ parameters: weights and what the optimizer keeps, but no gradients, in any copy.

    They are of the step and made anew. With a master copy the 16-bit `weights` may be left out: rounding gives them
    again. Random states, sampler and scheduler take kilobytes.
    """
    kept = _kept(num_params, recipe)
    if not weights and not kept.master_weights:
        raise ValueError(f"weights must be True for a recipe without a master copy, as {find_recipe(recipe).name} is")
    return kept.total - (0 if weights else kept.weights)


def rank_save_bytes(num_params: float, n: int, stage: int, rank: int, recipe: str | Recipe = "16-byte") -> float:
    """Bytes of `save_bytes` that one of N ranks writes at a ZeRO `stage`, if nothing is written twice.

    What the stage splits each rank writes its N-th of; what it does not, all have, and rank 0 writes.
    """
    mine, n, split = rank_of("rank", rank, ranks(n)), ranks(n), split_parts(stage)
    parts = _kept(num_params, recipe).parts
    return sum(value / n if name in split else value * (mine == 0) for name, value in parts.items())


@formula(
    "reliability.save_seconds",
    source="derived here",
    label="eq-reliability-seconds",
    equation=r"\frac{D}{\min(n r,\, S)} + n f",
)
def save_seconds(bytes: float, writers: int, writer_rate: float, storage_rate: float, file_seconds: float = 0) -> float:
    """Seconds that n `writers` take for D `bytes`, each at most r bytes a second, the storage S in all.

    Each opens a file of its own, and one after another waits f seconds (`file_seconds`) for that.
    """
    n, each = whole("writers", writers, 1), number("writer_rate", writer_rate, positive=True)
    rate = min(n * each, number("storage_rate", storage_rate, positive=True))
    return number("bytes", bytes) / rate + n * number("file_seconds", file_seconds)


@formula(
    "reliability.best_writers",
    source="derived here",
    label="eq-reliability-writers",
    equation=r"\min\!\left(\frac Sr,\, \sqrt{\frac{D}{r f}}\right)",
    use="With fewer writers the storage waits for them, with more they wait for it or for their files.",
)
def best_writers(bytes: float, writer_rate: float, storage_rate: float, most: int, file_seconds: float = 0) -> int:
    """The fewest writers, up to `most`, with which `save_seconds` is least.

    Up to S/r all of them write at their own rate, D/(nr) + nf, least at n² = D/(rf); beyond, more files are all that
    changes. One of the whole numbers beside either.
    """
    limit, files = whole("most", most, 1), number("file_seconds", file_seconds)
    near = number("storage_rate", storage_rate, positive=True) / number("writer_rate", writer_rate, positive=True)
    if files:
        near = min(near, math.sqrt(number("bytes", bytes) / (writer_rate * files)))
    around = {min(limit, max(1, each)) for each in (math.floor(near), math.ceil(near))}
    return min(around, key=lambda n: (save_seconds(bytes, n, writer_rate, storage_rate, files), n))


def _kept(num_params: float, recipe: str | Recipe) -> ModelStates:
    return replace(find_recipe(recipe).states(num_params), gradients=0, main_gradients=0)
