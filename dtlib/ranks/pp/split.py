"""A backward pass in two parts: the gradient of the input now, those of the weights later, each product once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class SplitBackward:
    """The backward pass of one forward pass through a module, from its input `x` to its output `y`.

    Where the way back to the input and the way to a weight part (at a product of both), `input_gradient` notes the
    gradient that passes, and goes on to the input alone; `weight_gradients` starts there. autograd computes of each
    operation only the gradients that are asked for, so no product is made twice. A custom autograd function that does
    not ask is carried out twice. If `x` needs no gradient, all of it is done later.

    What passes the partings is kept until then, beside what the forward pass has kept. The idea is that of Qi et al.
    2024, arXiv 2401.10241, and of torch's own pipelining.
    """

    def __init__(self, x: Tensor, y: Tensor, parameters: Iterable[Tensor]) -> None:
        self.x, self.y = x, y
        self.parameters = [each for each in parameters if each.requires_grad]
        self.gradient: Tensor | None = None
        self.noted: list[tuple[Any, list[Tensor], list[Tensor | None]]] = []

    def input_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of `x`, of its shape, from that of `y` (None for a loss); None where `x` needs none."""
        if not self.x.requires_grad:
            self.gradient = gradient
            return None
        hooks = []
        for node, parameters in _partings(self.y, self.x, self.parameters).items():
            seen: list[Tensor | None] = []
            self.noted.append((node, parameters, seen))
            hooks.append(node.register_prehook(seen.extend))
        (found,) = torch.autograd.grad(self.y, self.x, gradient, retain_graph=bool(self.noted))
        for hook in hooks:
            hook.remove()
        return found

    def weight_gradients(self) -> None:
        """Add the weights' gradients to their ``.grad``."""
        if not self.x.requires_grad:
            if self.y.requires_grad:
                self.y.backward(self.gradient)
            return
        for node, parameters, seen in self.noted:
            edges = [GradientEdge(node, k) for k, each in enumerate(seen) if each is not None]
            gradients = [each for each in seen if each is not None]
            torch.autograd.backward(edges, gradients, inputs=parameters)
        self.noted.clear()


def _partings(y: Tensor, x: Tensor, parameters: list[Tensor]) -> dict[Any, list[Tensor]]:
    """The operations between `x` and `y` from which a parameter is reached by a way that does not lead to `x`."""
    leaves = {torch.autograd.graph.get_gradient_edge(each).node: each for each in parameters}
    goal = torch.autograd.graph.get_gradient_edge(x).node
    order, seen, stack = [], set(), [(y.grad_fn, False)]
    while stack:  # every operation after all that it leads to
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(other, False) for other, _ in node.next_functions]
    to_x, reached = {goal}, defaultdict(list, {node: [leaf] for node, leaf in leaves.items()})
    found = {}
    for node in order:
        others = [other for other, _ in node.next_functions if other is not None]
        aside = [leaf for other in others if other not in to_x for leaf in reached[other]]
        if any(other in to_x for other in others):
            to_x.add(node)
            if aside:
                found[node] = aside
        elif aside:
            reached[node] = aside
    return found
