"""What a module computes, in the order in which it does: for names that say where two runs part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Watched:
    """The tensors of a run, by name: ``forward/<module>``, ``backward/<module>`` (the gradient of its output) and
    ``grad/<parameter>``. What a module gives in several calls, one a micro-batch, is joined along its first dimension.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.seen = module, dict[str, list[Tensor]]()

    def keep(self, name: str, tensor: Tensor) -> None:
        """One more call."""
        self.seen.setdefault(name, []).append(tensor.detach().clone())

    def tensors(self, **more: Any) -> dict[str, Any]:
        """What was seen, in order, then `more` (a loss, a norm), then the gradients of the parameters, those that are
        computed first at the front."""
        found: dict[str, Any] = {n: _joined(each) for n, each in self.seen.items() if n.startswith("forward")}
        found |= {name: value.detach() if isinstance(value, Tensor) else value for name, value in more.items()}
        found |= {n: _joined(each) for n, each in self.seen.items() if n.startswith("backward")}
        named = [(name, p) for name, p in self.module.named_parameters() if p.grad is not None]
        return found | {f"grad/{_plain(name)}": p.grad for name, p in reversed(named)}


def _joined(calls: list[Tensor]) -> Tensor:
    return torch.cat(calls) if len(calls) > 1 and calls[0].dim() else calls[-1]


@contextmanager
def watched(module: nn.Module, only: Callable[[str], bool] | None = None) -> Iterator[Watched]:
    """Within it, what the parts of `module` give forward and get backward is kept: see `Watched`. `only` chooses by
    name.

    Wrappers such as DDP are looked through, and a layer that is computed again for its backward pass counts once.
    """
    found, handles = Watched(module), []

    def hook(name: str) -> Callable[..., None]:
        def forward(part: nn.Module, given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return
            if torch._C._current_graph_task_id() != -1:  # computed again, in backward
                return
            found.keep(f"forward/{name}", first)
            if first.requires_grad:
                first.register_hook(lambda grad: found.keep(f"backward/{name}", grad))

        return forward

    for name, part in module.named_modules():
        plain = _plain(name)
        if plain and (only is None or only(plain)):
            handles.append(part.register_forward_hook(hook(plain)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _plain(name: str) -> str:
    """Without what wrappers put in."""
    hidden = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(word for word in name.split(".") if word not in hidden)
