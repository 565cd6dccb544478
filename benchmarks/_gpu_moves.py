"""What is bound by memory on one card, and what leaves it: copies, norms, updates, PCIe, also beside products."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks._gpu_clock import Clock, Spread, Work, ratio
from dtlib.ranks.memory import MixedAdamW
from dtlib.ranks.model import RMSNorm

GiB = 2**30


def moved(clock: Clock, num_bytes: float, work: Work, *, rounds: int = 9) -> dict[str, Any]:
    """Seconds, and bytes a second of those that must move: each input read once, each output written once."""
    seconds = clock.spread(work, rounds=rounds)
    return {"bytes": num_bytes, "seconds": seconds, "bytes_per_s": num_bytes / seconds.median}


def device_copy(clock: Clock, num_bytes: int = 4 * GiB) -> dict[str, Any]:
    """A copy inside the card's memory: what is read and what is written count."""
    x = clock.randn(num_bytes // 2)
    y = torch.empty_like(x)
    return moved(clock, 2 * x.nbytes, lambda: y.copy_(x))


def memory_bound(clock: Clock, rows: int = 16384, hidden: int = 8192) -> dict[str, Any]:
    """Norms, a gated activation and a sum, bf16: forward passes in place of which nothing is kept."""
    x, y = clock.randn(rows, hidden), clock.randn(rows, hidden)
    w, course = clock.randn(hidden), RMSNorm(hidden, dtype=torch.bfloat16).to(x.device)
    works: dict[str, tuple[int, Work]] = {
        "layer norm": (2, lambda: F.layer_norm(x, (hidden,), w, w)),
        "RMS norm, fused": (2, lambda: F.rms_norm(x, (hidden,), w)),
        "RMS norm, the course's": (2, lambda: course(x)),
        "residual sum": (3, lambda: x + y),
        "SwiGLU in two operations": (3, lambda: F.silu(x) * y),
        "softmax": (2, lambda: x.softmax(-1)),
    }
    with torch.no_grad():
        return {name: moved(clock, times * x.nbytes, work) for name, (times, work) in works.items()}


def updates(clock: Clock, num_params: int = 2**28) -> dict[str, Any]:
    """A step of AdamW over one long parameter, by the bytes that it must touch.

    fp32: weight, gradient and two moments are read, weight and moments written, 28 bytes a parameter. The 16-byte
    recipe reads a gradient of 2 bytes, reads and writes 12, and writes a weight of 2: also 28.
    """
    found = {}
    for name, make, dtype in (
        ("torch's, fused", partial(torch.optim.AdamW, fused=True), torch.float32),
        ("torch's, by lists", partial(torch.optim.AdamW, foreach=True), torch.float32),
        ("MixedAdamW, 16-byte", partial(MixedAdamW, recipe_name="16-byte"), torch.bfloat16),
        ("MixedAdamW, adam-8bit", partial(MixedAdamW, recipe_name="adam-8bit"), torch.bfloat16),
    ):
        parameter = torch.nn.Parameter(clock.randn(num_params, dtype=dtype))
        parameter.grad = clock.randn(num_params, dtype=dtype)
        optimizer = make([parameter])
        least = 28 if name != "MixedAdamW, adam-8bit" else 2 + 2 * (4 + 1 + 1) + 2
        found[name] = moved(clock, least * num_params, optimizer.step, rounds=5)
        del parameter, optimizer
        clock.free()
    return found


def pinned(clock: Clock, num_bytes: int) -> torch.Tensor:
    """Memory of the host that its card reads and writes by itself."""
    return torch.empty(num_bytes // 2, dtype=torch.bfloat16, pin_memory=clock.on_card)


def host_link(clock: Clock, num_bytes: int = GiB) -> dict[str, Any]:
    """Copies between the card and its host, from pinned memory and from any, each way and both at once."""
    on_card, on_card_too = clock.randn(num_bytes // 2), clock.randn(num_bytes // 2)
    one, two = pinned(clock, num_bytes), pinned(clock, num_bytes)
    usual = torch.ones(num_bytes // 2, dtype=torch.bfloat16)
    aside = Aside(clock)

    def both() -> None:
        with aside:
            one.copy_(on_card, non_blocking=True)
        on_card_too.copy_(two, non_blocking=True)
        aside.wait()

    works = {
        "to the host, pinned": lambda: one.copy_(on_card, non_blocking=True),
        "to the card, pinned": lambda: on_card_too.copy_(two, non_blocking=True),
        "to the host": lambda: usual.copy_(on_card),
        "to the card": lambda: on_card_too.copy_(usual),
        "both ways, pinned": both,
    }
    return {name: moved(clock, num_bytes * (2 if work is both else 1), work, rounds=5) for name, work in works.items()}


class Aside:
    """A stream beside the one that computes; in ``with``, work goes to it, after what was started before."""

    def __init__(self, clock: Clock) -> None:
        self.stream = torch.cuda.Stream() if clock.on_card else None
        self._context: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self._context = torch.cuda.stream(self.stream)
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)

    def wait(self) -> None:
        """The stream that computes goes on once the work aside is done."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def beside_products(clock: Clock, side: int = 8192, num_bytes: int = GiB) -> dict[str, Any]:
    """A copy while products run: alone, together, and how much of the shorter one hides.

    Products are repeated until they take longer than the copy alone.
    """
    x, w, out = clock.randn(side, side), clock.randn(side, side), clock.randn(side, side)
    source, target, host = clock.randn(num_bytes // 2), clock.randn(num_bytes // 2), pinned(clock, num_bytes)
    product = clock.spread(lambda: torch.mm(x, w, out=out), rounds=5).median
    copies: dict[str, Work] = {
        "to the host": lambda: host.copy_(source, non_blocking=True),
        "to the card": lambda: target.copy_(host, non_blocking=True),
        "on the card": lambda: target.copy_(source),
    }
    aside, found = Aside(clock), {}
    for name, copy in copies.items():
        times = min(200, int(1.5 * clock.spread(copy, rounds=3).median / product) + 1)

        def products(times: int = times) -> None:
            for _ in range(times):
                torch.mm(x, w, out=out)

        def together(copy: Work = copy, products: Callable[[], None] = products) -> None:
            with aside:
                copy()
            products()
            aside.wait()

        runs = clock.alternated({"copy": copy, "products": products, "together": together}, rounds=5)
        turns = zip(runs["together"], runs["products"], runs["copy"], strict=True)
        hidden = [1 - (both - run) / alone for both, run, alone in turns]
        found[name] = {"products": times, **{each: Spread.of(seconds) for each, seconds in runs.items()}}
        found[name] |= {"hidden_share": Spread.of(hidden), "slower": ratio(runs["together"], runs["products"])}
    return found


def saves(clock: Clock, num_bytes: int = 4 * GiB, side: int = 8192, products: int = 60) -> dict[str, Any]:
    """What training stands still for while its state goes to the host: in usual memory, in pinned, and aside.

    The stall is what a step of `products` products with the save takes more than one without, by the host's clock.
    """
    x, w, out = clock.randn(side, side), clock.randn(side, side), clock.randn(side, side)
    state, usual, host = clock.randn(num_bytes // 2), torch.ones(num_bytes // 2).bfloat16(), pinned(clock, num_bytes)
    copy, aside = torch.empty_like(state), Aside(clock)

    def step() -> None:
        for _ in range(products):
            torch.mm(x, w, out=out)

    def copied_aside() -> None:  # the state may change at once: a copy of it on the card is what leaves
        copy.copy_(state)
        with aside:
            host.copy_(copy, non_blocking=True)

    before: dict[str, Work] = {
        "no save": lambda: None,
        "usual memory": lambda: usual.copy_(state),
        "pinned memory": lambda: host.copy_(state),
        "aside": copied_aside,
    }
    seconds: dict[str, list[float]] = {name: [] for name in before}
    for _ in range(4):
        for name, save in before.items():
            clock.synchronise()
            start = time.perf_counter()
            save()
            step()
            if clock.on_card:
                torch.cuda.current_stream().synchronize()  # not the copy aside: training goes on
            seconds[name].append(time.perf_counter() - start)
            clock.synchronise()
    stalls = {name: [a - b for a, b in zip(each, seconds["no save"], strict=True)] for name, each in seconds.items()}
    return {"bytes": num_bytes, "step_seconds": Spread.of(seconds["no save"])} | {
        name: {"stall_seconds": Spread.of(each), "slower": ratio(seconds[name], seconds["no save"])}
        for name, each in stalls.items()
        if name != "no save"
    }
