"""Local steps: each rank trains by itself for a while, then all take the mean; DiLoCo makes a step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.dp import Bucket
from dtlib.ranks.dp.bucketed import Exchange, all_reduce
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import refuse_unlike_calls, size_of
from dtlib.ranks.shared.replicas import begin_alike
from dtlib.theory.valid import amount, flag, whole

from .flat import described, in_a_row, joined, statistics, trained

STATES = ("kept", "averaged", "restarted")


class LocalSGD:
    """An optimizer that steps on this rank alone, and every `local_steps` steps lets all ranks of `group` meet.

    Ranks begin with the weights and buffers of rank 0. When they meet:

    - without `outer` each takes the mean of all weights, θ ← Σ w_r θ_r / Σ w_r, with this rank's `weight` (how many
      samples it has, in federated averaging: McMahan et al. 2017, arXiv 1602.05629);
    - with `outer`, which makes an optimizer of a list of parameters, all step from the weights of their last meeting,
      taking Σ w_r (θ_old − θ_r) / Σ w_r for a gradient. ``SGD(lr=0.7, momentum=0.9, nesterov=True)`` is DiLoCo's
      (Douillard et al. 2023, arXiv 2311.08105). It keeps the old weights and its own states beside the inner ones.
    - what an `exchange` of `dtlib.ranks.compression` makes of these differences travels instead, if one is given.

    `states` says what becomes of the inner optimizer's tensors that are as large as a parameter: each rank's stay
    ("kept"), all take their mean ("averaged", as many bytes again for each), or they are forgotten ("restarted").
    A model with running statistics must say whether `average_buffers`: a mean of weights beside statistics of other
    weights is no model.

    With `fragments` F the parameters travel in F parts, one every H/F steps, each every H: as many bytes, in smaller
    bursts (Douillard et al. 2025, arXiv 2501.18512), each waited for: nothing hides behind computing.
    ``inside=(steps, group)`` lets a smaller group take its mean every
    so many steps in between, unless all meet then. In the first `warm_up` steps all meet after each.

    Of the parameters only those that require a gradient travel: with N ranks an all-reduce of D bytes a meeting.
    At the first one they are moved together in memory, where they are averaged without a copy. All ranks must step
    equally often. ``ValueError`` on all of them, before anything is sent, for what cannot be or differs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        local_steps: int,
        outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        weight: float = 1.0,
        states: str = "kept",
        average_buffers: bool | None = None,
        exchange: Exchange = all_reduce,
        fragments: int = 1,
        inside: tuple[int, dist.ProcessGroup] | None = None,
        warm_up: int = 0,
        group: Group = None,
    ) -> None:
        parameters, self.group, self.n = trained(model), group, size_of(group)
        self.local_steps, self.warm_up = whole("local_steps", local_steps, 1), whole("warm_up", warm_up, 0)
        self.fragments = whole("fragments", fragments, 1)
        if self.local_steps % self.fragments or self.fragments > len(parameters):
            raise ValueError(f"fragments must divide local_steps, {self.local_steps}, and be at most the number of "
                             f"parameters, {len(parameters)}; {self.fragments} is not so")  # fmt: skip
        if states not in STATES:
            raise ValueError(f"states must be one of {', '.join(STATES)}, not {states!r}")
        if not callable(exchange):
            raise ValueError(f"exchange must be a function of a bucket and a group, not {exchange!r}")
        self.statistics = list(statistics(model).values())
        if self.statistics and average_buffers is None:
            raise ValueError(f"average_buffers must be True or False for a model with {', '.join(statistics(model))}")
        self.average_buffers = average_buffers is not None and flag("average_buffers", average_buffers)
        weight = amount("weight", weight)
        if inside is not None:
            whole("inside", inside[0], 1)
            size_of(inside[1])
        rules = f"local_steps={local_steps}, fragments={fragments}, warm_up={warm_up}, states={states}, "
        rules += f"outer={outer is not None}, inside={inside and inside[0]}, average_buffers={average_buffers}"
        refuse_unlike_calls("LocalSGD", f"{rules}: {described(parameters)}", group)
        self.model, self.optimizer, self.states, self.exchange = model, optimizer, states, exchange
        self.steps = 0
        begin_alike(model, group)
        self.share = _share(weight, group)
        self.inside = None if inside is None else (inside[0], inside[1], _share(weight, inside[1]))
        names = in_parts({name: each.numel() for name, each in parameters.items()}, self.fragments)
        self._parts = [{name: parameters[name] for name in part} for part in names]
        self._old: list[list[nn.Parameter]] = []
        if outer is not None or exchange is not all_reduce:
            self._old = [[nn.Parameter(p.detach().clone()) for p in part.values()] for part in self._parts]
        self.outer = [] if outer is None else [outer(old) for old in self._old]

    def step(self) -> None:
        """A step of the inner optimizer, and a meeting where one is due."""
        self.optimizer.step()
        self.steps += 1
        due = [number for number in range(self.fragments) if self._is_due(number)]
        for number in due:
            self._meet(number)
        if not due and self.inside is not None and self.steps % self.inside[0] == 0:
            self._mean([each for part in self._parts for each in part.values()], self.inside[2], self.inside[1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def _is_due(self, number: int) -> bool:
        after = self.steps - self.warm_up
        return (
            after <= 0
            or after % self.local_steps == (number + 1) * self.local_steps // self.fragments % self.local_steps
        )

    @torch.no_grad()
    def _meet(self, number: int) -> None:
        part = self._parts[number]
        parameters = list(part.values())
        if not self._old:
            self._mean(parameters, self.share, self.group)
        else:
            old = self._old[number]
            before, now = in_a_row(old), in_a_row(parameters)
            flat = (before - now).mul_(self.share)
            views = {n: v.view(p.shape) for (n, p), v in zip(part.items(), _split(flat, parameters), strict=True)}
            if self.n > 1 and (started := self.exchange(Bucket(flat, views, group=self.group), self.group)) is not None:
                started.wait()
            if self.outer:
                for each, view in zip(old, views.values(), strict=True):
                    each.grad = view
                self.outer[number].step()
                self.outer[number].zero_grad()
            else:
                before.sub_(flat)
            now.copy_(in_a_row(old))
        if self.average_buffers and number == self.fragments - 1:
            self._mean(self.statistics, self.share, self.group)
        if self.states == "restarted":
            for each in parameters:
                self.optimizer.state.pop(each, None)
        elif self.states == "averaged":
            self._mean([s for p in parameters for s in _states(self.optimizer, p)], self.share, self.group)

    @torch.no_grad()
    def _mean(self, tensors: Sequence[Tensor], share: float, group: Group) -> None:
        """Of all ranks of `group`, by their shares of its weight."""
        n = dist.get_world_size(group)
        for dtype in dict.fromkeys(each.dtype for each in tensors) if n > 1 else ():
            flat = in_a_row([each for each in tensors if each.dtype is dtype])
            flat.div_(n) if share == 1 / n else flat.mul_(share)
            dist.all_reduce(flat, group=group)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs beside the model's own state to go on to the bit: each rank saves its own."""
        state: dict[str, Any] = {"steps": self.steps, "optimizer": self.optimizer.state_dict()}
        state["old"] = [[each.detach().clone() for each in old] for old in self._old]
        state["outer"] = [each.state_dict() for each in self.outer]
        if hasattr(self.exchange, "state_dict"):
            state["exchange"] = self.exchange.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another was. ``ValueError`` where ranks come with states of different steps: they would meet at
        different times."""
        refuse_unlike_calls("LocalSGD.load_state_dict", f"steps={state['steps']}", self.group)
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for mine, old in zip(self._old, state["old"], strict=True):
            in_a_row(mine).copy_(joined(old))
        for outer, theirs in zip(self.outer, state["outer"], strict=True):
            outer.load_state_dict(theirs)
        if hasattr(self.exchange, "load_state_dict"):
            self.exchange.load_state_dict(state["exchange"])


def in_parts(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Neighbours together, in `parts` parts of about equal size, none of them empty."""
    names, found, done, total = list(sizes), list[list[str]](), 0, sum(sizes.values())
    for number in range(parts):
        part, most = list[str](), len(names) - (parts - number - 1)
        while names and len(part) < most and (not part or done + sizes[names[0]] / 2 <= total * (number + 1) / parts):
            done += sizes[names[0]]
            part.append(names.pop(0))
        found.append(part)
    found[-1] += names
    return found


def _share(weight: float, group: Group) -> float:
    total = torch.tensor(float(weight), dtype=torch.float64)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    if total <= 0:
        raise ValueError(f"weight must be above 0 on some rank, and is {weight} on all")
    return weight / total.item()


def _split(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    return flat.split([each.numel() for each in like])


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    own = optimizer.state.get(parameter, {})
    return [own[k] for k in sorted(own) if isinstance(own[k], Tensor) and own[k].shape == parameter.shape]
