"""PowerSGD: a gradient's matrix as the product of two thin ones, which add up over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dtlib.theory.formula import formula
from dtlib.theory.valid import whole

from .vectors import Array, finite, unit

Shape = Sequence[int]


def matrix_shape(shape: Shape) -> tuple[int, int] | None:
    """Rows and columns of a parameter as a matrix: (out, the rest), so (out, in · kh · kw) for a convolution.

    None for vectors and scalars, which travel as they are.
    """
    try:
        sizes = [whole("shape", size, 0) for size in shape]
    except TypeError:
        raise ValueError(f"shape must be a sequence of sizes, not {shape!r}") from None
    return None if len(sizes) < 2 else (sizes[0], math.prod(sizes[1:]))


def _sent(shape: Shape, rank: int) -> int:
    as_matrix = matrix_shape(shape)
    if as_matrix is None:
        return math.prod(shape)
    return min(rank * sum(as_matrix), math.prod(as_matrix))


@formula(
    "compression.low_rank_elements",
    source="vogels2019",
    label="eq-compression-low-rank",
    equation=r"\sum_\text{matrices} \min\bigl(r\,(n + m),\, n m\bigr) + \sum_\text{vectors} n",
)
def low_rank_elements(shapes: Iterable[Shape], rank: int) -> int:
    """PowerSGD, elements that a step sums over the ranks, for parameters of these `shapes`.

    A matrix of n × m is two factors, P of n × r and Q of m × r; where they are no smaller than the matrix it travels
    whole, as vectors and scalars do. Of more than two dimensions, the first are the rows. Source: Vogels et al. 2019,
    arXiv 1905.13727, section 3.
    """
    rank = whole("rank", rank, 1)
    if not isinstance(shapes, Iterable):
        raise ValueError(f"shapes must be a list of shapes, not {shapes!r}")
    return sum(_sent(shape, rank) for shape in shapes)


@formula(
    "compression.low_rank_ratio",
    source="vogels2019",
    label="eq-compression-low-rank",
    equation=r"\frac{\text{elements}}{\text{elements at rank } r}",
)
def low_rank_ratio(shapes: Iterable[Shape], rank: int) -> float:
    """PowerSGD, how many times fewer elements a step sums than all parameters have.

    243 for ResNet-18 on CIFAR at rank 1; what limits it are vectors, which stay, and narrow matrices. 1 for no
    parameters.
    """
    every = [tuple(shape) for shape in shapes]
    kept = low_rank_elements(every, rank)
    return sum(math.prod(shape) for shape in every) / kept if kept else 1.0


@formula(
    "compression.low_rank_contraction",
    source="derived here",
    label="thm-compression-low-rank",
    equation=r"\delta = \min\left(1, \frac{r}{\min(n, m)}\right)",
)
def low_rank_contraction(rows: int, columns: int, rank: int) -> float:
    """Rank r of a matrix of n × m, the contraction that any matrix has at least.

    Of the best approximation; and of one step of PowerSGD in the mean over a normal Q, drawn anew. Met by equal
    singular values. One step from a Q that was not drawn for this matrix (a warm start) guarantees nothing: it may be
    orthogonal to all rows.
    """
    size = min(whole("rows", rows, 1), whole("columns", columns, 1))
    return min(1.0, whole("rank", rank, 1) / size)


@formula(
    "compression.best_low_rank_error",
    source="eckart1936",
    label="thm-compression-low-rank",
    equation=r"\sum_{i > r} \sigma_i^2 \Big/ \sum_i \sigma_i^2",
)
def best_low_rank_error(singular_values: Any, rank: int) -> float:
    """Rank r, the least error of any approximation: ‖M − C(M)‖² over ‖M‖², in Frobenius' norm.

    The largest r of `singular_values`, in any order, are kept. 0 for a matrix of zeros. Source: Eckart and Young 1936.
    """
    values = finite("singular_values", singular_values)
    if (values < 0).any():
        raise ValueError("singular_values must be zero or more")
    squares = np.sort(unit(values)[0] ** 2)[::-1]
    lost = math.fsum(squares[whole("rank", rank, 1) :])
    return lost / math.fsum(squares) if lost else 0.0


def power_sgd(matrix: Any, q: Any) -> tuple[Array, Array]:
    """One step of PowerSGD from `q`, of m × r: P with orthonormal columns, and the new Q; P Qᵀ stands for `matrix`.

    P = orth(M q), Q = Mᵀ P. P Qᵀ = P Pᵀ M projects, so the error is never above 1. The new Q is the next step's start:
    with a matrix that stays, steps are power iterations towards the best rank r. Each rank computes P from the *sum* of
    all M q, so that all have the same.
    """
    matrix_nm, q_mr = finite("matrix", matrix, 2), finite("q", q, 2)
    if q_mr.shape[0] != matrix_nm.shape[1] or not 1 <= q_mr.shape[1] <= min(matrix_nm.shape):
        raise ValueError(
            f"q must have a row for each of the {matrix_nm.shape[1]} columns of matrix, and 1 to "
            f"{min(matrix_nm.shape)} columns, not the shape {q_mr.shape}"
        )
    p_nr = np.linalg.qr(unit(matrix_nm)[0] @ unit(q_mr)[0]).Q
    return p_nr, matrix_nm.T @ p_nr


def resnet18_cifar_shapes() -> list[tuple[int, ...]]:
    """The parameters of ResNet-18 for CIFAR-10: 11,173,962 in 62 tensors, norms with a weight and a bias.

    A 3 × 3 convolution of the image, four stages of two blocks of two convolutions, 64 to 512 wide, with a 1 × 1
    convolution where the width changes, and a classifier of ten.
    """
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, into: int, kernel: int) -> None:
        shapes.extend([(out, into, kernel, kernel), (out,), (out,)])  # and its norm

    convolution(64, 3, 3)
    into = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            convolution(width, into, 3)
            convolution(width, width, 3)
            if into != width:
                convolution(width, into, 1)
            into = width
    return [*shapes, (10, 512), (10,)]
