"""`lab.at_scale`: one rank of a job of a thousand, on this machine: its memory and its collectives, without values."""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import operator
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from . import launch
from .launch import context, launcher
from .launch.ship import pack
from .launch.worker import Job
from .memory.held import Memory, check_detail, memory
from .memory.storages import tensors_in
from .messages import stand_ins
from .recorder import Collectives, Recorder

MAX_SCALE = 2**20


@dataclass(frozen=True)
class AtScale:
    """What came out of `lab.at_scale`: what `fn` returned, and what its rank held and called meanwhile."""

    result: Any
    memory: Memory
    collectives: Collectives
    world_size: int
    rank: int


@dataclass(frozen=True)
class _Failure:
    summary: str
    traceback: str = ""


def at_scale(
    fn: Callable[..., Any],
    world_size: int = 1024,
    rank: int = 0,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60,
    detail: str = "marks",
) -> AtScale:
    """Call ``fn(*args)`` as rank `rank` of `world_size` ranks, of which there is no other, and see what it holds.

    `fn` runs in a fresh process, with torch's fake process group (every collective returns at once) and fake tensors
    (a shape, a type, a device, and no memory): a layer of any size fits, and nothing is computed. DTensor, DeviceMesh
    and FSDP2's ``fully_shard`` work as they do in a real job. Bytes and collectives are those of this one rank; `fn`
    may use `lab.memory` itself to mark places or to look at a part, and `detail` is that of `lab.memory`. What
    ``lab.run`` says of `fn`, `args`, the result and what is printed holds here too.

    Code that needs the value of a tensor cannot run: ``.item()``, an ``if`` on a tensor, objects that are sent.

    Raises ``ValueError`` or ``TypeError`` for a bad argument before anything starts, `RankError` when `fn` raises or
    asks for a value, `RankTimeout` after `timeout_s` seconds, and ``RuntimeError`` inside a rank.
    """
    if context.inside_rank():
        raise RuntimeError("lab.at_scale inside a rank: call it outside of the ranks, it starts a process of its own")
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple of the arguments of fn, not {args!r}")
    world_size = _integer("world_size", world_size, 1, MAX_SCALE, "")
    rank = _integer("rank", rank, 0, world_size - 1, "world_size-1=")
    check_detail(detail)
    job = Job(
        call=pack(_be_one_of_many, (world_size, rank, detail, pack(fn, tuple(args)))),
        environment=dict(os.environ),
        directory=os.getcwd(),
        path=list(sys.path),
        argv=list(sys.argv),
        sources={name: entry for name, entry in linecache.cache.items() if not os.path.exists(name)},
        world_size=1,
        timeout_s=launcher.positive("timeout_s", timeout_s),
        threads_per_rank=1,
        network="private",
    )
    try:
        (outcome, printed) = launcher.run_job(job)[0]
    except launch.RankError as error:
        raise launch.RankError(_renamed(str(error), rank, world_size), rank, error.traceback) from None
    except launch.RankTimeout as error:
        raise launch.RankTimeout(_renamed(str(error), rank, world_size), [rank], {rank: error.stacks[0]}) from None
    sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in printed.splitlines()))
    if isinstance(outcome, _Failure):
        message = f"rank {rank} of {world_size} {outcome.summary}\n\n{outcome.traceback}".rstrip()
        raise launch.RankError(message, rank, outcome.traceback)
    return outcome


def _integer(name: str, value: object, smallest: int, largest: int, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = smallest - 1
    if not smallest <= number <= largest:
        raise ValueError(f"{name} must be a whole number from {smallest} to {what}{largest}, not {value!r}")
    return number


def _renamed(message: str, rank: int, world_size: int) -> str:
    """The child process is rank 0 of 1 to `lab.run`."""
    return message.replace("rank 0 of 1 ", f"rank {rank} of {world_size} ").replace("rank 0", f"rank {rank}", 1)


# In the child process


def _be_one_of_many(world_size: int, rank: int, detail: str, call: bytes) -> tuple[AtScale | _Failure, str]:
    _join(world_size, rank)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        outcome = _outcome(world_size, rank, detail, call)
    return outcome, printed.getvalue()


def _outcome(world_size: int, rank: int, detail: str, call: bytes) -> AtScale | _Failure:
    recorder = Recorder()
    _send_nothing(recorder)
    try:
        fn, args = pickle.loads(call)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, recorder:
            args = tree_map_only(Tensor, fake.from_tensor, args)
            with memory(*tensors_in(args), detail=detail) as held:
                result = fn(*args)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return _Failure(
            f"asked for the value of a tensor ({error.func}), and tensors have shapes and no values in lab.at_scale",
            _format(error, of_the_reader=True),
        )
    except BaseException as error:
        return _Failure(f"raised {type(error).__name__}: {error}", _format(error))
    if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(result)) or isinstance(result, nn.Module):
        return _Failure(
            f"returned tensors without values (in a {type(result).__name__}). "
            "Return plain data: shapes, bytes, or what lab.memory recorded"
        )
    return AtScale(result, held, Collectives(tuple(recorder.log)), world_size, rank)


def _join(world_size: int, rank: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    context.leave()
    context.enter(context.RankContext(rank, world_size, True, "", _nobody))
    _keep_meshes_real()
    if hasattr(_fsdp_common, "_chunk_with_empty"):
        _replace("_chunk_with_empty", _fsdp_common._chunk_with_empty, _Chunks)


def _send_nothing(recorder: Recorder) -> None:
    """Note messages, and be done: a thousand of them for one exchange take their time on their way to nobody."""

    def post(name: str, tensor: Tensor, peer: int | None, group: Any, call: Any) -> _Arrived:
        if peer is not None and not 0 <= peer < dist.get_world_size():
            raise ValueError(f"the peer of a message must be a rank from 0 to {dist.get_world_size() - 1}, not {peer}")
        recorder.note(name, dist.get_world_size(group), tensor)
        return _Arrived()

    for name, stand_in in stand_ins(post).items():
        _replace(name, getattr(dist, name), stand_in)


class _Arrived:
    """A message that is done: what ``dist.isend`` and ``dist.irecv`` return."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _keep_meshes_real() -> None:
    """A mesh computes with the numbers of ranks, whose values it needs: never with fake tensors."""
    for name, method in list(vars(DeviceMesh).items()):
        if isinstance(method, property):
            setattr(DeviceMesh, name, property(_real(method.fget), _real(method.fset), _real(method.fdel)))
        elif isinstance(method, staticmethod | classmethod):
            setattr(DeviceMesh, name, type(method)(_real(method.__func__)))
        elif callable(method) and not isinstance(method, type):
            setattr(DeviceMesh, name, _real(method))
    _replace("init_device_mesh", init_device_mesh, _real(init_device_mesh))


def _replace(name: str, original: Any, new: Any) -> None:
    """Put `new` wherever a module holds `original` under its name."""
    for module in list(sys.modules.values()):
        if vars(module).get(name) is original:
            setattr(module, name, new)


@dataclass(frozen=True)
class _Chunks:
    """What FSDP2 cuts a parameter into: it makes a chunk for each of a thousand ranks, and looks at two of them."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        size = self.tensor.size(self.dim)
        length = -(-size // self.num_chunks)
        start = index * length
        if start >= size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(length, size - start))


def _real(method: Any) -> Any:
    if method is None:  # a property that cannot be set
        return None

    @functools.wraps(method)
    def outside_of_the_fake_mode(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return method(*args, **kwargs)

    return outside_of_the_fake_mode


def _nobody(payload: bytes) -> NoReturn:
    raise RuntimeError("there are no other ranks to meet in lab.at_scale")


def _format(error: BaseException, *, of_the_reader: bool = False) -> str:
    """The traceback from the reader's function on, without the frames of the lab; or the reader's own frames alone."""
    shown = traceback.TracebackException.from_exception(error)
    while shown.stack and shown.stack[0].filename == __file__:
        shown.stack.pop(0)
    if of_the_reader:
        torch_and_lab = os.path.dirname(torch.__file__), os.path.dirname(__file__)
        own = [frame for frame in shown.stack if not frame.filename.startswith(torch_and_lab)]
        return "Traceback (most recent call last):\n" + "".join(traceback.format_list(own)).rstrip()
    return "".join(shown.format()).rstrip()
