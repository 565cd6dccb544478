"""The engine of `lab.memory`: it sees every storage come, change its use, and go."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed  # its operations
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from .listener import Listener
from .modules import DONE, NO_BACKWARD, ModuleWatch, backward_pass
from .patches import patched
from .storages import MEMORY_KINDS, KindBytes, Owners, keepable, quick_key, storages, tensors_in

_BIRTHS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)  # torch.tensor(...) hands its result in


class _Storage:
    """One storage: its size, how often autograd keeps it, and the backward pass in which a checkpoint recomputed it."""

    __slots__ = ("num_bytes", "recomputed_in", "ref", "saved")

    def __init__(self, num_bytes: int, ref: weakref.ref[Any]) -> None:
        self.num_bytes, self.ref, self.saved, self.recomputed_in = num_bytes, ref, 0, NO_BACKWARD

    def kind(self, now_in: int) -> str:
        """What it is for if it has no owner, in the backward pass `now_in`."""
        return "activations" if self.saved or self.recomputed_in == now_in != NO_BACKWARD else "temporary"


class _Kept:
    """A tensor in autograd's keeping. When autograd lets go of it, so does this."""

    __slots__ = ("keys", "tensor", "tracker")

    def __init__(self, tensor: Tensor, tracker: Tracker) -> None:
        self.tracker = tracker
        self.tensor, self.keys = tracker.keep(tensor)

    def __del__(self) -> None:
        self.tracker.release(self.keys)


class Tracker(TorchDispatchMode):
    """Sees every operation of this thread (and of its backward passes) between `start` and `stop`.

    Bytes come with an operation's results and go when the storage is freed or resized, so `total` is always exact.
    Their kinds are looked up when somebody asks: a storage is a gradient as long as some ``.grad`` points to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.owners = Owners()
        self.listeners: list[Listener] = []
        self.watch = ModuleWatch(self._module_event)
        self._table: dict[int, _Storage] = {}
        self._changes = 0
        self._gradients: set[int] = set()  # the keys of those known when somebody looked last
        self._thread = threading.get_ident()
        self._freed_elsewhere: deque[int] = deque()  # by a communication library's thread: seen with the next operation
        self._exits = ExitStack()
        self._fake_mode: Any = None
        self._looking = True

    def start(self) -> None:
        """Begin to look."""
        self._fake_mode = active_fake_mode()
        if self._fake_mode is not None:
            importlib.import_module("torch.distributed._tools.fake_collectives")  # collectives that know only shapes
            self._overlook_shapes_of_dtensors()
        enter = self._exits.enter_context
        self._exits.callback(self._table.clear)
        enter(self.watch)
        self.watch.watch(module_hooks.register_module_parameter_registration_hook(self._built))
        self.watch.watch(module_hooks.register_module_buffer_registration_hook(self._built))
        self.watch.watch(register_optimizer_step_pre_hook(lambda opt, args, kwargs: self._step(opt, "step")))
        self.watch.watch(register_optimizer_step_post_hook(lambda opt, args, kwargs: self._step(opt, "step" + DONE)))
        enter(patched(Optimizer, "add_param_group", before=self.owners.add))  # it is being built
        enter(patched(torch.UntypedStorage, "resize_", after=self._sized))
        enter(mock.patch.object(torch.Tensor, "grad", self._grad_that_tells()))
        enter(saved_tensors_hooks(partial(_Kept, tracker=self), lambda kept: kept.tensor))
        enter(patched(saved_tensors_hooks, "__enter__", before=self._note))
        enter(self)

    def _grad_that_tells(self) -> property:
        """``.grad`` of a tensor, which tells before it is set: once it dies, nobody may look at it any more."""
        descriptor = torch._C.TensorBase.grad

        def set_grad(tensor: Tensor, value: Tensor | None) -> None:
            if threading.get_ident() == self._thread:
                self._settle()
            descriptor.__set__(tensor, value)

        def delete_grad(tensor: Tensor) -> None:
            set_grad(tensor, None)

        return property(descriptor.__get__, set_grad, delete_grad)

    def stop(self) -> None:
        """Look no more."""
        self._exits.close()

    def _overlook_shapes_of_dtensors(self) -> None:
        """To learn the shape of a result, DTensor computes with fake tensors of the full size: nobody holds those."""
        propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
        name = "_propagate_tensor_meta_non_cached"
        if hasattr(propagator, name):
            compute = getattr(propagator, name)

            def overlooked(*args: Any) -> Any:
                with self._overlooking():
                    return compute(*args)

            self._exits.enter_context(mock.patch.object(propagator, name, overlooked))

    @contextmanager
    def _overlooking(self) -> Iterator[None]:
        before, self._looking = self._looking, False
        try:
            yield
        finally:
            self._looking = before

    def by_kind(self, *, gradients: bool = True) -> KindBytes:
        """All bytes of now, by kind. Without `gradients` no ``.grad`` is touched: they are those of the last time."""
        self._catch_up()
        while True:
            changes, kinds, table = self._changes, dict[int, str](), self._table
            if not gradients:
                kinds.update(dict.fromkeys(self._gradients, "gradients"))
            for tensor, kind in self.owners.claims(gradients=gradients):
                key = quick_key(tensor)
                if key in table:
                    kinds.setdefault(key, kind)
                    continue
                for storage in storages(tensor):
                    self._learn(storage)
                    kinds.setdefault(storage._cdata, kind)
            held, now_in = dict.fromkeys(MEMORY_KINDS, 0), backward_pass()
            for key, entry in list(table.items()):
                held[kinds.get(key) or entry.kind(now_in)] += entry.num_bytes
            if changes == self._changes:  # else Python has collected garbage meanwhile
                self._gradients = {key for key, kind in kinds.items() if kind == "gradients"}
                return KindBytes(**held)

    def hold(self, owner: nn.Module | Optimizer | Tensor) -> None:
        """Count what `owner` has: it was there from the start."""
        if isinstance(owner, nn.Module):
            self.watch.name(owner)
            new = [self.owners.add(module) for module in owner.modules()]
            if any(new):
                self._were_there()
        elif isinstance(owner, Optimizer):
            if self.owners.add(owner):
                self._were_there()
        else:
            for storage in storages(owner):
                if storage._cdata not in self._table:
                    self._tell_was_there("temporary", storage)
            if owner.is_leaf and owner.grad is not None:
                self.hold(owner.grad)

    def _were_there(self) -> None:
        self._catch_up()
        for tensor, kind in self.owners.claims():
            for storage in storages(tensor):
                if storage._cdata not in self._table:
                    self._tell_was_there(kind, storage)

    def _tell_was_there(self, kind: str, storage: torch.UntypedStorage) -> None:
        self._add(storage, tell=False)
        for listener in self.listeners:
            listener.was_there(kind, storage.nbytes())

    # Storages that come, grow, shrink and go

    def _learn(self, storage: torch.UntypedStorage) -> None:
        self._catch_up()  # first, as a new storage may have the place of an old one
        if storage._cdata in self._table:
            self._sized(storage)
        else:
            self._add(storage)

    def _add(self, storage: torch.UntypedStorage, *, tell: bool = True) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._table[key] = _Storage(num_bytes, weakref.ref(storage, lambda _: self._freed(key)))
        self._changed(num_bytes, tell=tell)

    def _sized(self, storage: torch.UntypedStorage) -> None:
        entry = self._table.get(storage._cdata)
        if entry is not None and entry.num_bytes != storage.nbytes():
            change = storage.nbytes() - entry.num_bytes
            if change < 0:
                self._settle()
            entry.num_bytes += change
            self._changed(change)

    def _freed(self, key: int) -> None:
        if threading.get_ident() != self._thread:
            self._freed_elsewhere.append(key)
        else:
            self._gone(key)

    def _catch_up(self) -> None:
        while self._freed_elsewhere:
            self._gone(self._freed_elsewhere.popleft())

    def _gone(self, key: int) -> None:
        if key in self._table:
            # A gradient that torch is taking apart just now still hangs on its parameter: who looks at it there, dies.
            self._settle(gradients=key not in self._gradients)
            self._changed(-self._table.pop(key).num_bytes)

    def _changed(self, num_bytes: int, *, tell: bool = True) -> None:
        self._changes += 1
        self.total += num_bytes
        if num_bytes > 0 and tell:
            for listener in self.listeners:
                listener.grown(self.total)

    def _settle(self, *, gradients: bool = True) -> None:
        """Before the composition changes for good: whoever has seen a peak learns what it was made of."""
        if any(listener.is_waiting() for listener in self.listeners):
            held = self.by_kind(gradients=gradients)
            for listener in self.listeners:
                if listener.is_waiting():
                    listener.peak_is(held)

    # What autograd keeps

    def keep(self, tensor: Tensor) -> tuple[Tensor, list[int]]:
        """Autograd keeps `tensor`: what to keep for it, and the keys of its storages."""
        keys = []
        for storage in storages(tensor):
            self._learn(storage)
            self._table[storage._cdata].saved += 1
            keys.append(storage._cdata)
        with self._overlooking():
            return keepable(tensor), keys

    def release(self, keys: Iterable[int]) -> None:
        """Autograd keeps a tensor no longer."""
        if self._table:
            self._settle()
            for key in keys:
                if key in self._table:
                    self._table[key].saved -= 1

    def _note(self, hooks: Any) -> None:
        """Other hooks on saved tensors come before ours: a checkpoint's, which keep what they recompute."""
        pack = hooks.pack_hook

        def note_and_pack(tensor: Tensor) -> Any:
            for storage in storages(tensor):
                self._learn(storage)
                self._table[storage._cdata].recomputed_in = backward_pass()
            return pack(tensor)

        hooks.pack_hook = note_and_pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what comes out of it."""
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # a DTensor becomes operations on its local part, which come by here
        kwargs = kwargs or {}
        self._thread = threading.get_ident()  # a backward pass on a GPU has a thread of its own
        if not self._looking or active_fake_mode() is not self._fake_mode:  # DTensor works out a shape
            return func(*args, **kwargs)
        if func not in _BIRTHS:
            self._look((args, kwargs))
        if func is torch.ops._c10d_functional.wait_tensor.default and self._fake_mode is not None:
            result = args[0]  # as in a real run; the fake one would make another tensor
        else:
            result = func(*args, **kwargs)
        self._look(result)
        if any(True for _ in tensors_in(result)):
            name = func.name().split("::")[-1].split(".")[0]
            self._tell(self.watch.stack[-1] if self.watch.stack else "", f"op {name}")
        return result

    def _look(self, tree: Any) -> None:
        for tensor in tensors_in(tree):
            for storage in storages(tensor):
                self._learn(storage)

    def _built(self, module: nn.Module, name: str, tensor: Any) -> None:
        self.owners.add(module)

    def _step(self, optimizer: Optimizer, phase: str) -> None:
        self.hold(optimizer)
        self._tell(type(optimizer).__name__, phase)

    def _module_event(self, name: str, phase: str, module: nn.Module) -> None:
        if phase == "call":
            if self.owners.add(module):
                self._were_there()
        else:
            self._tell(name, phase)

    def _tell(self, name: str, phase: str) -> None:
        for listener in self.listeners:
            listener.event(name, phase)
