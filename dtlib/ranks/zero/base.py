"""What the stages of ZeRO share: an optimizer over this rank's shards, and the way of a gradient to its owner."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from dtlib.ranks.collectives import ring_all_reduce
from dtlib.ranks.collectives._peers import Peers
from dtlib.ranks.dp.base import DataParallel, _hooks

from . import _check, _replicas, _stepping
from ._exchange import Scatter
from ._flat import Flat
from ._handles import Handles
from ._norm import clip_grad_norm

MakeOptimizer = Callable[[Any], Optimizer]
"""Makes an optimizer from a list of parameter groups, as ``functools.partial(torch.optim.AdamW, lr=1e-3)`` does."""


class Zero(DataParallel):
    """Base of the stages: wrap a module, train it as one process would, and keep optimizer states of a part only.

    N ranks, Ψ trainable parameters. The flat parameters (see `_flat.Flat`) are cut into N chunks; rank r owns chunk r:

    - **start**: as `DataParallel`: parameters and buffers are sent from the group's rank 0, once.
    - **backward**: each gradient goes to the owners of its elements, who get the mean over the ranks.
    - **step**: ``optimizer.step()`` updates this rank's Ψ/N elements, with states for them alone; every rank calls it.

    `optimizer` is what `make_optimizer` made from `param_groups`: dictionaries as torch's optimizers take them, with
    the module's own parameters (by default one group with all of them; frozen ones are passed over). It is a true
    optimizer of torch, so schedulers of the learning rate work on it; its parameters are flat pieces. It must treat
    each element by itself, as Adam, SGD and most others do: ``TypeError`` for those that do not.
    `master_dtype` (float32, say) makes it work on a copy of the weights in that dtype, sharded like its states.

    Use `clip_grad_norm_` of this class: it knows the norm over all ranks. ``no_sync``, ``find_unused_parameters`` and
    what may not change after wrapping are as in `DataParallel`. `overlap` starts exchanges during the backward pass,
    else they start after it. Errors are raised before anything is sent.

    **Hybrid**: with `replicas`, a second group, `group` (a node, say) splits everything among its own N ranks, and
    `replicas` are the R ranks, one in each node, that own the same chunks. Each ends its part of the backward pass with
    an all-reduce of its chunk: 2(R−1)/R · Ψ/N · width bytes, all that a rank sends from node to node.
    """

    in_flight = 1
    """How many reductions may be under way at once; each holds a buffer, and room for what arrives."""
    _all_flats: Sequence[Flat] = ()

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        master_dtype: torch.dtype | None = None,
        overlap: bool = True,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        groups = _check.groups_of(module, param_groups)
        _check.optimizer_maker(make_optimizer, groups)
        _check.dtypes(module, master_dtype)
        _replicas.check(replicas, group)
        super().__init__(
            module, group=group, broadcast_buffers=broadcast_buffers, find_unused_parameters=find_unused_parameters
        )
        self.replicas, self.num_replicas = replicas, _replicas.join(replicas, module)
        self.overlap, self.master_dtype = overlap, master_dtype
        self._peers, self._all_names = Peers(self._params[0].device, group), list(self._names)
        self._flats = self._lay_out()
        self._all_flats = self._flats_with_frozen()
        self._where = {index: flat for flat in self._flats for index in flat.indices}
        self._under_way, self._syncing = deque[Flat](), True
        for flat in self._flats:
            flat.make_weights(master_dtype)
        self.optimizer = self._make(make_optimizer, groups)
        self._as_wrapped = _identity(module)
        self._watch()

    @abstractmethod
    def _lay_out(self) -> list[Flat]:
        """The flat buffers of all trainable parameters, in the order in which their gradients are reduced."""

    def _flats_with_frozen(self) -> list[Flat]:
        return self._flats

    @abstractmethod
    def _keep(self, flat: Flat, own: Tensor) -> None:
        """A reduction is done: `own` is this rank's chunk of the mean, a view of ``flat.buffer``."""

    @abstractmethod
    def _publish(self) -> None:
        """The optimizer has changed this rank's chunks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; ``RuntimeError`` if its parameters are no longer those that were wrapped."""
        if self.broadcast_buffers and self._sync:
            _replicas.share(list(self.module.buffers()), self.replicas)
        return super().forward(*args, **kwargs)

    def tensors_by_kind(self) -> Iterator[tuple[Tensor, str]]:
        """What this rank holds in buffers of its own, and what for, in the words of ``lab.memory``, which asks."""
        return (each for flat in self._all_flats for each in flat.tensors_by_kind())

    # The way of a gradient

    def _listen(self) -> None:
        pass  # the hooks come once the parameters lie where they belong

    def _watch(self) -> None:
        for index, parameter in enumerate(self._params):
            if parameter in _hooks:  # wrapped anew: the last wrapper has it
                _hooks[parameter].remove()
            _hooks[parameter] = self._hooks_on(parameter, index)

    def _hooks_on(self, parameter: Tensor, index: int) -> Handles:
        return Handles(parameter.register_post_accumulate_grad_hook(_hook(self, index)))

    def _begin(self) -> None:
        """The first sign of a backward pass."""
        if not self._running:
            self._running, self._arrived, self._syncing = True, {}, self._sync
            for flat in self._flats:
                flat.missing, flat.started = len(flat.indices), False
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _on_gradient(self, index: int) -> None:
        self._begin()
        if index in self._arrived:
            raise RuntimeError(f"the gradient of {self._names[index]!r} arrived twice in one backward pass")
        self._arrived[index] = None
        self._ready(index)
        flat = self._where[index]
        flat.missing -= 1
        if not flat.missing:
            self._complete(flat)

    def _ready(self, index: int) -> None:
        """Put the gradient, divided by N, where it travels, and forget the original."""
        grad = self._params[index].grad
        if grad.layout is not torch.strided:
            raise RuntimeError(f"the gradient of {self._names[index]!r} is sparse, and buffers are dense")
        self._where[index].collect(index, grad, 1 / (self.world_size * self.num_replicas))
        self._params[index].grad = None

    def _complete(self, flat: Flat) -> None:
        """All gradients of `flat` are there."""
        if self._syncing and self.overlap:
            self._start(flat)

    def _start(self, flat: Flat) -> None:
        """Begin to reduce a flat buffer to its owners, once older ones have made room."""
        flat.started = True
        # With unused parameters ranks do not complete the same buffers: to wait here might be to wait in a circle.
        while len(self._under_way) >= self.in_flight and not self.find_unused_parameters:
            self._finish()
        flat.clear_missing()
        flat.scatter = Scatter(self._peers, flat.buffer, flat.bounds, flat.number)
        self._under_way.append(flat)

    @torch.no_grad()
    def _finish(self) -> None:
        flat = self._under_way.popleft()
        assert flat.scatter is not None
        own, flat.scatter = flat.scatter.wait(), None
        if self.replicas is not None:
            ring_all_reduce(own, group=self.replicas)
        flat.resting = (set(flat.indices) if flat.grad is None else flat.resting) - flat.filled
        self._keep(flat, own)
        flat.filled.clear()

    def _end_of_backward(self) -> None:
        self._running = False
        if not self._syncing:
            return
        unused = [i for i in range(len(self._params)) if self._is_unused(i)]
        if unused and not self.find_unused_parameters:
            self._abandon()
            names = ", ".join(repr(self._names[i]) for i in unused)
            raise RuntimeError(
                f"no gradient for {names} on rank {dist.get_rank(self.group)}: the loss does not depend on it, or it "
                "was cut off by a checkpoint with use_reentrant=True. Wrap with find_unused_parameters=True if some "
                "parameters are meant to rest, or freeze them before wrapping"
            )
        self._average(unused)
        if self.find_unused_parameters:
            self._forget_unused(unused)
        _stepping.hand_out_gradients(self._flats)

    def _is_unused(self, index: int) -> bool:
        flat = self._where[index]
        if index in self._arrived or index in flat.filled:
            return False
        return flat.grad is None or index in flat.resting

    def _average(self, unused: Sequence[int]) -> None:
        for flat in self._flats:
            if not flat.started:
                self._start(flat)
        while self._under_way:
            self._finish()

    def _forget_unused(self, unused: Sequence[int]) -> None:
        used = torch.ones(len(self._params), dtype=torch.int32, device=self._params[0].device)
        used[list(unused)] = 0
        for group in (self.group, self.replicas)[: 1 if self.replicas is None else 2]:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        nowhere = set((used == 0).nonzero().flatten().tolist())
        for flat in self._flats:
            flat.resting = nowhere & set(flat.indices)

    def _abandon(self) -> None:
        while self._under_way:
            flat = self._under_way.popleft()
            if flat.scatter is not None:
                flat.scatter.wait()
            flat.scatter = None
        for flat in self._flats:
            flat.filled.clear()

    # The optimizer

    def _make(self, make_optimizer: MakeOptimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        name = {id(parameter): name for parameter, name in zip(self._params, self._names, strict=True)}
        self._group_names = [[name[id(p)] for p in each["params"]] for each in groups]
        optimizer = make_optimizer(_stepping.groups_of_pieces(groups, self._params, self._flats))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.zero_grad = self.zero_grad
        return optimizer

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _check.step(optimizer, (*args, *kwargs.values()), [self._names[i] for flat in self._flats for i in flat.filled])
        _stepping.widen_gradients(self._flats)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _stepping.round_weights(self._flats)
        self._publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also what was added up inside ``no_sync``. ``optimizer.zero_grad`` is the same."""
        for flat in self._flats:
            flat.filled.clear()
            if set_to_none:
                flat.grad = None
                flat.resting = set()
            elif flat.grad is not None:
                flat.grad.zero_()
        if set_to_none:
            _stepping.hand_out_gradients(self._flats)
            for parameter in self._params:
                parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradient so that its norm over all parameters and all ranks is at most `max_norm`.

        As ``torch.nn.utils.clip_grad_norm_`` in one process: every element lies on one rank, so one all-reduce of 8
        bytes gives the exact norm, which is returned (float64, 0-dimensional, the same on every rank). All ranks must
        call it. ``ValueError`` for a negative `max_norm` or a `norm_type` that is not above 0, ``RuntimeError`` for a
        norm that is not finite if `error_if_nonfinite`.
        """
        grads = [flat.grad for flat in self._flats if flat.grad is not None]
        device = self._params[0].device
        return clip_grad_norm(grads, max_norm, norm_type, error_if_nonfinite, device=device, group=self.group)

    def _refuse_changes(self) -> None:
        now = _identity(self.module)
        if now != self._as_wrapped:
            names = sorted({name for name, *_ in set(now) ^ set(self._as_wrapped)})
            raise RuntimeError(
                f"{', '.join(map(repr, names))} changed after the module was wrapped (frozen, unfrozen, replaced or "
                "cast), and the shards know nothing of it. Change the module first, then wrap it"
            )

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be copied: save it with zero.save, or copy its module before")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: save it with zero.save")


def _hook(wrapper: Zero, index: int) -> Callable[[Tensor], None]:
    return lambda parameter: wrapper._on_gradient(index)


def _identity(module: nn.Module) -> list[tuple[Any, ...]]:
    """What must stay as it was when the module was wrapped; shapes come and go with the shards."""
    return [(n, p.dtype, p.requires_grad, id(p)) for n, p in module.named_parameters()]
