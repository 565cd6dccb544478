"""PipeDream: a pipeline that never empties; a stage steps after each backward pass, and keeps versions of its weights.

The executor is the same as for every schedule. What is new happens around it: which weights a forward pass uses, and a
step of the optimizer after each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from dtlib.ranks.mesh import Group
from dtlib.ranks.model import next_token_loss
from dtlib.theory.pp import Action, pipedream

from .executor import Pipeline

WAYS = ("stashed", "vertical sync", "newest")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Versioned(nn.Module):
    """A stage r of p whose weights change while micro-batches are under way.

    Between a micro-batch's forward and its backward pass there are p − r − 1 steps. `way` says what is done about it:

    - ``"stashed"``: the gradient is taken at the weights of the forward pass; p − r versions are kept;
    - ``"vertical sync"``: all stages use the version that the first one had: the gradient is that of one model; p;
    - ``"newest"``: nothing. Activations of old weights are led back through new ones, which gives the gradient of no
      function at all. One version.

    `most_versions` says how many were kept at a time. ``ValueError`` for another `way`. Source: Narayanan et al. 2019,
    arXiv 1806.03377, section 3.3.
    """

    def __init__(self, stage: nn.Module, make_optimizer: MakeOptimizer, r: int, p: int, way: str = "stashed") -> None:
        super().__init__()
        if way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, not {way!r}")
        self.stage, self.way, self.r, self.p = stage, way, r, p
        self.optimizer = make_optimizer(stage.parameters())
        self.updates, self.micro_batch, self.most_versions = 0, 0, 1
        self.kept: dict[int, dict[str, Tensor]] = {0: self._aliases()}
        self.used: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Through the stage, with the version of its weights that this micro-batch is to use."""
        self.used[self.micro_batch] = self._version(self.micro_batch)
        return functional_call(self.stage, self.kept[self.used[self.micro_batch]], (x,))

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """What the executor is to do an action in: afterwards the optimizer steps, if it went backward."""
        self.micro_batch = action.micro_batch
        yield
        if action.kind == "B":
            self._step(action.micro_batch)

    def _version(self, i: int) -> int:
        """The steps that the weights have seen which micro-batch i uses."""
        if self.way == "newest":
            return 0  # the only one, which changes
        return max(0, i - (self.p - 1 if self.way == "vertical sync" else self.p - 1 - self.r))

    def _step(self, i: int) -> None:
        version, oldest = self.kept[self.used.pop(i)], self._version(i + 1)
        for name, parameter in self.stage.named_parameters():
            parameter.grad, version[name].grad = version[name].grad, None
            if self.way != "newest" and oldest <= self.updates:  # somebody still needs these numbers
                parameter.data = parameter.data.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.way != "newest":
            self.kept[self.updates] = self._aliases()
            self.kept = {k: each for k, each in self.kept.items() if k >= oldest}
        self.most_versions = max(self.most_versions, len(self.kept))

    def _aliases(self) -> dict[str, Tensor]:
        """The weights as leaves of their own: autograd does not notice when the optimizer writes into them."""
        return {name: each.data.requires_grad_(each.requires_grad) for name, each in self.stage.named_parameters()}


def train_pipedream(
    stage: nn.Module,
    make_optimizer: MakeOptimizer,
    inputs: Tensor,
    targets: Tensor,
    micro_batches: int,
    *,
    width: int,
    way: str = "stashed",
    dtype: torch.dtype = torch.float32,
    group: Group = None,
    loss: Callable[[Tensor, Tensor], Tensor] = next_token_loss,
) -> tuple[list[float], int]:
    """Train this rank's `stage` with `micro_batches` parts of a long batch, a step of the optimizer for each.

    `inputs` and `targets` (B, s) are the same on all ranks; `loss` gives a micro-batch's mean. Returns the losses, on
    the last rank, and the most versions of its weights that this rank kept. Errors as `Pipeline` and `Versioned`.
    """
    rank, n, losses = dist.get_rank(group), dist.get_world_size(group), []

    def noted(output: Tensor, target: Tensor) -> Tensor:
        losses.append(loss(output, target))
        return losses[-1]

    versioned = Versioned(stage, make_optimizer, rank, n, way)
    Pipeline(
        {rank: versioned}, pipedream(n, micro_batches), width=width, dtype=dtype, group=group, loss=noted,
        count=lambda targets: 1, around=versioned.around,
    ).step(inputs, targets)  # fmt: skip
    return [each.item() for each in losses], versioned.most_versions
