"""Harnesses of activations: real forward and backward passes, what is kept between them, and how often a layer ran.

Kept is every byte that is still alive when the forward pass is over, whoever holds it: autograd, a closure, a global
name, or numpy. What autograd says that it keeps would miss all but the first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch._dynamo  # the instruments need it; the sandbox's server then has it, and not every case has to wait for it
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dtlib import lab
from dtlib.grading.plain import simplify

from .scale import Scale, weighing
from .watch import Watch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAB = os.path.dirname(lab.__file__) + os.sep
_CHECKPOINT = str(torch.utils.checkpoint.__file__)


class _TorchWatch(Watch):
    """Notes, beside the library's functions, calls of torch's own checkpoint; and with `all_of_torch` any of torch."""

    def __init__(self, *, all_of_torch: bool = False) -> None:
        super().__init__()
        self.torch: set[str] = set()
        self._all = all_of_torch

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        super()._see(frame, event, arg)
        if event == "call":
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file == _CHECKPOINT:
                self.torch.add(f"torch.utils.checkpoint.{name}")
            elif self._all and file.startswith((_TORCH, _LAB)):
                self.torch.add(("torch: " if file.startswith(_TORCH) else "lab: ") + name)
        elif event == "c_call" and self._all:
            home = getattr(arg, "__module__", None) or type(getattr(arg, "__self__", None)).__module__
            if str(home).startswith("torch"):
                self.torch.add(f"torch: {arg.__name__}")

    @property
    def told(self) -> dict[str, list[str]]:
        """What was noted, as plain data."""
        return {**super().told, "torch": sorted(self.torch)[:50]}


def predict(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(*case["arguments"])``, an answer that is to be worked out: calls of torch and of `lab` are told."""
    watch = _TorchWatch(all_of_torch=True)
    with watch.watching():
        returned = function(*case["arguments"])
    return {"answer": simplify(returned), **watch.told}


class _Flops(TorchDispatchMode):
    """Counts operations by torch's own formulas; unlike its FlopCounterMode it attaches nothing to any module."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


class _Pass:
    """A forward and a backward pass under observation: what is held beyond the start, and the operations so far."""

    def __init__(self, scale: Scale, flops: _Flops) -> None:
        self._scale, self._flops = scale, flops
        self._tensor_start = self._heap_start = 0

    def begin(self) -> None:
        """This is the start: what is there now does not count."""
        self._tensor_start, self._heap_start = self._scale.held("start")["total"], tracemalloc.get_traced_memory()[0]

    def held_bytes(self) -> int:
        """Bytes of tensors that are alive and were not at the start."""
        return self._scale.held("now")["total"] - self._tensor_start

    def heap_bytes(self) -> int:
        """Bytes of Python's and numpy's objects that are alive and were not at the start."""
        return tracemalloc.get_traced_memory()[0] - self._heap_start

    def flops(self) -> int:
        """Operations of matrix products since the start."""
        return self._flops.total


@cache
def _warm_up() -> None:
    """Bring what the instruments need, once and before they look: imports under a profiler take many times as long."""
    with lab.memory(detail="marks"), _Flops():
        torch.ones(1, requires_grad=True).sum().backward()


@contextmanager
def _observed(watch: Watch) -> Iterator[_Pass]:
    """Observe a pass, which is to `_Pass.begin` in the block."""
    _warm_up()
    tracemalloc.start()
    try:
        with weighing() as scale, _Flops() as flops, watch.watching():
            yield _Pass(scale, flops)
    finally:
        tracemalloc.stop()


# A checkpoint: `apply(fn, x)` in place of `fn(x)`


class _Layer:
    """A matrix, a tanh, dropout and a matrix: a function of one tensor that counts how often it is called."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.modules = nn.Sequential(
            nn.Linear(case["width"], case["hidden"]),
            nn.Tanh(),
            *([nn.Dropout(case["dropout"])] if case["dropout"] else []),
            nn.Linear(case["hidden"], case["width"]),
        )
        self.num_calls = 0
        self.elsewhere = False
        self._thread = threading.get_ident()

    def __call__(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.elsewhere |= threading.get_ident() != self._thread
        out: Tensor = self.modules(x)
        return out


def checkpoint(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """A step with ``function(fn, x)`` for each layer, beside the same step with ``fn(x)``."""
    _rehearse(function, lambda x: (torch.tanh, x))
    plain, _ = _step(lambda fn, x: fn(x), case, None)
    watch = _TorchWatch()
    with _observed(watch) as observed:
        seen, counts = _step(function, case, observed)
    return {**seen, **counts, "plain": plain, **watch.told}


def _rehearse(function: Callable[..., Any], arguments: Callable[[Tensor], tuple[Any, ...]]) -> None:
    """Have what an answer needs only once in place (an import, say); where it raises, it will raise again."""
    with contextlib.suppress(Exception):
        x = torch.ones(2, requires_grad=True)
        function(*arguments(x * 1)).sum().backward()


def _step(
    apply: Callable[..., Any], case: Mapping[str, Any], observed: _Pass | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step computes, and, where it is `observed`, what it holds and how much it does."""
    torch.manual_seed(case["data"])
    layers = [_Layer(case) for _ in range(case["layers"])]
    functions = [_opaque(layer) for layer in layers]
    tensors = [torch.randn(case["tokens"], case["width"], requires_grad=True)]
    tensors += [parameter for layer in layers for parameter in layer.modules.parameters()]
    upstream = torch.randn(case["tokens"], case["width"])
    counts = {}
    if observed:
        observed.begin()
    y = tensors[0] if case["leaf"] else tensors[0].tanh()
    for function in functions:
        y = apply(function, y) + y
    if observed:
        counts = {"kept_bytes": observed.held_bytes() - y.nbytes, "heap_bytes": observed.heap_bytes()}
        counts["forward"] = {"calls": sum(layer.num_calls for layer in layers), "flops": observed.flops()}
    torch.rand(3)  # what comes after has dice of its own
    loss = (y * upstream).sum()
    loss.backward()
    told = {"output": y.detach().clone(), "gradients": [each.grad for each in tensors]}
    del y, loss
    if observed:
        forward, calls = counts["forward"], sum(layer.num_calls for layer in layers)
        counts["backward"] = {"calls": calls - forward["calls"], "flops": observed.flops() - forward["flops"]}
        counts["elsewhere"] = any(layer.elsewhere for layer in layers)
        results = [told["output"], *(grad for grad in told["gradients"] if grad is not None)]
        counts["left_bytes"] = observed.held_bytes() - sum(each.nbytes for each in results)
    return {**told, "next_dice": torch.rand(4)}, counts  # the last is what the next step would draw


def _opaque(layer: _Layer) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x)


# A gated activation: `function(gate, up)`


def gated(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(gate, up)`` of two tensors that nobody else keeps, forward and backward."""
    gate, up = (torch.from_numpy(case[name]).clone().requires_grad_() for name in ("gate", "up"))
    upstream = torch.from_numpy(case["upstream"])
    _rehearse(function, lambda x: (x, x * 1))
    watch = _TorchWatch()
    with _observed(watch) as observed:
        observed.begin()
        y = _call_gated(function, gate, up, fused=case["fused"])
        kept, heap = observed.held_bytes() - y.nbytes, observed.heap_bytes()
        y.backward(upstream)
        output = y.detach().clone()
        del y
        left = observed.held_bytes() - output.nbytes
        left -= sum(each.grad.nbytes for each in (gate, up) if each.grad is not None)
    return {
        "output": output,
        "gradients": [gate.grad, up.grad],
        "kept_bytes": kept,
        "heap_bytes": heap,
        "left_bytes": left,
        **watch.told,
    }


def _call_gated(function: Callable[..., Any], gate: Tensor, up: Tensor, *, fused: bool) -> Tensor:
    """Hand in copies that only the answer can keep; as halves of one tensor if `fused`."""
    if fused:
        y: Tensor = function(*torch.cat([gate, up], dim=-1).chunk(2, dim=-1))
    else:
        y = function(gate * 1, up * 1)
    return y
