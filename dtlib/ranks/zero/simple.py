"""ZeRO on a page: the three stages, one parameter at a time, with nothing under way while the rank computes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.variable import Variable

from dtlib.ranks.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast
from dtlib.ranks.shared.parts import Slice, slice_of
from dtlib.ranks.shared.replicas import weakly


class SimpleZero:
    """Train `module` as one process would, and keep what `stage` 1, 2 or 3 keeps (``ValueError`` for another).

    Rank r of N owns the r-th of N pieces of each flattened parameter; `optimizer`, which `make_optimizer` makes from
    `param_groups` (by default one of all parameters), steps pieces. D is the bytes of all weights, or gradients:

    | moment | stage 1 | stage 2 | stage 3 | sent |
    |---|---|---|---|---|
    | before a unit's forward and its backward pass, after it | | | gather, free | (N−1)/N · D each |
    | a gradient is there | reduce to the owners | reduce, free | reduce, free | (N−1)/N · D |
    | after the update | gather | gather | | (N−1)/N · D |

    `units` are modules inside `module` that take and return one tensor and share no parameter; what is in none of them
    is one more. All ranks use all parameters in each backward pass, nothing accumulates over several, and gradients are
    not clipped: their norm lies on all ranks (`Zero` has ``clip_grad_norm_``), and torch's own is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        stage: int,
        units: Sequence[nn.Module] = (),
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
        self.module, self.stage, self.group, self.pieces = module, stage, group, dict[Tensor, nn.Parameter]()
        for tensor in (*module.parameters(), *module.buffers()):
            tree_broadcast(tensor.detach(), group=group)  # all ranks begin alike
        self.full = {p: p.detach().clone(memory_format=torch.contiguous_format) for p in module.parameters()}
        for parameter, full in self.full.items():
            parameter.data, mine = full, self._mine(full)
            piece = slice_of(mine.clone() if stage == 3 else mine, group, parameter.requires_grad)
            self.pieces[parameter] = piece
            if isinstance(piece, Slice):  # the parameter's gradient is refused to be clipped, too
                parameter.__class__, parameter.elsewhere = Slice, piece
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(weakly(self._reduce))
        trained = [p for p in self.full if p.requires_grad]
        groups = param_groups or [{"params": trained}]
        mine = [{**each, "params": [self.pieces[p] for p in each["params"] if p.requires_grad]} for each in groups]
        self.optimizer = make_optimizer(mine)
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        if stage < 3:
            self.optimizer.register_step_post_hook(lambda *_: self._gather(trained))
        else:
            inside = {p for unit in units for p in unit.parameters()}
            self._watch(module, [p for p in self.full if p not in inside])
            for unit in units:
                self._watch(unit, list(unit.parameters()))

    def _mine(self, full: Tensor) -> Tensor:
        return full.view(-1).tensor_split(dist.get_world_size(self.group))[dist.get_rank(self.group)]

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward."""
        return self.module(*inputs)

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> None:
        """A gradient is there: its owners get the mean, and stages 2 and 3 forget the rest."""
        mean = ring_reduce_scatter(parameter.grad.flatten(), "mean", group=self.group)
        parameter.grad = parameter.grad.contiguous() if self.stage == 1 else None
        self.pieces[parameter].grad = self._mine(parameter.grad).copy_(mean) if self.stage == 1 else mean

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
                else:  # the end of the backward pass tells
                    output.register_hook(
                        lambda _: Variable._execution_engine.queue_callback(lambda: self._free(params))
                    )

        self._free(params)
        unit.register_forward_pre_hook(lambda unit, inputs: self._gather(params))
        unit.register_forward_hook(after_forward)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for tensor in (*self.pieces, *self.pieces.values()):
            tensor.grad = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's full state dict, a copy; every rank must call it."""
        self._gather(self.full if self.stage == 3 else ())
        state = {name: value.clone() for name, value in self.module.state_dict(*args, **kwargs).items()}
        self._free(self.full if self.stage == 3 else ())
        return state
