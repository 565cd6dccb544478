"""What all data-parallel wrappers share: a common start, one hook a parameter, and the end of the backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.replicas import (
    begin_alike,
    broadcast,
    gradient_hooks,
    group_of,
    refuse_changes,
    refuse_gradient,
    signature,
    split_modules,
    weakly,
)


class DataParallel(nn.Module, ABC):
    """Base of the wrappers: every rank computes on its own samples, all end with the same mean gradient.

    - **start**: parameters and buffers are sent from the group's rank 0 to all, once. ``ValueError`` before that if
      the ranks' modules are not alike (names, shapes, dtypes, what is frozen).
    - **forward**: the module's own. Before it, buffers follow rank 0 (`broadcast_buffers`), as running statistics
      would drift apart; so all ranks must make the call. Evaluate on one rank with ``.module``.
    - **backward**: local gradients; a hook on each parameter tells when its gradient is final.
    - **end of backward**: ``parameter.grad`` is the mean over the ranks of `group`; nothing needs to be called.

    Of a parameter that `belongs_to` some of these ranks the first one's is sent, to them, and the gradient is their sum
    over the number of *all* ranks: the mean of a loss of all samples, where each rank that holds it has seen some.

    A parameter that takes no part in a backward pass is an error that names it, unless
    `find_unused_parameters`: then a rank that did not use it counts as zero, and where no rank used it
    ``.grad`` stays None. That costs one more all-reduce, of four bytes a parameter. Some parameter must be
    used on every rank, or that rank never joins. Frozen parameters are never sent; tied ones once. To freeze,
    unfreeze or replace parameters, do it first and wrap then: a change afterwards is refused in the next
    forward pass. Activation checkpoints must be the kind that torch recommends, ``use_reentrant=False``. Backward
    passes in parts, as in zero-bubble pipelines, go inside `no_sync`, and `sync` ends the last of them.

    ``state_dict`` and ``load_state_dict`` are the module's own, and so is any attribute that the wrapper lacks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        _refuse_group(group)
        if any(each in split_modules for each in module.modules()):
            raise ValueError("module must have its weights, and a stage 3 of ZeRO has split them: wrap a module once")
        self.module = module
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self._names, self._params = _trainable(module)
        self._groups = [group_of(each, group) for each in self._params]
        _refuse_strangers(module, group)
        self._as_wrapped = signature(self.module)
        self._sync = True
        self._running = False  # inside a backward pass that ends with a sync
        self._arrived: dict[int, None] = {}  # in the order of arrival
        if self.world_size == 1:
            return
        begin_alike(module, group)
        self._listen()

    def _listen(self) -> None:
        for index, parameter in enumerate(self._params):
            if parameter in gradient_hooks:  # the module is wrapped anew: the last wrapper averages, once
                gradient_hooks[parameter].remove()
            hook = weakly(self._on_gradient, index)
            gradient_hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._as_wrapped = signature(self.module)
        if self.world_size > 1:
            self._listen()  # hooks do not come along when a wrapper is copied or unpickled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; ``RuntimeError`` if its parameters are no longer those that were wrapped."""
        if torch.is_grad_enabled():
            self._refuse_changes()
            if self._running:  # the last backward pass raised before its end
                self._running = False
                self._abandon()
        if self.broadcast_buffers and self._sync and self.world_size > 1:
            broadcast(list(self.module.buffers()), self.group)
        result = self.module(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.grad_fn.metadata[self] = "averages its gradients"  # and lives until then
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block nothing is sent: gradients add up on each rank until a backward pass outside of
        it.

        What counts is where ``backward()`` is called (torch's DDP looks at the forward pass).
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Inside the block several backward passes count as one, which ends with it: gradients are averaged then, if
        they are at all."""
        syncs = self._sync
        with self.no_sync():
            yield
        if syncs:
            self.sync()

    def sync(self) -> None:
        """Average what was added up inside ``no_sync`` without another backward pass, as at the end of one."""
        if self.world_size > 1:
            self._arrived = {}
            self._end_of_backward()

    @abstractmethod
    def _ready(self, index: int) -> None:
        """The gradient of parameter `index` is final on this rank."""

    @abstractmethod
    def _average(self, unused: Sequence[int]) -> None:
        """Make every gradient the mean over the ranks; those of `unused` are None here and count as zero."""

    @abstractmethod
    def _abandon(self) -> None:
        """Wait for what is still under way and forget it."""

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        refuse_gradient(self._names[index], parameter.grad)
        if not self._sync:
            return
        if not self._running:
            self._running, self._arrived = True, {}
            Variable._execution_engine.queue_callback(self._end_of_backward)
        if index in self._arrived:
            raise RuntimeError(f"the gradient of {self._names[index]!r} arrived twice in one backward pass")
        self._arrived[index] = None
        self._ready(index)

    def _end_of_backward(self) -> None:
        self._running = False
        # A gradient left by an earlier backward pass (under no_sync, say) waits for its mean like all others.
        unused = [i for i, p in enumerate(self._params) if i not in self._arrived and p.grad is None]
        if unused and not self.find_unused_parameters:
            self._abandon()
            names = ", ".join(repr(self._names[i]) for i in unused)
            raise RuntimeError(
                f"no gradient for {names} on rank {dist.get_rank(self.group)}: the loss does not depend on it, "
                "or the backward pass came in parts. Wrap with find_unused_parameters=True if some parameters rest on "
                "purpose, or freeze them before wrapping; checkpoint with use_reentrant=False; where a schedule splits "
                "backward passes (zero-bubble), run them all inside no_sync() and call sync() at the end"
            )
        self._average(unused)
        if self.find_unused_parameters:
            self._forget_unused(unused)

    def _forget_unused(self, unused: Sequence[int]) -> None:
        for index, used in enumerate(self._used_somewhere(unused, self.group)):
            if not used and not self._params[index].grad.any():  # an exchange may bring what it left out before
                self._params[index].grad = None

    def _used_somewhere(self, unused: Sequence[int], *groups: dist.ProcessGroup | None) -> list[int]:
        """For each parameter 1 if some rank of `groups` has used it, else 0."""
        used = torch.ones(len(self._params), dtype=torch.int32, device=self._params[0].device)
        used[list(unused)] = 0
        for group in groups:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        return used.tolist()  # type: ignore[no-any-return]

    def _refuse_changes(self) -> None:
        refuse_changes(self._as_wrapped, signature(self.module))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state dict, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module. Every rank must load the same state: nothing is sent."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def global_mean_loss(loss_sum: Tensor, num_tokens: int, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The loss whose mean gradient over the ranks is that of the mean over all tokens of all ranks.

    `loss_sum` is this rank's loss summed over its tokens, `num_tokens` how many these are (0 is allowed).
    Returns N · `loss_sum` / (tokens of all ranks), which takes one all-reduce of 8 bytes. With accumulation,
    `num_tokens` is the rank's number of tokens in the whole step, the same in each call. ``ValueError`` if no
    rank has a token, and for a `group` without this rank.
    """
    _refuse_group(group)
    total = torch.tensor(num_tokens, dtype=torch.int64, device=loss_sum.device)
    dist.all_reduce(total, group=group)
    if total.item() <= 0:
        raise ValueError(f"num_tokens must be above 0 on some rank, not {total.item()} in total")
    return loss_sum * (dist.get_world_size(group) / total.item())


def _refuse_group(group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("no process group: call this in a rank of lab.run, or after init_process_group")
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must contain this rank ({dist.get_rank()}), and does not")


def _refuse_strangers(module: nn.Module, group: Group) -> None:
    everyone = set(dist.get_process_group_ranks(group))
    for name, parameter in module.named_parameters():
        own = dist.get_process_group_ranks(group_of(parameter, group))
        if not everyone.issuperset(own):
            raise ValueError(f"group must contain all ranks that hold {name!r}, {own}, and does not")


def _trainable(module: nn.Module) -> tuple[list[str], list[Tensor]]:
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("module must have a parameter that requires a gradient, and has none")
    return [name for name, _ in named], [parameter for _, parameter in named]
