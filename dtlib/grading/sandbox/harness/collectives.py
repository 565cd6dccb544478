"""Harnesses of the collectives: each rank gets a tensor, calls the learner's function, and says what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtlib.grading.exercises.plain import pack, unpack

from .desk import Desk


def on_values(function: Callable[..., Any], desk: Desk, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """``function(tensor, ...)``: what the rank then holds in its tensor, and what was returned.

    Like any caller it then changes the tensor: what has not left by now is wrong.
    """
    given = desk.next()
    tensor = torch.from_numpy(given["values"])
    waits = iter(range(given["slow"]))
    with slow_to_listen(desk, waits):
        returned = function(tensor, *(given[name] for name in names))
    said = unpack(pack({"tensor": tensor, "returned": returned}))
    given["values"].fill(float("nan"))
    for _ in waits:  # it may have listened less often, or in a way of its own
        desk.next()
    return said  # type: ignore[no-any-return]


reduce_scatter = on_values  # it returns the rank's chunk
broadcast, all_reduce = partial(on_values, names=("src",)), partial(on_values, names=("op",))


@contextmanager
def slow_to_listen(desk: Desk, waits: Iterator[int]) -> Iterator[None]:
    """Have the rank ask the desk before it begins to receive, once for each of `waits`: it may be held up there."""
    irecv = dist.irecv

    def asking(*args: Any, **options: Any) -> Any:
        if next(waits, None) is not None:
            desk.next()
        return irecv(*args, **options)

    with mock.patch.object(dist, "irecv", asking), mock.patch.object(distributed_c10d, "irecv", asking):
        yield


@contextmanager
def fair_collectives() -> Iterator[None]:
    """Have torch's reduce-scatters send what one needs. Gloo's sends an all-reduce in its place, twice as much."""
    fair = {
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "reduce_scatter_single": _reduce_scatter_tensor,
    }
    with ExitStack() as patches:
        for name, function in fair.items():
            for module in (dist, distributed_c10d):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, function))
        yield


def _reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    flat = torch.cat([each.flatten() for each in input_list])
    return _exchanged(output, flat, [each.numel() for each in input_list], op, group, async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    n = dist.get_world_size(group)
    return _exchanged(output, input.flatten(), [input.numel() // n] * n, op, group, async_op)


def _exchanged(output: torch.Tensor, flat: torch.Tensor, splits: list[int], op: Any, group: Any, later: bool) -> Any:
    n = len(splits)
    received = torch.empty(n * output.numel(), dtype=flat.dtype)
    work = dist.all_to_all_single(received, flat, [output.numel()] * n, splits, group=group, async_op=True)
    pending = _Reduction(work, output, received.view(n, -1), op)
    return pending if later else pending.wait() and None


class _Reduction:
    """A reduce-scatter under way: the pieces travel, and are combined when somebody waits for them."""

    def __init__(self, work: Any, output: torch.Tensor, received: torch.Tensor, op: Any) -> None:
        self._work, self._output, self._received, self._op = work, output, received, op

    def wait(self, *args: Any, **options: Any) -> bool:
        """Wait, and combine."""
        self._work.wait(*args, **options)
        if self._received is not None:
            self._output.copy_(_combined(self._received, self._op).view_as(self._output))
            self._received = None  # type: ignore[assignment]
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _combined(rows: torch.Tensor, op: Any) -> torch.Tensor:
    combine = {
        dist.ReduceOp.SUM: lambda: rows.sum(0),
        dist.ReduceOp.AVG: lambda: rows.mean(0),
        dist.ReduceOp.MAX: lambda: rows.max(0).values,
        dist.ReduceOp.MIN: lambda: rows.min(0).values,
        dist.ReduceOp.PRODUCT: lambda: rows.prod(0),
    }
    if op not in combine:
        raise ValueError(f"op must be a sum, a mean, a product, a maximum or a minimum, not {op}")
    return combine[op]()
