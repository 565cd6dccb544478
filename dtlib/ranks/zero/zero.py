"""ZeRO: an optimizer over this rank's shards, and the way of a gradient to its owner."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from dtlib.ranks.dp import DataParallel
from dtlib.ranks.dp.bucketed import in_buckets
from dtlib.ranks.shared.clipping import clip_grad_norm
from dtlib.ranks.shared.held import Place, places
from dtlib.ranks.shared.replicas import (
    begin_alike,
    broadcast,
    gradient_hooks,
    group_of,
    raw_grad,
    refuse_gradient,
    set_raw_grad,
    signature,
    split_modules,
    weakly,
)
from dtlib.theory.units import MiB

from . import check
from .shard import Shard
from .units import Gathering, choose, make_units

_IN_FLIGHT = {1: 2, 2: 1, 3: 1}
"""By stage: so many reductions may be under way at once; each holds a buffer, and room for what arrives."""


class Zero(DataParallel):
    """Wrap a module, train it as one process would, and keep a part of what every rank of data parallelism keeps.

    N ranks, Ψ trainable parameters. They lie in flat buffers (`shards`), each cut into N chunks; rank r owns chunk r.
    Kept by a rank, and sent in a step, in units of (N−1)/N · Ψ elements:

    | `stage` | weights | gradients | optimizer states, master copy | sent |
    |---|---|---|---|---|
    | 1 | all | all | 1/N | 2 |
    | 2 | all | 1/N | 1/N | 2 |
    | 3 | 1/N | 1/N | 1/N | 3 |

    - **start**: as `DataParallel`: parameters and buffers are sent from the group's rank 0, once.
    - **forward**: stage 3 gathers each of `units` before it runs and frees it after, while the `prefetch` next ones are
      on their way: 1 sent. With ``reshard_after_forward=False`` they stay for the backward pass.
    - **backward**: the owners of a gradient's elements get its mean: reduce-scattered a shard at a time, while the pass
      goes on: 1 sent. Stage 3 gathers each unit again before: 1 sent.
    - **step**: ``optimizer.step()`` updates this rank's elements; every rank calls it. Stages 1 and 2 gather: 1 sent.

    `optimizer` is what `make_optimizer` made from `param_groups`: dictionaries as torch's optimizers take them, with
    the module's own parameters (by default one group with all; frozen ones are passed over). It is one of torch, so
    schedulers work on it; its parameters are flat pieces, so it must treat each element by itself, whatever the shape:
    ``TypeError`` for one that does not. `master_dtype` makes it step a copy of the weights in that dtype, sharded like
    its states; `param_dtype` makes the module compute in that dtype, the copy is of the weights as they were before.

    A shard is a bucket of `bucket_bytes` at stages 1 and 2 (see `dp.BucketedDataParallel`). At stage 3 it is one of
    `units`, modules inside `module` (by default the children of its outermost ``ModuleList`` and ``Sequential``
    containers); what is in none, or in several, belongs to `module` itself. All ranks must run the same units in the
    same order. With `quantised_block` weights travel in 8 bits, a float32 scale for so many: all ranks compute with
    the same rounded weights, off by 1/254 of the largest in their block at most; what is kept and updated is exact.

    A ``.grad`` of the module is what this rank has of the mean: at stage 1 a view, local outside of its chunk, else a
    flat piece. Its norm is refused, and so torch's own clipping: `clip_grad_norm_` counts all pieces. At stage 3 the
    weights are flat pieces too between passes: see them with `gathered` or ``state_dict``. ``no_sync`` (the full
    gradient stays), ``find_unused_parameters`` and what may not change after wrapping are as in `DataParallel`. A
    backward pass for inputs alone (``torch.autograd.grad``) reduces nothing.

    A parameter that `dp.belongs_to` some of the ranks is split over these: fewer ranks, larger chunks.

    **Hybrid**: with `replicas`, a second group, `group` (a node, say) splits everything among its N ranks, and
    `replicas` are the R ranks, one in each node, that own the same chunks: 2(R−1)/R · Ψ/N elements more, all that a
    rank sends from node to node.

    ``ValueError`` for arguments that break a rule, which it names, before anything is sent. Sources: Rajbhandari et al.
    2020, arXiv 1910.02054, sections 5 and 7; Zhao et al. 2023, arXiv 2304.11277; Wang et al. 2023, arXiv 2306.10209.
    """

    shard_type: Callable[..., Shard] = Shard

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Any], Optimizer],
        *,
        stage: int,
        units: Iterable[nn.Module] | None = None,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        quantised_block: int | None = None,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int | None = MiB,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        master_dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        of_units = units, prefetch, reshard_after_forward, quantised_block
        stage = check.stage_of(stage, of_buckets=(bucket_bytes, first_bucket_bytes), of_units=of_units)
        groups = check.groups_of(module, param_groups)
        chosen = choose(module, units)
        check.optimizer_maker(make_optimizer, groups)
        check.dtypes(module, master_dtype=master_dtype, param_dtype=param_dtype)
        check.replicas(replicas, group, module)
        super().__init__(
            module, group=group, broadcast_buffers=broadcast_buffers, find_unused_parameters=find_unused_parameters
        )
        if replicas is not None:
            begin_alike(module, replicas)
        self.stage, self.replicas = stage, replicas
        # Of what all ranks hold each is whole, whatever it is cut from. Now, as shards take the shapes away.
        whole = {id(p): Place(n, tuple(p.shape)) for n, p in module.named_parameters() if group_of(p, group) is group}
        self.places = places(module) | whole
        self._outside = check.outside(module, group)
        self._waiting, self._under_way, self._syncing = list[Shard](), deque[Shard](), True
        make_shard = functools.partial(
            self.shard_type, group=group, stage=stage, replicas=replicas,
            param_dtype=param_dtype, master_dtype=master_dtype, quantised_block=quantised_block,
        )  # fmt: skip
        named = list(zip(self._names, self._params, strict=True))
        if stage == 3:
            named += [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
            made = make_units(module, chosen, named, make_shard, group)
            self.all_shards = [shard for unit in reversed(made) for shard in unit.shards]
            split_modules.update(unit.module for unit in made)
        else:
            backwards = dict(reversed(list(enumerate(self._params))))  # as gradients arrive
            buckets = in_buckets(backwards, self._groups, bucket_bytes, first_bucket_bytes, lambda each: each.dtype)
            made = []
            self.all_shards = [make_shard({i: named[i] for i in bucket}) for bucket in buckets]
        self.shards = [shard for shard in self.all_shards if shard.is_trained]
        self._shard_of = {index: shard for shard in self.shards for index in shard.params}
        self._gathering = Gathering(made, prefetch, not reshard_after_forward, weakly(self._begin))
        self.optimizer = self._optimizer_of_pieces(make_optimizer, groups)
        self._as_wrapped = signature(module)
        super()._listen()
        for shard in self.shards:
            shard.hooks = {index: gradient_hooks[parameter] for index, parameter in shard.params.items()}

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each trained shard, in the order in which shards are reduced."""
        return [list(shard.names.values()) for shard in self.shards]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; ``RuntimeError`` if its parameters are no longer those that were wrapped."""
        buffers = list(self.module.buffers())
        if self.replicas is not None and self.broadcast_buffers and self._sync and buffers:
            broadcast(buffers, self.replicas)
        self._gathering.begin_forward()
        result = super().forward(*args, **kwargs)
        self._gathering.end_forward()
        return result

    # The way of a gradient: _on_gradient, _ready, _reduce, Shard.reduce and advance, Shard.keep

    def _listen(self) -> None:
        pass  # the hooks come once the parameters lie where they belong

    def _begin(self) -> None:
        """The first sign of a backward pass."""
        if not self._running:
            self._open()
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _open(self) -> None:
        self._running, self._gathering.in_backward, self._syncing, self._arrived = True, True, self._sync, {}
        self._waiting = list(self.shards)
        for shard in self.shards:
            shard.begin_backward()

    def sync(self) -> None:
        """Reduce what was added up inside ``no_sync`` without another backward pass, as at the end of one."""
        self._open()
        self._arrived = {i: None for i, p in enumerate(self._params) if raw_grad(p) is not None}
        self._end_of_backward()

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        self._begin()
        if index in self._arrived:
            raise RuntimeError(f"the gradient of {self._names[index]!r} arrived twice in one backward pass")
        refuse_gradient(self._names[index], raw_grad(parameter))
        self._arrived[index] = None
        self._ready(index)

    def _ready(self, index: int) -> None:
        shard = self._shard_of[index]
        shard.missing -= 1
        self._gathering.free_if_done(shard)
        if self._syncing:
            # With unused parameters ranks do not complete the same shards: to wait might be to wait in a circle.
            if shard.is_due and not self.find_unused_parameters:
                for older in self._under_way:
                    older.advance()
            self._reduce()

    def _reduce(self, *, complete: bool = True) -> None:
        """Begin to reduce the shards that are `complete`, or all that are left.

        Stages 1 and 2 reduce in one order on all ranks, whatever the order of readiness: their waits must match.
        """
        for shard in list(self._waiting):
            if complete and shard.missing:
                if self.stage == 3:
                    continue
                break
            while len(self._under_way) >= _IN_FLIGHT[self.stage] and not self.find_unused_parameters:
                self._under_way.popleft().keep()
            shard.reduce()
            self._waiting.remove(shard)
            self._under_way.append(shard)

    def _average(self, unused: Sequence[int]) -> None:
        self._reduce(complete=False)
        while self._under_way:
            self._under_way.popleft().keep()

    def _end_of_backward(self) -> None:
        try:
            if self._syncing and (self._arrived or self.find_unused_parameters):  # else it was for inputs alone
                super()._end_of_backward()
                for shard in self.shards:
                    shard.hand_out()
        finally:
            self._running = False
            self._gathering.send_all_away()

    def _forget_unused(self, unused: Sequence[int]) -> None:
        groups = (self.group,) if self.replicas is None else (self.group, self.replicas)
        for index, used in enumerate(self._used_somewhere(unused, *groups)):
            if used:
                self._shard_of[index].used.add(index)

    def _abandon(self) -> None:
        self._waiting = []
        self._average(())
        self.zero_grad()
        self._gathering.send_all_away()

    # The optimizer

    def _optimizer_of_pieces(
        self, make_optimizer: Callable[[Any], Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer:
        number = {id(parameter): index for index, parameter in enumerate(self._params)}
        numbers = [[number[id(parameter)] for parameter in each["params"]] for each in groups]
        self.group_names = [[self._names[index] for index in group] for group in numbers]
        pieces = {index: weight for shard in self.shards for index, weight in shard.weights.items()}
        mine = [[pieces[index] for index in group if index in pieces] for group in numbers]
        optimizer = make_optimizer([{**each, "params": own} for each, own in zip(groups, mine, strict=True)])
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self.publish())
        optimizer.zero_grad, optimizer.add_param_group = self.zero_grad, check.no_more_groups  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # so a GradScaler comes to be refused
        return optimizer

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._refuse_changes()
        local = [name for name, p in zip(self._names, self._params, strict=True) if raw_grad(p) is not None]
        check.step(optimizer, (*args, *kwargs.values()), local)
        for shard in self.shards:
            if shard.master is not None:
                shard.hand_out(widened=True)

    @torch.no_grad()
    def publish(self) -> None:
        """What the optimizer steps has changed: gather the weights, or forget full ones of before."""
        self._gathering.send_all_away()
        for shard in self.shards:
            shard.end_step()
        if self.stage < 3:
            for shard in self.shards:
                shard.gather()
            for shard in self.shards:
                shard.wait()
        increment_version(self._params)  # a graph of before must not go backward with the new weights

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also what was added up inside ``no_sync``. ``optimizer.zero_grad`` is the same."""
        for parameter in self._params:
            set_raw_grad(parameter, None)
        for shard in self.shards:
            shard.forget(shard.params, set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradient so that its norm over all parameters and ranks is at most `max_norm`; returns the norm.

        As ``torch.nn.utils.clip_grad_norm_`` in one process, with the errors of `ranks.shared.clipping`. All ranks
        must call it. ``RuntimeError`` where ranks outside of the group have slices, or a stage, of the module.
        """
        if self._outside:
            raise RuntimeError(
                f"the gradient of {self._outside!r} lies on ranks outside of this group as well, and a norm over these "
                "would leave them out: clip by clip_grad_norm_ of threed.Training, which counts all"
            )
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        return clip_grad_norm(grads, max_norm, norm_type, error_if_nonfinite, group=self.group)

    # To see and set the weights

    @contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[nn.Module]:
        """The module with all its full weights, inside the block; every rank must enter it.

        What is changed there is forgotten at the end, unless `write`: then each rank keeps its chunk of what it has, so
        all must make the same changes. Stages 1 and 2 need it for changes alone.
        """
        for unit in self._gathering.units:
            self._gathering.bring_exact(unit)
        self._gathering.held = True
        try:
            yield self.module
            for shard in self.all_shards if write else ():
                shard.take_full()
        finally:
            self._gathering.held = False
            self._gathering.send_all_away()
            increment_version(self._params)  # what autograd saved inside has no memory any more

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's full state dict, under its own names, at stage 3 in memory of its own. Every rank must call it:
        the weights are gathered unit by unit."""
        full: dict[int, Tensor] = {}
        for unit in self._gathering.units:
            self._gathering.bring_exact(unit)
            full |= {id(p): p.detach().clone() for shard in unit.shards for p in shard.params.values()}
            if not self._gathering.held:
                unit.send_away()
        state = self.module.state_dict(*args, **kwargs)
        for name, parameter in self.module.named_parameters(kwargs.get("prefix", ""), remove_duplicate=False):
            state[name] = full.get(id(parameter), state[name])
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a full state dict into the wrapped module, and into master copies. Every rank must load the same."""
        with self.gathered(write=True):
            return super().load_state_dict(*args, **kwargs)

    def tensors_by_kind(self) -> Iterator[tuple[Tensor, str]]:
        """What this rank holds in buffers of its own, and what for, in the words of ``lab.memory``, which asks."""
        return (each for shard in self.all_shards for each in shard.tensors_by_kind())

    def _refuse_changes(self) -> None:
        if any(gradient_hooks.get(p) is not each.hooks[i] for each in self.shards for i, p in each.params.items()):
            raise RuntimeError("module was wrapped again, and its gradients go to the last wrapper: use that one")
        super()._refuse_changes()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Zero wrapper cannot be copied or pickled: save it with zero.save, or copy its module before")
