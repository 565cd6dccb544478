"""Which module is at work: names for modules that are called, and a word when each one starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from .storages import tensors_in

FORWARD, BACKWARD, RECOMPUTE, DONE = "forward", "backward", "recompute", " done"


NO_BACKWARD = -1


def backward_pass() -> int:
    """The number of the backward pass that this thread is in, or `NO_BACKWARD`."""
    return int(torch._C._current_graph_task_id())


class ModuleWatch:
    """Inside ``with`` it knows which modules are running (`stack`), and tells `on_event` (name, phase, module).

    The names are those of ``named_modules()`` of the outermost module that is called, which itself goes by the name of
    its class. The phases are ``"forward"``, ``"forward done"``, ``"backward"`` when the gradient of an output
    arrives, ``"backward done"`` when those of all inputs are there (never for a module whose inputs need none), and
    ``"recompute"`` for a forward inside a backward pass. ``"call"`` comes first, for each module, whatever `events`.
    """

    def __init__(self, on_event: Callable[[str, str, nn.Module], None], *, events: bool = True) -> None:
        self.on_event, self.events = on_event, events
        self.stack: list[str] = []
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._exits = ExitStack()

    def name(self, root: nn.Module) -> None:
        """Name `root` and the modules in it that have no name yet."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(root).__name__)

    def __enter__(self) -> ModuleWatch:
        self.watch(hooks.register_module_forward_pre_hook(self._before))
        self.watch(hooks.register_module_forward_hook(self._after, always_call=True))
        return self

    def watch(self, handle: RemovableHandle) -> None:
        """Remove the hook behind `handle` at the end."""
        self._exits.callback(handle.remove)

    def __exit__(self, *exc: object) -> None:
        self.events = False  # hooks on tensors may outlive the block
        self._exits.close()

    def _before(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            self.name(module)
        name = self._names[module]
        self.stack.append(name)
        self.on_event(name, "call", module)
        if not self.events:
            return
        self.on_event(name, _direction(), module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.stack.pop()
        if not self.events:
            return
        self.on_event(name, _direction() + DONE, module)
        if torch.is_grad_enabled():
            self._tell_when_all(name, module, [t for t in tensors_in(args) if t.requires_grad])
            self._tell_when_any(name, module, [t for t in tensors_in(output) if t.requires_grad])

    def _tell_when_all(self, name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        missing = len(tensors)

        def arrived(grad: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0 and self.events:
                self.on_event(name, BACKWARD + DONE, module)

        for tensor in tensors:
            tensor.register_hook(arrived)

    def _tell_when_any(self, name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        told = False

        def arrived(grads: Any) -> None:
            nonlocal told
            if not told and self.events:
                told = True
                self.on_event(name, BACKWARD, module)

        for tensor in tensors:
            if tensor.grad_fn is not None:  # a node's hooks come after a tensor's: the consumer is done first
                tensor.grad_fn.register_prehook(arrived)


def _direction() -> str:
    return FORWARD if backward_pass() == NO_BACKWARD else RECOMPUTE
