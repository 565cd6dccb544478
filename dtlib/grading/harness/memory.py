"""Harnesses of the chapter on memory: bytes of a number, and training steps whose tensors are counted.

Memory is counted inside, to the byte, where the tensors are: `lab.memory` sees each storage, and ``tracemalloc`` what
Python and numpy hold beside them, so that nothing is put aside where torch does not look.
"""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # the first step of an optimizer loads it, and should find it there
from torch.utils._python_dispatch import TorchDispatchMode

from dtlib import lab
from dtlib.grading.plain import simplify

from .watch import Watch

_EPS = 1e-3  # of Adam: large enough that a gradient near zero, which rounding decides, moves nothing


def encode(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(values, rank, n)``, which returns bytes: ``answer`` has them as an array of uint8.

    ``shortcut`` names torch operations that made a bfloat16 tensor meanwhile; see `Watch` for the rest.
    """
    values, watch, seen = np.array(case["values"]), Watch(), _Bfloat16()
    with watch.watching(), _no_threads(watch), seen:
        returned = function(values, case["rank"], case["n"])
    if isinstance(returned, bytes | bytearray | memoryview):
        returned = np.frombuffer(bytes(returned), np.uint8)
        form = "bytes"
    else:
        form = type(returned).__name__[:80]
    return {"answer": simplify(returned), "form": form, "shortcut": sorted(seen.made), **_told(watch)}


def master_copy(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``step = function(model, make_optimizer)``, then backward and ``step()`` for each of the case's batches.

    ``weights`` are those after each step (after the last alone where the case is ``"large"``), ``gradients`` what
    backward handed to each parameter at each step; ``rest`` and the like as in `_Held`.
    """
    model, batches = network(case), _batches(case)
    gradients = [_room(model) for _ in batches]
    weights = [_room(model) for _ in (batches[-1:] if case["large"] else batches)]
    formats = []
    with _held(model) as held:
        step = function(model, _make_optimizer(case))
        for number, batch in enumerate(batches):
            hooks = [
                parameter.register_hook(_copier(gradients[number][index]))
                for index, parameter in enumerate(model.parameters())
            ]
            loss_fn(model, batch).backward()
            for hook in hooks:
                hook.remove()
            step()
            held.read()
            formats.append(sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()}))
            _copy_all(weights[0 if case["large"] else number], model)
    return {"weights": weights, "gradients": gradients, "formats": formats, **held.told}


def update_in_backward(function: Callable[..., Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """``function(model, make_optimizer)``, then backward, and nothing else, for each of the case's batches.

    ``weights`` are those after the last; ``rest`` and the like as in `_Held`.
    """
    model, batches = network(case), _batches(case)
    weights = _room(model)
    with _held(model) as held:
        function(model, _make_optimizer(case))
        for batch in batches:
            loss_fn(model, batch).backward()
            held.read()
        _copy_all(weights, model)
    return {"weights": weights, **held.told}


def network(case: Mapping[str, Any]) -> torch.nn.Sequential:
    """Tanh layers in fp32 with the case's weights, in its ``"order"``: a number that stands twice is one layer."""
    linears = []
    for number, (weight, bias) in enumerate(case["layers"]):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight))
            linear.bias.copy_(torch.from_numpy(bias))
        linear.requires_grad_(number not in case["frozen"])
        linears.append(linear)
    modules = [module for number in case["order"] for module in (linears[number], torch.nn.Tanh())]
    return torch.nn.Sequential(*modules[:-1])


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean squared error on a batch (inputs, targets); the model computes in the format of its weights."""
    inputs, targets = batch
    outputs = model(inputs.to(next(model.parameters()).dtype))
    return torch.nn.functional.mse_loss(outputs.float(), targets)


class _Held:
    """What is held: ``rest`` has the bytes by kind after each step, ``peak`` the most at one time, the model included.

    ``python_bytes`` is the most that Python and numpy held beside.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.told: dict[str, Any] = {"rest": []}

    def read(self) -> None:
        """Take a reading between two steps."""
        gc.collect()  # what hangs in a cycle is garbage, and nobody's to hold
        self.told["rest"].append(self._memory.now.as_dict())

    def end(self, python_bytes: int, watch: Watch) -> None:
        """Take the last reading."""
        self.told |= {"peak": self._memory.peak, "python_bytes": python_bytes, **_told(watch)}


@contextmanager
def _held(model: torch.nn.Module) -> Iterator[_Held]:
    watch = Watch()
    gc.collect()
    with lab.memory(model, detail="marks") as memory, watch.watching(), _no_threads(watch):
        held = _Held(memory)
        tracemalloc.start(1)
        try:
            yield held
            python_bytes = tracemalloc.get_traced_memory()[1]
            if not tracemalloc.is_tracing():
                watch.escaped.add("tracemalloc.stop")
        finally:
            tracemalloc.stop()
    held.end(python_bytes, watch)


def _make_optimizer(case: Mapping[str, Any]) -> Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]:
    rate, decay = case["learning_rate"], case["weight_decay"]

    def make_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), eps=_EPS, weight_decay=decay)

    return make_optimizer


def _batches(case: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.from_numpy(inputs), torch.from_numpy(targets))
        for inputs, targets in zip(case["inputs"], case["targets"], strict=True)
    ]


def _copier(place: np.ndarray[Any, Any]) -> Callable[[torch.Tensor], None]:
    def copy(gradient: torch.Tensor) -> None:
        _copy_into(place, gradient.detach())

    return copy


def _room(model: torch.nn.Module) -> list[np.ndarray[Any, Any]]:
    """Room for a copy of the weights, made before anything is counted."""
    return [np.empty(tuple(each.shape), np.float32) for each in model.parameters()]


def _copy_all(places: list[np.ndarray[Any, Any]], model: torch.nn.Module) -> None:
    for place, parameter in zip(places, model.parameters(), strict=True):
        _copy_into(place, parameter.detach())


def _copy_into(place: np.ndarray[Any, Any], tensor: torch.Tensor) -> None:
    """Copy without making a tensor, which would be counted."""
    if tensor.dtype is torch.bfloat16:
        place.view(np.uint32)[...] = tensor.view(torch.int16).numpy().view(np.uint16)
        place.view(np.uint32)[...] <<= 16
    else:
        place[...] = tensor.numpy()


class _Bfloat16(TorchDispatchMode):
    """Notes the operations of torch that make a bfloat16 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16:
                self.made.add(str(func).partition(".")[2] or str(func))
        return result


@contextmanager
def _no_threads(watch: Watch) -> Iterator[None]:
    """Note threads that are started: what torch does in them is neither seen nor counted."""
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        watch.escaped.add("another thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", noted):
        yield


def _told(watch: Watch) -> dict[str, Any]:
    return {"library": sorted(watch.called), "escaped": sorted(watch.escaped)}
