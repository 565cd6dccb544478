"""The bytes behind tensors: which storages exist, how large they are, and what each of them is for.

A storage is the block of memory behind a tensor. Views, transposes and tied parameters share one, so counting storages
counts every byte once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_PLAIN = (Tensor, nn.Parameter)
_LEAVES = frozenset({int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


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


def quick_key(tensor: Tensor) -> int:
    """The key of the one storage of a common tensor, fast; 0 for others, which `storages` takes apart."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    try:
        return int(local.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def keepable(tensor: Tensor) -> Tensor:
    """What a hook on saved tensors may keep for `tensor`: not a result itself, whose graph would then never be freed.

    A leaf is kept as it is, so that its data can be exchanged until the backward pass.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        yield tree
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from tensors_in(item)
    elif type(tree) is dict:
        for item in tree.values():
            yield from tensors_in(item)
    elif tree is not None and type(tree) not in _LEAVES:
        yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class Owners:
    """The modules and optimizers that are known, and so what their tensors are for. It keeps none of them alive."""

    def __init__(self) -> None:
        self._modules = _WeakSet[nn.Module]()
        self._optimizers = _WeakSet[torch.optim.Optimizer]()
        self._params = _WeakSet[Tensor]()
        self._labels = {kind: _WeakSet[Tensor]() for kind in MEMORY_KINDS}

    def add(self, owner: nn.Module | torch.optim.Optimizer) -> bool:
        """Learn of a module or an optimizer; whether it is new."""
        return self._modules.add(owner) if isinstance(owner, nn.Module) else self._optimizers.add(owner)

    def label(self, kind: str, tensor: Tensor) -> None:
        """Count `tensor` as `kind` from now on, whatever else it may be."""
        for labelled in self._labels.values():
            labelled.discard(tensor)
        self._labels[kind].add(tensor)

    def claims(self, *, gradients: bool = True) -> Iterator[tuple[Tensor, str]]:
        """Every tensor whose kind follows from its owner, and the kind; the first claim on a storage holds.

        Without `gradients` no ``.grad`` is touched.
        """
        labelled = [(tensor, kind) for kind, tensors in self._labels.items() for tensor in tensors]
        yield from labelled
        modules, optimizers = list(self._modules), list(self._optimizers)
        for module in modules:
            if hasattr(type(module), "tensors_by_kind"):
                yield from module.tensors_by_kind()
        # Parameters are remembered: FSDP2 takes the gathered ones out of a module after use, and puts them back.
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._params.add(parameter)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._params.add(parameter)
        params = list(self._params)
        for parameter in params:
            yield parameter, "parameters"
        for parameter in (*params, *(tensor for tensor, _ in labelled)) if gradients else ():
            if parameter.is_leaf and parameter.grad is not None:
                yield parameter.grad, "gradients"
        for optimizer in optimizers:
            for state in list(optimizer.state.values()):
                for tensor in tensors_in(state):
                    yield tensor, "optimizer"
        for module in modules:
            for tensor in module._buffers.values():
                if tensor is not None:
                    yield tensor, "buffers"


T = TypeVar("T")


class _WeakSet(Generic[T]):
    """A set by identity that keeps nothing alive; iterating costs little."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> bool:
        """Add `item`; whether it is new."""
        key = id(item)
        if key in self._refs:
            return False
        self._refs[key] = weakref.ref(item, lambda ref: self._refs.pop(key, None))
        return True

    def discard(self, item: T) -> None:
        """Remove `item` if it is there."""
        self._refs.pop(id(item), None)

    def __iter__(self) -> Iterator[T]:
        for ref in list(self._refs.values()):
            item = ref()
            if item is not None:
                if isinstance(item, Tensor):
                    item._fix_weakref()  # as torch.utils.weak does
                yield item
