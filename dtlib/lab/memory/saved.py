"""`lab.saved_bytes`: exactly what autograd keeps for the backward pass, tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from dtlib.lab.html import table_html
from dtlib.theory.units import format_bytes

from .held import is_recording
from .modules import ModuleWatch
from .storages import keepable, storages, tensors_in

ACTIVATION, INPUT, PARAMETER = "activation", "input", "parameter"


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd keeps: its size, the first tensor in it that was kept, and who kept it.

    `kind` is ``"parameter"`` for weights, ``"input"`` for a tensor among the arguments, else ``"activation"``. `module`
    and `op` are who kept it first (``"mlp.up"``, ``"linear"``; empty outside of a module), `others` who kept it
    again, at no cost.
    """

    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    module: str
    op: str
    others: tuple[str, ...] = ()

    @property
    def by(self) -> str:
        """Module and operation, such as ``"mlp.up linear"``."""
        return f"{self.module} {self.op}".strip()


@dataclass(frozen=True, repr=False)
class Saved:
    """What autograd kept of one call, in the order in which it was kept; each storage once."""

    tensors: tuple[SavedTensor, ...]
    inputs_count: bool = True

    @property
    def total(self) -> int:
        """Bytes that exist because of this call: all but the parameters (and the inputs, if these do not count)."""
        return self.activation_bytes + (self.input_bytes if self.inputs_count else 0)

    @property
    def activation_bytes(self) -> int:
        """Bytes of what the call computed."""
        return self._sum(ACTIVATION)

    @property
    def input_bytes(self) -> int:
        """Bytes of the arguments that are kept."""
        return self._sum(INPUT)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that are kept; they are there anyway."""
        return self._sum(PARAMETER)

    @property
    def table(self) -> str:
        """A line a storage: bytes, shape, type, kind and who keeps it; then the total."""
        return "\n".join(f"{size:>14}  {shape:<28} {kind:<10} {by}" for size, shape, kind, by in self._rows())

    def _sum(self, kind: str) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors if tensor.kind == kind)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        yield "bytes", "shape and type", "kind", "kept by"
        for tensor in self.tensors:
            shape = f"{tensor.shape} {tensor.dtype}"
            yield f"{tensor.num_bytes:,}", shape, tensor.kind, ", ".join((tensor.by, *tensor.others))
        without = "but the parameters" if self.inputs_count else "but parameters and inputs"
        yield f"{self.total:,}", f"({format_bytes(self.total)})", "all", without

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return table_html(head, rows)


def saved_bytes(fn: Callable[..., Any], *args: Any, inputs: bool = True) -> Saved:
    """Call ``fn(*args)`` and count what autograd keeps of it for the backward pass, to the byte.

    Counted is what is still kept when `fn` has returned and its result is held: storages, each once, at their full
    size (a saved view keeps all of its storage alive). A module may be `fn`. A checkpoint (torch.utils.checkpoint)
    keeps its inputs. Parameters, weights that lead a graph, are listed but never in the total; tensors among `args`
    are in it unless `inputs` is False. What a custom function keeps outside of ``save_for_backward`` is not seen.

    Raises ``TypeError`` if `fn` cannot be called, and ``RuntimeError`` inside a block of `lab.memory`, where both
    would want autograd's only hook.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    if is_recording():
        raise RuntimeError(
            "lab.saved_bytes inside a block of lab.memory: autograd tells only one of them what it keeps"
        )
    recorder = _Recorder(args)
    if isinstance(fn, nn.Module):
        recorder.watch.name(fn)
        for module in fn.modules():
            recorder.learn_params(module)
    with recorder.watch, recorder.ops, saved_tensors_hooks(recorder.pack, lambda kept: kept.tensor):
        result = fn(*args)
    saved = recorder.read()
    del result  # until here it held the graph
    return Saved(saved, inputs)


class _Kept:
    """A tensor in autograd's keeping."""

    __slots__ = ("__weakref__", "module", "op", "tensor")

    def __init__(self, tensor: Tensor, module: str, op: str) -> None:
        self.tensor, self.module, self.op = keepable(tensor), module, op


class _Ops(TorchFunctionMode):
    """Knows which function of torch is running."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.stack.append(getattr(func, "__name__", type(func).__name__))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.stack.pop()


class _Recorder:
    """Remembers who kept what, without keeping it longer."""

    def __init__(self, args: Any) -> None:
        self.ops = _Ops()
        self.watch = ModuleWatch(lambda name, phase, module: self.learn_params(module), events=False)
        self.kept: list[weakref.ref[_Kept]] = []
        self.inputs = {storage._cdata for tensor in tensors_in(args) for storage in storages(tensor)}
        self.params: set[int] = set()

    def learn_params(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                self.params.update(storage._cdata for storage in storages(parameter))

    def pack(self, tensor: Tensor) -> _Kept:
        module = self.watch.stack[-1] if self.watch.stack else ""
        kept = _Kept(tensor, module, self.ops.stack[-1] if self.ops.stack else "autograd.Function")
        self.kept.append(weakref.ref(kept))
        return kept

    def read(self) -> tuple[SavedTensor, ...]:
        found: dict[int, tuple[SavedTensor, list[str]]] = {}
        for kept in (each for each in (ref() for ref in self.kept) if each is not None):
            for storage in storages(kept.tensor):
                entry = self._entry(kept, storage)
                if storage._cdata in found:
                    found[storage._cdata][1].append(entry.by)
                else:
                    found[storage._cdata] = entry, []
        return tuple(_with_others(entry, others) for entry, others in found.values())

    def _entry(self, kept: _Kept, storage: torch.UntypedStorage) -> SavedTensor:
        tensor, kind = kept.tensor, ACTIVATION
        if storage._cdata in self.inputs:
            kind = INPUT
        elif storage._cdata in self.params or (tensor.is_leaf and tensor.requires_grad):
            kind = PARAMETER
        dtype = str(tensor.dtype).removeprefix("torch.")
        return SavedTensor(storage.nbytes(), tuple(tensor.shape), dtype, kind, kept.module, kept.op)


def _with_others(entry: SavedTensor, others: list[str]) -> SavedTensor:
    names = tuple(dict.fromkeys(name for name in others if name != entry.by))
    return SavedTensor(entry.num_bytes, entry.shape, entry.dtype, entry.kind, entry.module, entry.op, names)
