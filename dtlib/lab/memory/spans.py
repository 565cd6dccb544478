"""`lab.memory_spans`: a training step cut where weights are needed and gradients arrive, and what each part holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from .held import memory
from .storages import KindBytes, tensors_in
from .tracker import Tracker

BEGIN, FORWARD, BACKWARD, GRADIENT, STEP, DONE, END = (
    "begin", "forward", "backward", "gradient", "step", " done", "end",
)  # fmt: skip


@dataclass(frozen=True)
class MemorySpan:
    """From one event of a step to the next: what was `held` when it began, and at its `fullest` moment.

    `event` is ``"begin"`` (of the block), ``"forward"``, ``"forward done"``, ``"backward"`` (the first gradient of an
    output arrives) or ``"backward done"`` (those of all inputs are there, if they need any) of the module `name`,
    ``"gradient"`` (it is final) of the parameter `name`, ``"step"`` and ``"step done"`` of the optimizer, or ``"end"``.
    """

    event: str
    name: str
    held: KindBytes
    fullest: KindBytes


class _Spans:
    """Listens to the tracker (see `listener.Listener`), and cuts where it is told to."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.spans = tracker, list[MemorySpan]()
        self._peak, self._waiting = 0, False
        self._open: tuple[str, str, KindBytes] | None = None
        self._fullest = KindBytes()

    def cut(self, event: str, name: str = "") -> None:
        """End a span here, and begin one with this event."""
        held = self.tracker.by_kind()
        if self._waiting:
            self.peak_is(held)
        if self._open is not None:
            self.spans.append(MemorySpan(*self._open, self._fullest))
        self._open = event, name, held
        self._fullest, self._peak = held, held.total

    def grown(self, total: int) -> None:
        if total > self._peak:
            self._peak, self._waiting = total, True

    def is_waiting(self) -> bool:
        return self._waiting

    def peak_is(self, held: KindBytes) -> None:
        self._fullest, self._waiting = held, False

    def event(self, module: str, phase: str) -> None:
        pass

    def was_there(self, kind: str, num_bytes: int) -> None:
        self._peak += num_bytes
        self._fullest = self._fullest.plus(kind, num_bytes)
        self.spans[:] = [
            replace(span, held=span.held.plus(kind, num_bytes), fullest=span.fullest.plus(kind, num_bytes))
            for span in self.spans
        ]
        if self._open is not None:
            event, name, held = self._open
            self._open = event, name, held.plus(kind, num_bytes)


@contextmanager
def memory_spans(module: nn.Module, *held: Any, units: Iterable[str] = ()) -> Iterator[list[MemorySpan]]:
    """Follow this process's tensors through a block, as `memory` does, cut at the events of `module`; see `MemorySpan`.

    `units` are the names of the modules inside `module` whose passes count as events, beside its own (the name is
    ``""``). Events come after what the module's other hooks do: of a module that a wrapper has hooked, a span begins
    when the wrapper is done. Of a plain module it is the work alone: what a step needs besides weights, gradients and
    optimizer. The list is complete when the block ends. ``ValueError`` for a unit that is no part of `module`.
    """
    modules = dict(module.named_modules())
    unknown = [name for name in units if name not in modules]
    if unknown:
        raise ValueError(f"units must be names of modules in module, and {unknown[0]!r} is none")
    with memory(module, *held, detail="marks") as inner, ExitStack() as hooks:
        tracker = inner._tracker
        assert tracker is not None
        spans = _Spans(tracker)
        tracker.listeners.append(spans)
        for handle in _hooks(module, {"": module, **{name: modules[name] for name in units}}, spans.cut):
            hooks.callback(handle.remove)
        for optimizer in (each for each in held if isinstance(each, Optimizer)):
            hooks.callback(optimizer.register_step_pre_hook(lambda *_: spans.cut(STEP)).remove)
            hooks.callback(optimizer.register_step_post_hook(lambda *_: spans.cut(STEP + DONE)).remove)
        spans.cut(BEGIN)
        try:
            yield spans.spans
        finally:
            spans.cut(END)
            spans.cut(END)
            tracker.listeners.remove(spans)


def _hooks(module: nn.Module, units: dict[str, nn.Module], cut: Callable[[str, str], None]) -> Iterator[Any]:
    for name, unit in units.items():
        yield unit.register_forward_pre_hook(lambda *_, name=name: cut(FORWARD, name))
        yield unit.register_forward_hook(_after(name, cut), with_kwargs=True)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(lambda _, name=name: cut(GRADIENT, name))


def _after(name: str, cut: Callable[[str, str], None]) -> Any:
    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        cut(FORWARD + DONE, name)
        told = False

        def arrived(gradient: Tensor) -> None:
            nonlocal told
            if not told:
                told = True
                cut(BACKWARD, name)

        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(arrived)
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, lambda _: cut(BACKWARD + DONE, name))

    return after
