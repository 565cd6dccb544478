"""Units: the modules whose weights stage 3 gathers, uses and frees together, and when it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.replicas import group_of, weakly

from .shard import Shard


class Unit:
    """One module's own parameters, those of the units inside it left out, frozen ones apart: a shard for each dtype and
    group."""

    def __init__(self, name: str, module: nn.Module, shards: Sequence[Shard]) -> None:
        self.name, self.module, self.shards = name, module, shards
        self.open_calls = set[int]()  # calls of its forward whose backward pass has begun and not ended

    def start(self, *, exact: bool = False) -> None:
        """Start to gather its weights, unless they are here or coming; `exact`: not rounded for the journey."""
        for shard in self.shards:
            if shard.state == "away":
                shard.gather(exact=exact)

    def bring(self) -> None:
        """Return once its full weights are here."""
        self.start()
        for shard in self.shards:
            if shard.state == "coming":
                shard.wait()

    def send_away(self) -> None:
        """Free its full weights."""
        for shard in self.shards:
            if shard.state != "away":
                shard.free()


class Gathering:
    """Brings the weights of `units` before they are used, with those of the `prefetch` next ones, and frees them after.

    - Before a unit's forward pass, in the order of the last one; freed at its end, unless they `stay`.
    - Before its backward pass, when the gradient of an output arrives; freed when the gradients of all its weights and
      of all its inputs are there. Where no input needs one, or a leaf does, at the end: nothing tells that its graph is
      done.

    `begin` is called at the first sign of a backward pass.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int, stay: bool, begin: Callable[[], None]) -> None:
        self.units, self.prefetch, self.stay = units, prefetch, stay
        self.begin, self.in_backward, self.held, self._calls = begin, False, False, 0
        self._unit_of = {shard.number: unit for unit in units for shard in unit.shards}
        self._expected, self._entered, self._left = list(units), list[Unit](), list[tuple[int, Unit]]()
        for number, unit in enumerate(units):  # hooks know numbers: they keep no shard alive
            unit.module.register_forward_pre_hook(weakly(self._before_forward, number), prepend=True)
            unit.module.register_forward_hook(weakly(self._after_forward, number), with_kwargs=True)

    def begin_forward(self) -> None:
        """The whole module's forward pass begins."""
        self._entered, self._left = [], []

    def end_forward(self) -> None:
        """It is over: the next one is expected to have the same order."""
        self._expected = self._entered
        for unit in self.units:
            if any(shard.state == "coming" for shard in unit.shards):  # expected, and not used this time
                unit.send_away()

    def _before_forward(self, number: int, module: nn.Module, args: Any) -> None:
        unit = self.units[number]
        unit.bring()
        if self.in_backward:  # an activation checkpoint computes it again
            return
        at = len(self._entered)
        self._entered.append(unit)
        if self._expected[at : at + 1] == [unit]:
            for following in self._expected[at + 1 : at + 1 + self.prefetch]:
                following.start()

    def _after_forward(self, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        unit = self.units[number]
        if torch.is_grad_enabled():
            self._calls += 1
            self._await_gradients(number, self._calls, (args, kwargs), output)
        if self.in_backward:
            return
        self._left.append((self._calls, unit))
        if not self.held and not (self.stay and torch.is_grad_enabled()):
            unit.send_away()

    def _await_gradients(self, number: int, call: int, inputs: Any, output: Any) -> None:
        leaves, outputs = tree_leaves(output), _tensors_with_gradients(output)
        unknown = [leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | complex | str | None)]
        if unknown and not outputs:
            raise TypeError(
                f"the output of {self.units[number].name or 'module'} hides its tensors in a "
                f"{type(unknown[0]).__name__}: return tensors, or tuples, lists and dictionaries of them, or register "
                "it with torch.utils._pytree"
            )
        for tensor in outputs:
            # A node's own hook runs after those of its tensors: what has just finished is freed first.
            listen = tensor.register_hook if tensor.grad_fn is None else tensor.grad_fn.register_prehook
            listen(weakly(self._before_backward, number, call))
        tensors = _tensors_with_gradients(inputs)
        if outputs and tensors and not any(tensor.is_leaf for tensor in tensors) and not self.in_backward:
            register_multi_grad_hook(tensors, weakly(self._after_backward, number, call))

    def _before_backward(self, number: int, call: int, gradients: Any) -> None:
        unit = self.units[number]
        if torch.is_grad_enabled() and not self.held:  # as it is in a backward pass for others to follow
            raise RuntimeError(
                "a backward pass with create_graph=True needs the weights again, and stage 3 frees them at its end: "
                "take second derivatives inside gathered(), or at stage 1 or 2"
            )
        self.begin()
        unit.bring()
        if call not in unit.open_calls:
            unit.open_calls.add(call)
            before = [each for earlier, each in self._left if earlier < call]
            for following in before[: -self.prefetch - 1 : -1]:
                following.start()

    def _after_backward(self, number: int, call: int, gradients: Any) -> None:
        self.units[number].open_calls.discard(call)
        self.free_if_done(self.units[number].shards[0])

    def free_if_done(self, shard: Shard) -> None:
        """Free the weights of a shard's unit if its backward pass is over."""
        unit = self._unit_of.get(shard.number)
        if unit is None or self.held or not self.in_backward or unit.open_calls:
            return
        if not any(each.missing for each in unit.shards):
            unit.send_away()

    def send_all_away(self) -> None:
        """Free all full weights: a backward pass is over, or the weights have changed."""
        self.in_backward = False
        for unit in self.units:
            unit.open_calls.clear()
            if not self.held:
                unit.send_away()

    def bring_exact(self, unit: Unit) -> None:
        """Bring weights that are not rounded, where they travel so."""
        if not self.held and any(shard.quantised_block is not None for shard in unit.shards):
            unit.send_away()
        unit.start(exact=True)
        unit.bring()


def _tensors_with_gradients(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def choose(module: nn.Module, units: Iterable[nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """The units of `module` by name, itself first, in the order of registration: by default the children of its
    outermost ``ModuleList`` and ``Sequential`` containers. ``ValueError`` for one that is no part of `module`."""
    parts = {id(each) for each in module.modules()}
    wanted = {id(module), *(_children_of_containers(module) if units is None else ())}
    for each in units or ():
        if not isinstance(each, nn.Module):
            raise TypeError(f"units must be modules, not {each!r}")
        if id(each) not in parts:
            raise ValueError(f"units must be parts of module, and a {type(each).__name__} is none")
        wanted.add(id(each))
    return [(name, each) for name, each in module.named_modules() if id(each) in wanted]


def _children_of_containers(module: nn.Module) -> Iterator[int]:
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield id(child)
        else:
            yield from _children_of_containers(child)


def make_units(
    module: nn.Module,
    chosen: Sequence[tuple[str, nn.Module]],
    named: Sequence[tuple[str, Tensor]],
    make_shard: Callable[[dict[int, tuple[str, Tensor]]], Shard],
    group: Group,
) -> list[Unit]:
    """The `chosen` units that have parameters; `named` are all parameters, numbered as they stand.

    Each belongs to the innermost unit around all modules that have it.
    """
    number = {id(each): position for position, (_, each) in enumerate(chosen)}
    around: dict[int, list[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.split(".")[:-1]
        modules = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        units = [number[id(each)] for each in modules if id(each) in number]
        around[id(parameter)] = [unit for unit in around.get(id(parameter), units) if unit in units]
    members: dict[int, dict[Any, dict[int, tuple[str, Tensor]]]] = {}
    for index, (name, parameter) in enumerate(named):
        kind = parameter.requires_grad, parameter.dtype, parameter.device, group_of(parameter, group)
        members.setdefault(around[id(parameter)][-1], {}).setdefault(kind, {})[index] = name, parameter
    return [Unit(*chosen[each], [make_shard(own) for own in kinds.values()]) for each, kinds in sorted(members.items())]
