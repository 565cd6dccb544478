"""The bytes behind tensors: which storages exist, how large they are, and what each of them is for.

A storage is the block of memory behind a tensor. Views, transposes and tied parameters share one, so counting storages
counts every byte once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class KindBytes:
    """Bytes of tensors by what they are for; a storage counts once, under the first of these that fits.

    - `parameters`: weights of modules, and what an optimizer steps;
    - `gradients`: what ``.grad`` of a parameter points to;
    - `optimizer`: the state of optimizers;
    - `buffers`: a module's buffers, such as the running statistics of a batch norm;
    - `activations`: kept by autograd for the backward pass;
    - `temporary`: all else, such as inputs, results, and what an operation hands to the next.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Kind to bytes, in the order of `MEMORY_KINDS`."""
        return asdict(self)

    def plus(self, kind: str, num_bytes: int) -> KindBytes:
        """The same with `num_bytes` more of `kind`."""
        return replace(self, **{kind: getattr(self, kind) + num_bytes})


MEMORY_KINDS = tuple(field.name for field in fields(KindBytes))


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind `tensor`: one, or those of its parts for a sharded, sparse or otherwise composed tensor.

    A tensor on the meta device has none: it has a shape and no memory.
    """
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from storages(part)
    elif tensor.layout is torch.strided:
        if tensor.device.type != "meta":
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor of vmap or grad, which has none
                yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        for part in (tensor._indices(), tensor._values()):
            yield from storages(part)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from storages(part)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield from storages(part)


def keepable(tensor: Tensor) -> Tensor:
    """What a hook on saved tensors may keep for `tensor`: not a result itself, whose graph would then never be freed.

    A leaf is kept as it is, so that its data can be exchanged until the backward pass.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf


class Owners:
    """The modules and optimizers that are known, and so what their tensors are for. It keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._params: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._labels: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, owner: nn.Module | torch.optim.Optimizer) -> bool:
        """Learn of a module or an optimizer; whether it is new."""
        known = self._modules if isinstance(owner, nn.Module) else self._optimizers
        if owner in known:
            return False
        known[owner] = None
        return True

    def label(self, kind: str, tensor: Tensor) -> None:
        """Count `tensor` as `kind` from now on, whatever else it may be."""
        self._labels[tensor] = kind

    def claims(self) -> Iterator[tuple[Tensor, str]]:
        """Every tensor whose kind follows from its owner, and the kind; the first claim on a storage holds."""
        for tensor, kind in list(self._labels.items()):
            yield tensor, kind
        # Parameters are remembered: FSDP2 takes the gathered ones out of a module after use, and puts them back.
        modules = list(self._modules)
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._params[parameter] = None
        optimizers = list(self._optimizers)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._params[parameter] = None
        params = list(self._params)
        for parameter in params:
            yield parameter, "parameters"
        for parameter in (*params, *self._labels):
            if parameter.is_leaf and parameter.grad is not None:
                yield parameter.grad, "gradients"
        for optimizer in optimizers:
            for tensor in tensors_in(list(optimizer.state.values())):
                yield tensor, "optimizer"
        for module in modules:
            for tensor in module._buffers.values():
                if tensor is not None:
                    yield tensor, "buffers"
