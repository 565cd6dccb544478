"""A backward pass in two parts: the gradient of the input now, those of the weights later, each product once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class SplitBackward:
    """The backward pass of one forward pass through a module, from its input `x` to its output `y`.

    Where the way back to the input and the way to a weight part (at a product of both), `input_gradient` notes the
    gradient that passes, and goes on to the input alone; `weight_gradients` starts there. autograd computes of each
    operation only the gradients that are asked for, so no product is made twice. A custom autograd function that does
    not ask is carried out twice. If `x` needs no gradient, all of it is done later.

    A weight that is used in several places between `x` and `y` gets its gradient on the way to the input: from the
    later of two partings autograd would walk on to the earlier one, and count it again. It is added to ``.grad`` with
    the others.

    What passes the partings is kept until then, and of what the forward pass has `saved` only what the weights need:
    in the course's GPT both together take a quarter more than what was kept before. `parameters` are the weights whose
    gradients are asked for, by default all. The idea is that of Qi et al. 2024, arXiv 2401.10241, and of torch's own
    pipelining.
    """

    def __init__(
        self, x: Tensor, y: Tensor, parameters: Iterable[Tensor] | None = None, saved: Saved | None = None
    ) -> None:
        self.x, self.y, self.saved = x, y, saved
        self.parameters = None if parameters is None else {id(each) for each in parameters if each.requires_grad}
        self.reaches = x.requires_grad
        self.gradient: Tensor | None = None
        self.noted: list[tuple[Any, list[Tensor], list[Tensor | None]]] = []
        self.early: list[tuple[Tensor, Tensor]] = []

    def input_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of `x`, of its shape, from that of `y` (None for a loss); None where `x` needs none, or `y` does
        not depend on it."""
        ways = _Ways(self.y, self.x, self.parameters) if self.x.requires_grad and self.y.requires_grad else None
        self.reaches = ways is not None and ways.reach_x
        if ways is None or not ways.reach_x:
            self.gradient = gradient
            return None
        hooks = []
        for node, parameters in ways.partings.items():
            seen: list[Tensor | None] = []
            self.noted.append((node, parameters, seen))
            hooks.append(node.register_prehook(seen.extend))
        found, *early = torch.autograd.grad(
            self.y, [self.x, *ways.shared], gradient, retain_graph=bool(self.noted), allow_unused=True
        )
        self.early = [(leaf, each) for leaf, each in zip(ways.shared, early, strict=True) if each is not None]
        for hook in hooks:
            hook.remove()
        if self.saved is not None:
            self.saved.keep(ways.partings.keys() | ways.aside)
        return found

    def weight_gradients(self) -> None:
        """Add the weights' gradients to their ``.grad``."""
        if not self.reaches:
            if self.y.requires_grad:
                self.y.backward(self.gradient)
            return
        for node, parameters, seen in self.noted:
            edges = [GradientEdge(node, k) for k, each in enumerate(seen) if each is not None]
            gradients = [each for each in seen if each is not None]
            if edges:
                torch.autograd.backward(edges, gradients, inputs=parameters)
        for leaf, gradient in self.early:  # whose own hooks it has passed
            get_gradient_edge(leaf).node(gradient)
        self.noted.clear()
        self.early.clear()


class Saved:
    """What a forward pass that runs inside `noting` saves for backward, so that some of it can be let go."""

    def __init__(self) -> None:
        self.boxes: list[list[Tensor | None]] = []
        self.asked_for: set[int] = set()

    def noting(self) -> AbstractContextManager[None]:
        """A context for the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, nodes: Iterable[Any]) -> None:
        """Let go of what none of these operations needs."""
        self.asked_for.clear()
        for node in nodes:
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":
                    getattr(node, name)
        for box in self.boxes:
            if id(box) not in self.asked_for:
                box[0] = None

    def _pack(self, tensor: Tensor) -> list[Tensor | None]:
        self.boxes.append([tensor.detach()])  # with its history it would hold what holds it
        return self.boxes[-1]

    def _unpack(self, box: list[Tensor | None]) -> Any:
        self.asked_for.add(id(box))
        return box[0]


class _Ways:
    """The ways from `y` back to `x` and to the leaves among `wanted` (by ``id``; None: all).

    `partings` are the operations on a way to `x` from which a leaf is reached by another way, with these leaves, if no
    other parting reaches them; `shared` are the leaves that several do, and `aside` the operations from partings on.
    """

    def __init__(self, y: Tensor, x: Tensor, wanted: set[int] | None) -> None:
        goal, leaves = get_gradient_edge(x).node, dict[int, Tensor]()
        to_x, reached, partings = {goal}, dict[Any, set[int]](), dict[Any, set[int]]()
        for node, others in _in_order(get_gradient_edge(y).node, goal):
            aside = set().union(*(reached.get(other, set()) for other in others))
            leaf = getattr(node, "variable", None)
            if any(other in to_x for other in others):
                to_x.add(node)
                partings[node] = aside
            elif leaf is not None and (wanted is None or id(leaf) in wanted):
                leaves[id(leaf)] = leaf
                reached[node] = {id(leaf)}
            else:
                reached[node] = aside
        times = Counter(leaf for own in partings.values() for leaf in own)
        again = {leaf for leaf, count in times.items() if count > 1}
        while more := set().union(*(own for own in reached.values() if own & again)) - again:
            again |= more  # what is computed on the way to one of them is computed for its others too
        order = {leaf: place for place, leaf in enumerate(leaves)}  # the same on every rank
        self.reach_x = get_gradient_edge(y).node in to_x
        self.partings = {
            node: [leaves[leaf] for leaf in sorted(own - again, key=order.__getitem__)]
            for node, own in partings.items()
            if own - again
        }
        self.shared = [leaf for key, leaf in leaves.items() if key in again and times[key]]
        self.aside = {node for node, own in reached.items() if own - again}


def _in_order(start: Any, goal: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Every operation that `start` leads to, after all that it leads to itself, up to `goal`; with its next ones."""
    stack: list[tuple[Any, list[Any] | None]] = [(start, None)]
    seen = {goal}
    while stack:
        node, others = stack.pop()
        if others is not None:
            yield node, others
        elif node not in seen:
            seen.add(node)
            others = [other for other, _ in node.next_functions if other is not None]
            stack.append((node, others))
            stack += [(other, None) for other in others if other not in seen]
