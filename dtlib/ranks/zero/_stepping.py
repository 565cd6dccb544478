"""What the optimizer is given of the flat buffers, and what is taken from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ._flat import Flat


def groups_of_pieces(
    groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor], flats: Sequence[Flat]
) -> list[dict[str, Any]]:
    """Parameter groups with this rank's pieces in the place of `params`: often fewer, in the same order."""
    weights: dict[int, list[nn.Parameter]] = {id(parameter): [] for parameter in params}
    for flat in flats:
        for piece in flat.pieces:
            weights[id(params[piece.index])].append(piece.weight)
    return [{**each, "params": [weight for p in each["params"] for weight in weights[id(p)]]} for each in groups]


def hand_out_gradients(flats: Sequence[Flat]) -> None:
    """Let the pieces' ``.grad`` point at the mean, unless they are of another dtype: those wait for the step."""
    for flat in flats:
        for piece in flat.pieces:
            rests = flat.grad is None or flat.master is not None or piece.index in flat.resting
            piece.weight.grad = None if rests else piece.of(flat.grad)


def widen_gradients(flats: Sequence[Flat]) -> None:
    """Give master copies their gradients, in their own dtype and for the step alone."""
    for flat in flats:
        if flat.master is not None and flat.grad is not None:
            for piece in flat.pieces:
                if piece.index not in flat.resting:
                    piece.weight.grad = piece.of(flat.grad).to(flat.master.dtype)


def round_weights(flats: Sequence[Flat]) -> None:
    """Round master copies to the weights' dtype, and free their gradients."""
    for flat in flats:
        if flat.master is not None:
            flat.take_master()
            for piece in flat.pieces:
                piece.weight.grad = None
