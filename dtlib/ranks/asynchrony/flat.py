"""The trained parameters of a module as one row of numbers, which is what travels here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` that require a gradient, by name, tied ones once. ``ValueError`` where there is none,
    or where they have several dtypes: one message has one."""
    found = {name: each for name, each in model.named_parameters() if each.requires_grad}
    kinds = {str(each.dtype).removeprefix("torch.") for each in found.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"model must have trained parameters of one dtype, not {' and '.join(sorted(kinds)) or 'none'}"
        )
    return found


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of `model` that are no whole numbers, by name: running means of a norm, say."""
    return {name: each for name, each in model.named_buffers() if each.is_floating_point()}


def described(tensors: Mapping[str, Tensor]) -> str:
    """What must be alike on all ranks."""
    return ", ".join(f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors.items())


@torch.no_grad()
def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All of them end to end, copied."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


@torch.no_grad()
def spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of `flat` into `tensors`, in place."""
    for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        each.data.copy_(part.view(each.shape))
