"""ZeRO on a page: the three stages, one parameter at a time, with nothing under way while the rank computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dtlib.ranks.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast

at_the_end = torch.autograd.Variable._execution_engine.queue_callback  # of a backward pass


class SimpleZero(nn.Module):
    """Train `module` as one process would, and keep what `stage` 1, 2 or 3 keeps (``ValueError`` for another).

    Rank r of N owns the r-th of N pieces of each flattened parameter; `optimizer`, which `make_optimizer` makes from
    `param_groups` (by default one of all parameters), steps pieces. D is the bytes of all weights, or gradients:

    | moment | stage 1 | stage 2 | stage 3 | sent |
    |---|---|---|---|---|
    | before a unit's forward and its backward pass, after it | | | gather, free | (N−1)/N · D each |
    | a gradient is there | reduce to the owners | reduce, free | reduce, free | (N−1)/N · D |
    | after the update | gather | gather | | (N−1)/N · D |

    `units` are modules inside `module`, which take and return one tensor; what is in none of them, or in several, is a
    unit of its own. All ranks use all parameters in each backward pass, and nothing accumulates over several.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Any], Optimizer],
        *,
        stage: int,
        units: Iterable[nn.Module] = (),
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
        self.module, self.stage, self.group = module, stage, group
        for tensor in (*module.parameters(), *module.buffers()):
            tree_broadcast(tensor.detach(), group=group)  # all ranks begin alike
        self.full = {p: p.detach().clone(memory_format=torch.contiguous_format) for p in module.parameters()}
        self.pieces = dict[Tensor, nn.Parameter]()
        for parameter, full in self.full.items():
            parameter.data, mine = full, self._mine(full)
            self.pieces[parameter] = nn.Parameter(mine.clone() if stage == 3 else mine, parameter.requires_grad)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reduce)
        groups = [{"params": module.parameters()}] if param_groups is None else param_groups
        self.optimizer = make_optimizer(
            [{**each, "params": [self.pieces[p] for p in each["params"] if p.requires_grad]} for each in groups]
        )
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        if stage < 3:
            trained = [p for p in self.full if p.requires_grad]
            self.optimizer.register_step_post_hook(lambda *_: self._gather(trained))
            return
        inside, units = Counter(p for unit in units for p in unit.parameters()), list(units)
        self._watch(module, [p for p in self.full if inside[p] != 1])
        for unit in units:
            self._watch(unit, [p for p in unit.parameters() if inside[p] == 1])

    def _mine(self, full: Tensor) -> Tensor:
        return full.view(-1).tensor_split(dist.get_world_size(self.group))[dist.get_rank(self.group)]

    def forward(self, *inputs: Any) -> Any:
        """The module's forward."""
        return self.module(*inputs)

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> None:
        """A gradient is there: its owners get the mean, and stages 2 and 3 forget the rest."""
        mean = ring_reduce_scatter(parameter.grad.flatten(), "mean", group=self.group)
        if self.stage == 1:
            parameter.grad = parameter.grad.contiguous()
            mean = self._mine(parameter.grad).copy_(mean)
        else:
            parameter.grad = None
        self.pieces[parameter].grad = mean

    @torch.no_grad()
    def _gather(self, params: Iterable[Tensor]) -> None:
        for parameter in params:
            full = self.full[parameter]
            full.untyped_storage().resize_(full.nbytes)
            ring_all_gather(self.pieces[parameter], num_elements=full.numel(), out=full.view(-1), group=self.group)
            parameter.data = full

    def _free(self, params: Iterable[Tensor]) -> None:
        """Autograd keeps views of the full weights: so it is their memory that comes and goes."""
        for parameter in params:
            parameter.data = self.pieces[parameter].detach()
            self.full[parameter].untyped_storage().resize_(0)

    def _watch(self, unit: nn.Module, params: list[Tensor]) -> None:
        """Stage 3: let the weights be there for the forward and the backward pass of a unit, and for no longer."""

        def after_forward(unit: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            self._free(params)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._gather(params))
            if inputs[0].requires_grad:  # its gradient is the last thing that the unit computes
                inputs[0].register_hook(lambda gradient: self._free(params))
            else:
                output.register_hook(lambda gradient: at_the_end(lambda: self._free(params)))

        self._free(params)
        unit.register_forward_pre_hook(lambda unit, inputs: self._gather(params))
        unit.register_forward_hook(after_forward)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for parameter, piece in self.pieces.items():
            parameter.grad = piece.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient so that its norm, over all ranks, is at most `max_norm`; returns the norm."""
        grads = [piece.grad for piece in self.pieces.values() if piece.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(norm, group=self.group)
        for grad in grads:
            grad.mul_((max_norm / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        return norm.sqrt()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's full state dict, a copy; every rank must call it."""
        self._gather(self.full if self.stage == 3 else ())
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        self._free(self.full if self.stage == 3 else ())
        return state
