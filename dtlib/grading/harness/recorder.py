"""What a rank communicated, call by call: which operation, how many bytes, to whom, and when it was waited for.

The kernel's counter says how much was sent; this record says how. It sees every call that Python makes on a process
group from any thread, and those that C++ makes for it (DistributedDataParallel, functional collectives) from the thread
that records. A learner's own function can avoid it; the bytes that the kernel counts cannot be avoided.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from . import MAX_EVENTS
from .watch import Watch

# Names of the methods of a process group, in torch 2.11 and 2.13, and what they are called here.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "receive",
    "recv_anysource": "receive",
}
_WAITS = (
    (dist.Work, "wait"),
    (dist.Work, "synchronize"),
    (dist.Work, "block_current_stream"),
    (torch._C.Future, "wait"),
)
_POLLS = ((dist.Work, "is_completed"), (torch._C.Future, "done"))


class Recorder:
    """The events of one rank in the order in which they happened, as plain data.

    An event is ``{"op": ..., "bytes": ..., "peer": ...}``; ``{"op": "wait", "of": i}`` says that event `i` was waited
    for, ``{"op": "poll", "of": i, "times": k}`` that somebody asked k times in a row whether it was done. Events of
    other threads than the first carry a ``thread``. `mark` adds events of the harness. `watch` tells which functions
    of the library were called.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.watch = Watch()
        self._lock = threading.Lock()
        self._threads = {threading.get_ident(): 0}
        self._works: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._inside = threading.local()

    def mark(self, op: str, **details: Any) -> int:
        """Add an event, one of the harness's own for example; its index, or -1 where the record is full."""
        with self._lock:
            if len(self.events) >= MAX_EVENTS:
                return -1
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self.events.append({"op": op, **details} | ({"thread": thread} if thread else {}))
            return len(self.events) - 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this process communicates in the block."""
        undo = [self._wrap(dist.ProcessGroup, name, self._call(name)) for name in _OPERATIONS]
        undo += [self._wrap(owner, name, self._wait) for owner, name in _WAITS]
        undo += [self._wrap(owner, name, self._poll) for owner, name in _POLLS]
        undo.append(self._wrap(dist.Work, "get_future", self._future))
        try:
            with _FromCpp(self), self.watch.watching():
                yield
        finally:
            for each in undo:
                each()

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
        original = getattr(owner, name, None)
        if original is None:
            return lambda: None
        own = vars(owner).get(name)  # what stands there, which may not be what attribute access makes of it
        setattr(owner, name, make(original))
        return lambda: delattr(owner, name) if own is None else setattr(owner, name, own)

    def _remember(self, work: Any, index: int) -> None:
        """Know `work` by its id as long as it lives, but keep it not alive: it holds what it sends and receives."""
        key = id(work)
        self._works[key] = (index, weakref.ref(work, lambda _: self._works.pop(key, None)))

    def _index_of(self, work: Any) -> int:
        """Which event started `work`; -1 where that is not known."""
        index, ref = self._works.get(id(work), (-1, None))
        return index if ref is not None and ref() is work else -1

    def _call(self, name: str) -> Callable[[Any], Any]:
        op = _OPERATIONS[name]

        def make(original: Any) -> Any:
            def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
                if getattr(self._inside, "call", False):
                    return original(group, *args, **kwargs)
                peer = {"peer": _peer(name, group, args, kwargs)} if op in ("send", "receive") else {}
                index = self.mark(op, bytes=_num_bytes(op, args), **peer)
                self._inside.call = True
                try:
                    work = original(group, *args, **kwargs)
                finally:
                    self._inside.call = False
                if work is not None:
                    self._remember(work, index)
                return work

            return wrapper

        return make

    def _wait(self, original: Any) -> Any:
        def wrapper(work: Any, *args: Any, **kwargs: Any) -> Any:
            index = self._index_of(work)
            done = original(work, *args, **kwargs)
            self.mark("wait", of=index)
            return done

        return wrapper

    def _poll(self, original: Any) -> Any:
        def wrapper(work: Any) -> Any:
            index = self._index_of(work)
            last = self.events[-1] if self.events else {}
            if last.get("op") == "poll" and last["of"] == index:
                last["times"] += 1
            else:
                self.mark("poll", of=index, times=1)
            return original(work)

        return wrapper

    def _future(self, original: Any) -> Any:
        def wrapper(work: Any) -> Any:
            future = original(work)
            self._remember(future, self._index_of(work))
            return future

        return wrapper


class _FromCpp(TorchDispatchMode):
    """Sees the collectives that C++ calls: they pass through torch's dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        inside = getattr(self.recorder._inside, "call", False)
        if namespace in ("c10d", "_c10d_functional") and not inside and not name.startswith(("wait", "_wrap")):
            op = name.partition(".")[0].rstrip("_")
            op = _OPERATIONS.get(op, op)
            self.recorder.mark(op, bytes=_num_bytes(op, args), native=True)
        return func(*args, **(kwargs or {}))


def _num_bytes(op: str, args: tuple[Any, ...]) -> int:
    """The bytes that a rank puts into a call: of the smaller of its first two tensors or lists of tensors.

    Into a reduce-scatter it puts the larger one.
    """
    sizes = [size for size in map(_bytes_in, args[:2]) if size is not None]
    return max(sizes, default=0) if op == "reduce_scatter" else min(sizes, default=0)


def _bytes_in(tree: Any) -> int | None:
    """The bytes of a tensor, or of tensors in lists; None for anything else."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    sizes = [_bytes_in(each) for each in tree] if isinstance(tree, list | tuple) else []
    return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)


def _peer(name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The global rank at the other end of a send or receive; -1 for a receive from anybody."""
    if name == "recv_anysource":
        return -1
    in_group = (
        args[1]
        if len(args) > 1
        else next((kwargs[key] for key in ("dstRank", "srcRank", "dst", "src") if key in kwargs), -1)
    )
    return dist.get_global_rank(group, int(in_group)) if in_group >= 0 else -1
