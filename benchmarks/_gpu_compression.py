"""What it takes to send less, without the sending: the exchanges of the course on one card.

`compression` runs unchanged; its collectives are replaced by copies inside the card, as if all ranks had the same
gradient and the links cost nothing. What is left is what a rank computes to compress its gradient and to restore that
of all. Passes are the times that the gradient would have been copied (read and written) meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._gpu_clock import Clock
from benchmarks._report import console
from dtlib import theory
from dtlib.ranks import compression
from dtlib.ranks.dp import Bucket

LAYER = {**{f"attention.{name}": (4096, 4096) for name in "qkvo"}, "gate": (11008, 4096), "up": (11008, 4096),
         "down": (4096, 11008)}  # fmt: skip
"""The matrices of a layer of Llama 2 7B, whose gradient the chapter sends."""
SCHEMES: dict[str, Callable[[], compression.Compressed]] = {
    "float16": lambda: compression.Cast(torch.float16),
    "int8": compression.Int8,
    "QSGD, 7 levels": lambda: compression.QSGD(7),
    "sign": compression.Sign,
    "largest 1 %": lambda: compression.TopK(0.01),
    "PowerSGD, rank 4": lambda: compression.PowerSGD(4),
}


class _Done:
    def wait(self) -> None:
        """All is there."""


@contextmanager
def among(ranks: int) -> Iterator[list[float]]:
    """Collectives of so many ranks that all have what this one has: copies, and no sums; the list has the bytes that a
    rank would have sent in each."""
    sent: list[float] = []

    def all_gather(rows: Sequence[Tensor], payload: Tensor, **options: Any) -> _Done:
        for each in rows:
            each.copy_(payload)
        sent.append((ranks - 1) * payload.nbytes)
        return _Done()

    def all_to_all(arrived: Tensor, leaving: Tensor, **options: Any) -> _Done:
        arrived.copy_(leaving)
        sent.append((ranks - 1) / ranks * leaving.nbytes)
        return _Done()

    def all_reduce(tensor: Tensor, **options: Any) -> _Done:
        sent.append(2 * (ranks - 1) / ranks * tensor.nbytes)
        return _Done()

    with mock.patch.multiple(
        dist, get_world_size=lambda group=None: ranks, get_rank=lambda group=None: 0, all_gather=all_gather,
        all_to_all_single=all_to_all, all_reduce=all_reduce,
    ):  # fmt: skip
        yield sent


def bucket(clock: Clock, matrices: dict[str, tuple[int, int]], dtype: torch.dtype) -> Bucket:
    """Random gradients of the matrices in one bucket."""
    sizes = [rows * columns for rows, columns in matrices.values()]
    flat = clock.randn(sum(sizes), dtype=dtype)
    parts = zip(matrices.items(), flat.split(sizes), strict=True)
    return Bucket(flat, {name: part.view(shape) for (name, shape), part in parts})


def exchanges(
    clock: Clock, bytes_per_s: float, matrices: dict[str, tuple[int, int]] = LAYER, ranks: Sequence[int] = (2, 8)
) -> list[dict[str, Any]]:
    """Each scheme, by dtype and number of ranks: seconds, bytes of gradient a second, passes over it,
    and the rate of a link below which it beats a dense ring if nothing hides."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, make in SCHEMES.items():
            if name == "float16" and dtype is torch.bfloat16:
                continue  # as many bytes
            for n in ranks:
                scheme, of = make(), bucket(clock, matrices, dtype)
                gradient = of.flat.clone()

                def work(scheme: compression.Compressed = scheme, of: Bucket = of) -> None:
                    started = scheme(of, None)
                    assert started is not None
                    started.wait()

                with among(n) as sent:
                    work()
                    sent_bytes = sum(sent)
                    again = partial(of.flat.copy_, gradient)
                    seconds = clock.spread(work, rounds=4, warm_up=1, before=again)
                num_bytes = of.flat.nbytes
                dense = theory.compression.all_reduced_bytes(num_bytes, n)
                found.append({"scheme": name, "dtype": str(dtype).removeprefix("torch."), "ranks": n})
                found[-1] |= {"bytes": num_bytes, "seconds": seconds, "bytes_per_s": num_bytes / seconds.median}
                found[-1] |= {"passes": seconds.median * bytes_per_s / (2 * num_bytes), "sent_bytes": sent_bytes}
                found[-1]["pays_below"] = theory.compression.break_even_bandwidth(dense, sent_bytes, seconds.median)
                del scheme, of, gradient, again
                clock.free()
    return found


def kernels(clock: Clock, bytes_per_s: float, num: int = 2**28, block: int = 256) -> dict[str, Any]:
    """The parts that take long, alone, on a gradient of so many fp32 entries; int8 also as one compiled kernel."""
    x, side = clock.randn(num, dtype=torch.float32), int(num**0.5) // 2 * 2
    square, q = x[: side * side].view(side, side), clock.randn(side, 4, dtype=torch.float32)

    def int8(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.view(-1, block)
        scales = blocks.abs().amax(dim=1)
        return scales, (blocks * (127 / scales.clamp_min(1e-30))[:, None]).round().to(torch.int8)

    works: dict[str, Callable[[], Any]] = {
        "cast to float16": lambda: x.to(torch.float16),
        "int8, operation by operation": lambda: int8(x),
        "places of the largest 1 %": lambda: x.abs().topk(num // 100, sorted=False).indices,
        "one product of PowerSGD": lambda: square @ q,
        "orthonormal columns of (n, 4)": lambda: torch.linalg.qr(q),
        "a random number an entry": lambda: torch.rand(num, device=x.device),
    }
    found: dict[str, Any] = {}
    if clock.on_card:
        compiled = torch.compile(int8)
        try:
            compiled(x)
            works["int8, compiled into one"] = lambda: compiled(x)
        except Exception as error:  # a compiler may be missing
            console.print(f"not compiled: {type(error).__name__}: {error}"[:500], markup=False)
    for name, work in works.items():
        seconds = clock.spread(work, rounds=5)
        found[name] = {"seconds": seconds, "bytes_per_s": x.nbytes / seconds.median}
        found[name]["passes"] = seconds.median * bytes_per_s / (2 * x.nbytes)
    return found
