"""The trained parameters of a module as one row of numbers, which is what travels here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.replicas import refuse_own


def trained(model: nn.Module, group: Group) -> dict[str, nn.Parameter]:
    """The parameters of `model` that require a gradient, by name, tied ones once. ``ValueError`` where there is none,
    where they have several dtypes, as one message has one, or where ranks of `group` have different ones."""
    refuse_own(model, group)
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
def in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor that is the memory of all of them: they are moved there once, and found there afterwards, so that
    what is done to it costs no copy. They stay the objects that they are."""
    start, storage = tensors[0].data_ptr(), tensors[0].untyped_storage()
    for each in tensors:
        if (
            each.data_ptr() != start
            or not each.is_contiguous()
            or each.untyped_storage().data_ptr() != storage.data_ptr()
        ):
            break
        start += each.numel() * each.element_size()
    else:
        place = tensors[0].storage_offset(), (sum(each.numel() for each in tensors),)
        return tensors[0].new_empty(0).set_(storage, *place)  # type: ignore[call-overload]
    flat = joined(tensors)
    for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        each.data = part.view(each.shape)
    return flat


@torch.no_grad()
def spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of `flat` into `tensors`, in place."""
    for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        each.data.copy_(part.view(each.shape))
