"""Stage 3: a rank keeps its chunk of the weights, and has the full ones of a module only while it uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from dtlib.theory.zero import outer_parts

from . import _check
from ._flat import Flat
from ._unit import Unit, assign, choose
from .base import MakeOptimizer, Zero


class ZeroStage3(Zero):
    """ZeRO stage 3: weights, gradients and optimizer states are split among the ranks. See `Zero` for the arguments.

    | kept by a rank of N | bytes |
    |---|---|
    | weights, gradients, master copy and optimizer states | of Ψ/N elements, one more at most for each unit and dtype |
    | for a moment | the full weights of the units in use and of `prefetch` more, the full gradient of a unit |

    `units` are modules inside `module` that are gathered one by one (by default the children of its outermost
    ``ModuleList`` and ``Sequential`` containers). What is in none of them belongs to `module` itself, the outermost
    unit, and so does a parameter that several units share; its gradients are reduced child by child of `module`,
    small ones together.

    - **forward** of a unit: its weights are gathered before and freed after: (N−1)/N · Ψ · width bytes sent in all. The
      next unit's are on their way meanwhile, in the order of the last forward pass.
    - **backward**: gathered again when the gradient of an output arrives, and freed when the last gradient of a weight
      is there: (N−1)/N · Ψ · width. The gradients are reduce-scattered at once: (N−1)/N · Ψ · width.
    - **step**: nothing is sent.

    With ``reshard_after_forward=False`` weights stay from forward to backward, and the second gather is saved. All
    ranks must run the same units in the same order, backward too: where a unit gets gradients on some ranks only
    (`find_unused_parameters`), weights must stay, as the other ranks would not join its second gather. Between passes
    a parameter of the module is the flat piece that this rank owns: see the weights with `gathered` or ``state_dict``.
    Inside ``no_sync`` the full gradient stays.

    With `quantised_block` weights travel in 8 bits, with one float32 scale for each block of so many elements (ZeRO++):
    (N−1)/N · Ψ · (1 + 4/block) bytes for a gather. All ranks compute with the same rounded weights, off by 1/254 of the
    largest in their block at most; what is kept, updated and saved is exact.

    ``ValueError`` for a unit that is no part of `module` or a negative `prefetch`; ``TypeError`` in the forward pass of
    a unit whose output hides its tensors in an object of unknown kind. Source: Rajbhandari et al. 2020, arXiv
    1910.02054, sections 5.3 and 7.2.2.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        units: Iterable[nn.Module] | None = None,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        quantised_block: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch must be a whole number of at least 0, not {prefetch!r}")
        if quantised_block is not None and (not isinstance(quantised_block, int) or quantised_block < 1):
            raise ValueError(f"quantised_block must be a whole number of at least 1, or None, not {quantised_block!r}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        self.prefetch, self.reshard_after_forward = prefetch, reshard_after_forward
        self.quantised_block = quantised_block
        self._chosen = choose(module, units)
        self._held = False  # inside `gathered`
        super().__init__(module, make_optimizer, **options)
        _check.sharded.update(unit.module for unit in self._units)
        self._expected = list(self._units)  # in the order of the last forward pass
        self._entered: list[Unit] = []
        self._left: list[Unit] = []
        for unit in self._units:
            unit.module.register_forward_pre_hook(self._before(unit), prepend=True)
            unit.module.register_forward_hook(self._after(unit), with_kwargs=True)

    @property
    def units(self) -> dict[str, int]:
        """The units that have parameters, by name ("" is the module itself): bytes of their full weights."""
        return {unit.name: unit.full_bytes for unit in self._units}

    def _lay_out(self) -> list[Flat]:
        where = assign(self.module, self._chosen)
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        self._all_names += frozen
        named = {**dict(zip(self._names, self._params, strict=True)), **frozen}
        everything = list(named.values())
        kinds_of = [(name, p.nbytes, (not p.requires_grad, p.dtype, p.device)) for name, p in named.items()]
        parts = outer_parts(each for each in kinds_of if where[id(named[each[0]])] == 0)
        members: dict[int, dict[Any, list[int]]] = {position: {} for position in range(len(self._chosen))}
        for index, (name, _, kind) in enumerate(kinds_of):
            members[where[id(named[name])]].setdefault((parts.get(name, ""), kind), []).append(index)
        self._units, self._unit_of, number = [], {}, 0
        for (name, module), kinds in zip(self._chosen, members.values(), strict=True):
            unit = Unit(name, module, self._peers, self.quantised_block)
            for indices in kinds.values():
                params = [everything[i] for i in indices]
                flat = Flat(number, indices, params, self._peers.rank, self._peers.n)
                unit.add(flat, params)
                self._unit_of[flat.number] = unit
                number += 1
            if unit.flats:
                self._units.append(unit)
        return [flat for unit in reversed(self._units) for flat in unit.trainable]

    def _flats_with_frozen(self) -> list[Flat]:
        return [flat for unit in self._units for flat in unit.flats]

    # Around the forward pass of a unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; ``RuntimeError`` if its parameters are no longer those that were wrapped."""
        self._entered, self._left = [], []
        result = super().forward(*args, **kwargs)
        self._expected = self._entered
        for unit in self._units:
            if unit.state == "coming":  # expected, and not used this time
                unit.send_away()
        return result

    def _before(self, unit: Unit) -> Any:
        def before_forward(module: nn.Module, args: Any) -> None:
            unit.bring()
            if self._running:  # an activation checkpoint computes it again
                return
            at = len(self._entered)
            self._entered.append(unit)
            if at < len(self._expected) and self._expected[at] is unit:
                for following in self._expected[at + 1 : at + 1 + self.prefetch]:
                    following.start()

        return before_forward

    def _after(self, unit: Unit) -> Any:
        def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self._await_gradient(unit, output)
            if self._running:
                return
            self._left.append(unit)
            if torch.is_grad_enabled() and unit.has_frozen:
                self._await_inputs(unit, (args, kwargs))
            if not self._held and (self.reshard_after_forward or not torch.is_grad_enabled()):
                unit.send_away()

        return after_forward

    def _await_gradient(self, unit: Unit, output: Any) -> None:
        leaves = tree_leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        unknown = [leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | complex | str | None)]
        if unknown and not tensors:
            raise TypeError(
                f"the output of {unit.name or 'module'} hides its tensors in a {type(unknown[0]).__name__}: return "
                "tensors, or tuples, lists and dictionaries of them, or register it with torch.utils._pytree"
            )
        for tensor in tensors:
            tensor.register_hook(lambda gradient: self._before_backward(unit))

    def _await_inputs(self, unit: Unit, inputs: Any) -> None:
        """The gradients of inputs need the frozen weights, perhaps after the last gradient of a weight is there."""
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]

        def are_there(gradients: Sequence[Tensor | None]) -> None:
            unit.open_calls -= 1
            self._let_go(unit)

        if tensors:
            unit.open_calls += 1
            register_multi_grad_hook(tensors, are_there)

    # Around its backward pass

    def _before_backward(self, unit: Unit) -> None:
        self._begin()
        if unit.done:
            return
        unit.bring()
        if unit in self._left:
            at = len(self._left) - 1 - self._left[::-1].index(unit)
            for following in self._left[max(0, at - self.prefetch) : at][::-1]:
                if not following.done:
                    following.start()

    def _complete(self, flat: Flat) -> None:
        self._let_go(self._unit_of[flat.number])
        super()._complete(flat)

    def _let_go(self, unit: Unit) -> None:
        if not self._running or unit.open_calls or any(flat.missing for flat in unit.trainable):
            return
        unit.done = True
        if not self._held:
            unit.send_away()

    def _keep(self, flat: Flat, own: Tensor) -> None:
        flat.grad = own.clone() if flat.grad is None else flat.grad.add_(own)
        flat.buffer = None

    def _end_of_backward(self) -> None:
        try:
            super()._end_of_backward()
        finally:
            self._send_all_away()

    def _abandon(self) -> None:
        super()._abandon()
        self._send_all_away()

    def _publish(self) -> None:
        self._send_all_away()  # what is here is what the weights were

    def _send_all_away(self) -> None:
        for unit in self._units:
            unit.done = False
            if not self._held:
                unit.send_away()

    # To see and set the weights

    @contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[nn.Module]:
        """The module with all its full weights, inside the block; every rank must enter it.

        What is changed there is forgotten at the end, unless `write`: then each rank keeps its chunk of what it has, so
        all must make the same changes.
        """
        for unit in self._units:
            unit.bring(exact=True)
        self._held = True
        try:
            yield self.module
            if write:
                for unit in self._units:
                    unit.write_back()
        finally:
            self._held = False
            self._send_all_away()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's full state dict, under its own names and in memory of its own. Every rank must call it: the
        weights are gathered unit by unit."""
        full: dict[int, Tensor] = {}
        for unit in self._units:
            if not self._held:
                unit.bring(exact=True)
            full.update((id(p), p.detach().clone()) for p in unit.params.values())
            if not self._held:
                unit.send_away()
        state = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            state[prefix + name] = full[id(parameter)]
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a full state dict into the wrapped module. Every rank must load the same."""
        with self.gathered(write=True):
            return super().load_state_dict(*args, **kwargs)
