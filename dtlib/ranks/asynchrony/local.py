"""Local steps: each rank trains by itself for a while, then all take the mean; DiLoCo makes a step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.dp import Bucket
from dtlib.ranks.dp.bucketed import Exchange, Started, all_reduce
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import refuse_unlike_calls, size_of
from dtlib.ranks.shared.replicas import begin_alike, refuse_changes, refuse_own, signature
from dtlib.theory.valid import amount, flag, whole

from .flat import described, in_a_row, joined, statistics, trained

STATES = ("kept", "averaged", "restarted")


@dataclass
class _UnderWay:
    """A meeting that has begun: about which part, after which step it ends, which share of its own a rank keeps."""

    number: int
    until: int
    kept: float
    flat: Tensor | None
    started: Started | None = None

    def arrived(self) -> Tensor | None:
        """What all have said, once it is there."""
        if self.started is not None:
            self.started.wait()
        self.started = None
        return self.flat

    def saved(self) -> tuple[int, int, float, Tensor | None]:
        """All of it, copied."""
        flat = self.arrived()
        return self.number, self.until, self.kept, None if flat is None else flat.clone()


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
    bursts. With `overlap` τ, H/F at most, a part is on its way while τ more steps are taken. Then the old weights step
    along what has arrived, and a rank's become `kept` times its own and 1 − `kept` times these. So ranks' weights stay
    apart; `common` has those of all (Douillard et al. 2025, arXiv 2501.18512, where `kept` is α).
    ``inside=(steps, group)`` lets a smaller group take its mean every so many steps in between, unless all meet then.
    In the first `warm_up` steps all meet after each, without delay.

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
        overlap: int = 0,
        kept: float = 0.5,
        inside: tuple[int, dist.ProcessGroup] | None = None,
        warm_up: int = 0,
        group: Group = None,
    ) -> None:
        parameters, self.group, self.n = trained(model, group), group, size_of(group)
        self.local_steps, self.warm_up = whole("local_steps", local_steps, 1), whole("warm_up", warm_up, 0)
        self.fragments = whole("fragments", fragments, 1)
        if self.local_steps % self.fragments or self.fragments > len(parameters):
            raise ValueError(f"fragments must divide local_steps, {self.local_steps}, and be at most the number of "
                             f"parameters, {len(parameters)}; {self.fragments} is not so")  # fmt: skip
        self.overlap, self.kept = whole("overlap", overlap, 0), amount("kept", kept)
        if self.overlap * self.fragments > self.local_steps:
            raise ValueError(f"overlap must be at most local_steps over fragments, not {overlap}")
        if self.kept >= 1:
            raise ValueError(f"kept must be below 1, not {kept}")
        if states not in STATES:
            raise ValueError(f"states must be one of {', '.join(STATES)}, not {states!r}")
        if not callable(exchange):
            raise ValueError(f"exchange must be a function of a bucket and a group, not {exchange!r}")
        if outer is not None and not callable(outer):
            raise ValueError(f"outer must be a function of parameters that makes an optimizer, not {outer!r}")
        if inside is not None and not (isinstance(inside, tuple) and len(inside) == 2):
            raise ValueError(f"inside must be steps and a group, not {inside!r}")
        self.statistics = list(statistics(model).values())
        if self.statistics and average_buffers is None:
            raise ValueError(f"average_buffers must be True or False for a model with {', '.join(statistics(model))}")
        self.average_buffers = average_buffers is not None and flag("average_buffers", average_buffers)
        stepped = {id(each) for own in optimizer.param_groups for each in own["params"]}
        if stepped.isdisjoint(map(id, parameters.values())):
            raise ValueError(
                "optimizer must step parameters of model, and steps none of them: one of ZeRO's steps pieces"
            )
        weight = amount("weight", weight)
        if inside is not None:
            whole("inside", inside[0], 1)
            size_of(inside[1])
            refuse_own(model, inside[1], "inside")
        rules = f"local_steps={local_steps}, fragments={fragments}, warm_up={warm_up}, states={states}, "
        rules += f"overlap={overlap}, kept={kept}, "
        rules += f"outer={outer is not None}, inside={inside and inside[0]}, average_buffers={average_buffers}"
        refuse_unlike_calls("LocalSGD", f"{rules}: {described(parameters)}", group)
        self.model, self.optimizer, self.states, self.exchange = model, optimizer, states, exchange
        self.steps = 0
        begin_alike(model, group)
        self._as_wrapped = signature(model)
        self.share = _share(weight, group)
        self.inside = None if inside is None else (inside[0], inside[1], _share(weight, inside[1]))
        names = in_parts({name: each.numel() for name, each in parameters.items()}, self.fragments)
        self._parts = [{name: parameters[name] for name in part} for part in names]
        self._old: list[list[nn.Parameter]] = []
        self._under_way: _UnderWay | None = None
        if outer is not None or exchange is not all_reduce or overlap:
            self._old = [[nn.Parameter(p.detach().clone()) for p in part.values()] for part in self._parts]
        self.outer = [] if outer is None else [outer(old) for old in self._old]

    def step(self) -> None:
        """A step of the inner optimizer, and a meeting where one is due. ``RuntimeError`` where the model's parameters
        are no longer those that meet."""
        refuse_changes(self._as_wrapped, signature(self.model))
        self.optimizer.step()
        self.steps += 1
        self._arrive()
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

    def common(self) -> dict[str, Tensor]:
        """By name what the last meetings made, the same on all ranks, copied; what is under way is not in it. Empty
        without `outer`, an `exchange` and `overlap`: then ranks have the same weights after a meeting."""
        pairs = zip(self._parts, self._old, strict=False)
        return {n: each.detach().clone() for part, old in pairs for n, each in zip(part, old, strict=True)}

    @torch.no_grad()
    def _meet(self, number: int) -> None:
        """Begin a meeting about a part, and end it, unless steps are to be taken in between."""
        part, flat, started = self._parts[number], None, None
        if self._old:
            parameters = list(part.values())
            flat = (in_a_row(self._old[number]) - in_a_row(parameters)).mul_(self.share)
            views = {n: v.view(p.shape) for (n, p), v in zip(part.items(), _split(flat, parameters), strict=True)}
            started = self.exchange(Bucket(flat, views, group=self.group), self.group) if self.n > 1 else None
        late, kept = (self.overlap, self.kept) if self.overlap and self.steps > self.warm_up else (0, 0.0)
        self._under_way = _UnderWay(number, self.steps + late, kept, flat, started)
        self._arrive()

    @torch.no_grad()
    def _arrive(self) -> None:
        """End the meeting that is under way, if it is due."""
        if (ends := self._under_way) is None or ends.until > self.steps:
            return
        self._under_way = None
        number, flat, parameters = ends.number, ends.arrived(), list(self._parts[ends.number].values())
        if flat is None:
            self._mean(parameters, self.share, self.group)
        else:
            old = self._old[number]
            if self.outer:
                for each, part in zip(old, _split(flat, old), strict=True):
                    each.grad = part.view(each.shape)
                self.outer[number].step()
                self.outer[number].zero_grad()
            else:
                in_a_row(old).sub_(flat)
            common, now = in_a_row(old), in_a_row(parameters)
            now.lerp_(common, 1 - ends.kept) if ends.kept else now.copy_(common)
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
        """All that this rank needs beside the model's own state to go on to the bit: each rank saves its own, all after
        the same step, as what is under way is waited for."""
        state: dict[str, Any] = {"steps": self.steps, "optimizer": self.optimizer.state_dict()}
        state["old"] = [[each.detach().clone() for each in old] for old in self._old]
        state["outer"] = [each.state_dict() for each in self.outer]
        state["under_way"] = self._under_way and self._under_way.saved()
        if hasattr(self.exchange, "state_dict"):
            state["exchange"] = self.exchange.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another was. ``ValueError`` where ranks come with states of different steps: they would meet at
        different times; and for the state of a `LocalSGD` with other options, before anything is changed."""
        if not isinstance(state, Mapping) or not {"steps", "optimizer", "old", "outer", "under_way"} <= state.keys():
            raise ValueError("state must be what state_dict made")
        sizes = [[each.numel() for each in part] for part in state["old"]], len(state["outer"])
        if sizes != ([[each.numel() for each in part] for part in self._old], len(self.outer)):
            raise ValueError("state must be of a LocalSGD with these fragments, outer, exchange and overlap")
        refuse_unlike_calls("LocalSGD.load_state_dict", f"steps={state['steps']}", self.group)
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for mine, old in zip(self._old, state["old"], strict=True):
            in_a_row(mine).copy_(joined(old))
        self._under_way = _UnderWay(*state["under_way"]) if state["under_way"] else None
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
