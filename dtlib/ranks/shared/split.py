"""Which slice of a parameter a rank has, and the way from slices to whole tensors and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.theory.collectives import chunk_bounds

from .clipping import clip_grad_norm as clip
from .parts import slice_of

Ranges = tuple[range, ...]


def evenly(name: str, size: int, t: int) -> tuple[Ranges, ...]:
    """For each of `t` ranks one range of `size` indices: the first ``size % t`` have one more than the rest.

    ``ValueError`` that calls the size `name` where some rank would have nothing.
    """
    if size < t:
        raise ValueError(f"{name} must be at least the number of ranks in group, {t}, not {size}")
    bounds = chunk_bounds(size, t)
    return tuple((range(start, stop),) for start, stop in pairwise(bounds))


@dataclass(frozen=True)
class Split:
    """A tensor that is split along `dim`: `ranges` are the indices that each rank has, in its order.

    Indices that several ranks have are copies, which all of them keep alike.
    """

    dim: int
    ranges: tuple[Ranges, ...]

    @property
    def size(self) -> int:
        """The length of the whole tensor along `dim`."""
        return max(each.stop for each in chain(*self.ranges))

    def lengths(self, rank: int) -> list[int]:
        """The lengths of a rank's ranges."""
        return [len(each) for each in self.ranges[rank]]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The slice of `whole` that belongs to `rank`, a copy."""
        return torch.cat([whole.narrow(self.dim, each.start, len(each)) for each in self.ranges[rank]], self.dim)

    def is_copy(self, rank: int) -> list[bool]:
        """Of each range of `rank`: whether an earlier rank has it."""
        earlier = set(chain(*self.ranges[:rank]))
        return [each in earlier for each in self.ranges[rank]]

    def gather(self, part: Tensor, group: Group) -> Tensor:
        """The whole tensor from the parts of all ranks of `group`: an all-gather of slices of equal length."""
        longest = max(sum(self.lengths(rank)) for rank in range(len(self.ranges)))
        shape = [*part.shape[: self.dim], longest, *part.shape[self.dim + 1 :]]
        padded = part.new_zeros(shape)
        padded.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        parts = [torch.empty_like(padded) for _ in self.ranges]
        dist.all_gather(parts, padded, group=group)
        shape[self.dim] = self.size
        whole = part.new_empty(shape)
        for rank, each in enumerate(parts):
            pieces = each.narrow(self.dim, 0, sum(self.lengths(rank))).split(self.lengths(rank), self.dim)
            for place, piece in zip(self.ranges[rank], pieces, strict=True):
                whole.narrow(self.dim, place.start, len(place)).copy_(piece)
        return whole


Cuts = tuple[tuple[Split, Group], ...]
"""How a tensor is split, and among whom: first along one dim, then what a rank has of it along another."""


class SplitModule(nn.Module):
    """A module of whose parameters each rank of `group` has a slice: `splits` says which, by the parameter's name."""

    group: Group
    splits: dict[str, Cuts]

    def take(self, name: str, whole: Tensor | None, split: Split, *, before: Cuts = ()) -> None:
        """Make this rank's part of `whole` the parameter `name`, frozen if that is frozen; None stays None.

        `before` says how it was split already, along another dim.
        """
        if whole is None:
            self.register_parameter(name, None)
            return
        part = split.part(whole.detach(), dist.get_rank(self.group))
        self.register_parameter(name, slice_of(part, self.group, whole.requires_grad))
        self.splits[name] = (*before, (split, self.group))


def splits_of(model: nn.Module) -> dict[str, Cuts]:
    """The split parameters of `model`, by their full names (tied ones under each of them)."""
    return {
        f"{prefix}.{name}".lstrip("."): cuts
        for prefix, module in model.named_modules()
        if isinstance(module, SplitModule)
        for name, cuts in module.splits.items()
    }


@torch.no_grad()
def unsplit(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from the slices that the ranks have, on every rank, as copies.

    `tensors` are shaped like this rank's parameters and under their names: weights, gradients, an optimizer's moments.
    All ranks must call it with the same names. (t−1)/t of the whole is sent and received by each rank.
    """
    splits, whole = splits_of(model), {}
    for name, tensor in tensors.items():
        whole[name] = tensor.detach().clone()
        for split, group in reversed(splits.get(name, ())):
            whole[name] = split.gather(whole[name], group)
    return whole


def split(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of `unsplit`: this rank's slices of whole tensors; nothing is sent.

    ``ValueError`` for a tensor whose size is not the whole one.
    """
    splits, parts = splits_of(model), {}
    for name, tensor in tensors.items():
        parts[name] = tensor
        for how, group in splits.get(name, ()):
            if tensor.dim() <= how.dim or tensor.shape[how.dim] != how.size:
                shape = tuple(tensor.shape)
                raise ValueError(f"{name} must be whole, with {how.size} entries along dim {how.dim}, not {shape}")
            parts[name] = how.part(parts[name], dist.get_rank(group))
    return parts


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, as one process would have it, on every rank; all ranks must call it. See `unsplit`."""
    return unsplit(model, model.state_dict())


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a whole state dict, saved at any number of ranks: each rank takes its slices, nothing is sent.

    ``ValueError`` for a tensor that is not whole, torch's own ``RuntimeError`` for names that are missing.
    """
    model.load_state_dict(split(model, state))


def clip_grad_norm(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False, group: Group = None
) -> Tensor:
    """Scale the gradient of `model`, split over `group`, so that its norm is at most `max_norm`; returns the norm.

    As ``torch.nn.utils.clip_grad_norm_`` in one process: what is split counts on each rank, what all ranks have counts
    once, and so do keys and values that some ranks share. All ranks must call it. Errors as `ranks.shared.clipping`.
    """
    splits, rank = splits_of(model), dist.get_rank(group)
    mine: list[Tensor] = []
    copies: list[Tensor] = []
    everywhere: list[Tensor] = []
    for name, parameter in model.named_parameters():  # tied ones once
        if parameter.grad is None:
            continue
        if name not in splits:
            everywhere.append(parameter.grad)
            continue
        *_, (how, _) = splits[name]
        for piece, is_copy in zip(parameter.grad.split(how.lengths(rank), how.dim), how.is_copy(rank), strict=True):
            (copies if is_copy else mine).append(piece)
    return clip(mine, max_norm, norm_type, error_if_nonfinite, everywhere=everywhere, copies=copies, group=group)
