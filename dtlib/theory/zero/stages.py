"""Bytes of the model states of one rank: what each stage of ZeRO splits among N ranks.

Stage 0 splits nothing; stage 1 the optimizer's part; stage 2 the gradients too; stage 3 the weights too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dtlib.theory.breakdown import over
from dtlib.theory.collectives.chunks import chunk_elements
from dtlib.theory.formula import formula
from dtlib.theory.memory.recipes import OPTIMIZER_PARTS, ModelStates, Recipe
from dtlib.theory.memory.recipes import recipe as find_recipe
from dtlib.theory.valid import amount, rank_of, ranks, whole

STAGES = (0, 1, 2, 3)
Layout = Literal["even", "rows", "padded_rows"]
_LAYOUTS = ("even", "rows", "padded_rows")


def checked_stage(stage: Any, name: str = "stage") -> int:
    """`stage` as an int, or ``ValueError``, which calls it `name`, unless it is 0, 1, 2 or 3."""
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"{name} must be 0, 1, 2 or 3, not {stage!r}")
    return int(stage)


def split_parts(stage: int) -> tuple[str, ...]:
    """The parts of `ModelStates` that `stage` splits among the ranks; the others are whole on every rank."""
    stage = checked_stage(stage)
    split: tuple[str, ...] = OPTIMIZER_PARTS if stage >= 1 else ()
    return split + ("gradients",) * (stage >= 2) + ("weights",) * (stage >= 3)


@formula(
    "zero.bytes_per_param",
    source="rajbhandari2020zero",
    label="eq-zero-bytes",
    equation=(
        r"\begin{cases} w + g + o & \text{stage } 0 \\ w + g + o/N & \text{stage } 1 \\"
        r" w + (g + o)/N & \text{stage } 2 \\ (w + g + o)/N & \text{stage } 3 \end{cases}"
    ),
)
def bytes_per_param(n: int, stage: int, weights: float = 2, gradients: float = 2, optimizer: float = 12) -> float:
    """Model states of a rank, bytes a parameter.

    Stage 0: w + g + o. Stage 1: w + g + o/N. Stage 2: w + (g + o)/N. Stage 3: (w + g + o)/N. `weights` w, `gradients` g
    and `optimizer` o are the bytes of one parameter; 2, 2 and 12 are those of the 16-byte recipe. ``ValueError`` for N
    below 1, another stage, or negative bytes. Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
    """
    stage, n = checked_stage(stage), ranks(n)
    for name, value in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        amount(name, value)
    w, g = weights / n if stage >= 3 else weights, gradients / n if stage >= 2 else gradients
    return w + g + (optimizer / n if stage >= 1 else optimizer)


@formula(
    "zero.limit_bytes_per_param",
    source="derived here",
    label="eq-zero-bytes",
    equation=(
        r"\lim_{N \to \infty} = \begin{cases} w + g + o & \text{stage } 0 \\ w + g & \text{stage } 1 \\"
        r" w & \text{stage } 2 \\ 0 & \text{stage } 3 \end{cases}"
    ),
    use="A model that does not fit with so many bytes fits on no number of ranks.",
)
def limit_bytes_per_param(stage: int, weights: float = 2, gradients: float = 2, optimizer: float = 12) -> float:
    """Model states of a rank, the bytes a parameter that no number of ranks goes below.

    The limit of `bytes_per_param` for N → ∞: w + g + o, w + g, w, and 0 for stages 0 to 3.
    """
    stage = checked_stage(stage)
    for name, value in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        amount(name, value)
    return (weights + gradients + optimizer, weights + gradients, weights, 0.0)[stage]


def states(num_params: float, n: int, stage: int, recipe: str | Recipe = "16-byte") -> ModelStates:
    """Bytes of the model states of one of N ranks under `recipe`, part by part: the mean over the ranks.

    Parts that `stage` splits are divided by N. Where N does not divide, `states_of_rank` is exact. ``ValueError``
    for N below 1, another stage, an unknown recipe or a negative number of parameters.
    """
    n, split = ranks(n), split_parts(stage)
    full = find_recipe(recipe).states(num_params)
    return ModelStates(**{name: over(value, n) if name in split else value for name, value in full.parts.items()})


@formula(
    "zero.states_of_rank",
    source="derived here",
    label="eq-zero-bytes",
    equation=r"\sum_{\text{whole}} e \sum_j \Psi_j \;+ \sum_{\text{split}} e \sum_j \Psi_j(r)",
)
def states_of_rank(
    shapes: Sequence[Sequence[int]],
    n: int,
    stage: int,
    rank: int,
    recipe: str | Recipe = "16-byte",
    *,
    layout: Layout = "even",
) -> ModelStates:
    """Model states of one rank, bytes, exactly.

    Those of rank `rank` of N, for parameters of these `shapes`: a part that `stage` splits counts the rank's own
    elements Ψⱼ(r) of each parameter j, the others all Ψⱼ, each times the part's bytes e. Each parameter is cut by
    itself, as `shard_elements` says for `layout`; with ``"padded_rows"`` weights and gradients are padded and the
    optimizer's states are not, which is what FSDP2 stores. Tied parameters stand in `shapes` once. Every part but the
    scales of an 8-bit recipe is a whole number of bytes. ``ValueError`` as `states`, and for a rank that is not below
    N.
    """
    per_param, split = find_recipe(recipe).per_param, split_parts(stage)
    full = sum(shard_elements(shape, 1, 0) for shape in shapes)
    mine = sum(shard_elements(shape, n, rank, layout=layout) for shape in shapes)
    optimized = sum(shard_elements(shape, n, rank, layout=_unpadded(layout)) for shape in shapes)

    def kept(name: str) -> int:
        return full if name not in split else optimized if name in OPTIMIZER_PARTS else mine

    return ModelStates(**{name: value * kept(name) for name, value in per_param.parts.items()})


@formula(
    "zero.shard_elements",
    source="derived here",
    label="eq-zero-bytes",
    equation=(
        r"\begin{cases} \lfloor \Psi_j/N \rfloor \text{ or } \lceil \Psi_j/N \rceil & \text{even} \\"
        r" \lceil \text{rows}/N \rceil \cdot \Psi_j/\text{rows} & \text{padded rows} \end{cases}"
    ),
)
def shard_elements(shape: Sequence[int], n: int, rank: int, *, layout: Layout = "even") -> int:
    """Shard of a parameter, elements that a rank keeps.

    Of a parameter of `shape`, rank `rank` of N. ``"even"``: the flat elements cut into N chunks that differ by at most
    one, the longer ones first (`chunk_bounds`), so fewer elements than ranks leave some with none. ``"rows"``: as FSDP2
    cuts, whole rows of the first dimension, ⌈rows/N⌉ for each rank until they run out (``torch.chunk``), so the last
    ranks may keep less or nothing. ``"padded_rows"``: as FSDP2 allocates, ⌈rows/N⌉ rows on every rank. A scalar is one
    row. ``ValueError`` for N below 1, a rank not below it, a negative size, another layout.
    """
    n = ranks(n)
    rank = rank_of("rank", rank, n)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, not {layout!r}")
    sizes = [whole("shape", size, 0) for size in shape]
    rows, per_row = (sizes or [1])[0], 1
    for size in sizes[1:]:
        per_row *= size
    if layout == "even":
        return chunk_elements(rows * per_row, n, rank)
    each = -(-rows // n)
    return (each if layout == "padded_rows" else max(0, min(each, rows - rank * each))) * per_row


def _unpadded(layout: Layout) -> Layout:
    return "rows" if layout == "padded_rows" else layout
