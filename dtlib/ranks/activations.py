"""Checkpoints from scratch: keep less of the forward pass, and compute it again when the backward pass asks for it.

`checkpoint` runs a function and keeps its inputs alone; `through` runs layers with a checkpoint every k of them;
`recompute` puts checkpoints into a model of `ranks.model`. Values and gradients stay the same to the bit, dropout
included: the random state of the forward pass is restored for the second one. A checkpoint of one input in few lines
stands on the chapter's page.

It works on one process and below every wrapper of the course: what is computed again calls the modules again, so
their hooks gather weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from .model import Attention

Layer = Callable[[Any], Any]
Model = TypeVar("Model", bound=nn.Module)
_DEVICES = ("cpu", "cuda")


def checkpoint(fn: Callable[..., Any], *args: Any, restore_rng: bool = True) -> Any:
    """``fn(*args)``, keeping for the backward pass the tensors among `args` (also in lists and dictionaries) and
    nothing of what `fn` computes on the way.

    | | kept | computed |
    |---|---|---|
    | without | everything that the operations of `fn` save | once |
    | with | its inputs | again, when the backward pass asks for the first tensor that was saved |

    `fn` must do the same each time: what it throws dice for comes out the same, since the random state (and autocast)
    of the first time is restored for the second, and put back afterwards. With ``restore_rng=False`` it is not: only
    for functions that throw none. Weights that `fn` uses get their gradients as ever; ``torch.autograd.grad`` works,
    and so does a second backward pass over a retained graph.

    ``RuntimeError`` in the backward pass if `fn` saved something else the second time. Source: Chen et al. 2016, arXiv
    1604.06174.
    """
    if not torch.is_grad_enabled():
        return fn(*args)
    segment = _Segment(fn, args, restore_rng)
    with saved_tensors_hooks(segment.pack, segment.unpack):
        return fn(*args)


def through(layers: Sequence[Layer], x: Any, *, every: int = 1, restore_rng: bool = True) -> Any:
    """Run `x` through `layers`, one after another, with a checkpoint before every `every`-th of them.

    ⌈l/k⌉ inputs are kept, and at most k layers at a time are computed again. ``ValueError`` unless `every` is from 1 to
    the number of layers.
    """
    if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= max(1, len(layers)):
        raise ValueError(f"every must be a whole number from 1 to len(layers)={len(layers)}, not {every!r}")
    for start in range(0, len(layers), every):
        x = checkpoint(partial(_chain, layers[start : start + every]), x, restore_rng=restore_rng)
    return x


def recompute(model: Model, what: str = "full", *, every: int = 1, restore_rng: bool = True) -> Model:
    """Let `model`, a GPT or a stage of one, which is changed and returned, compute in its backward pass what it does
    not keep.

    ``"full"`` keeps the input of every `every`-th layer, ``"selective"`` all of a layer but what lies between queries,
    keys, values and the weighted values, ``"none"`` everything. Weights and their names stay. ``ValueError`` for
    another word, or an `every` that does not fit.
    """
    if what not in ("none", "selective", "full"):
        raise ValueError(f"what must be one of none, selective, full, not {what!r}")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for patched, name in ((model, "run_blocks"), *((attention, "core") for attention in attentions)):
        patched.__dict__.pop(name, None)  # of an earlier call
    if what == "full":
        layers: Sequence[Layer] = list(model.blocks)  # type: ignore[arg-type]
        if not 1 <= every <= max(1, len(layers)):
            raise ValueError(f"every must be from 1 to num_layers={len(layers)}, not {every}")
        model.__dict__["run_blocks"] = partial(_blocks, layers, every=every, restore_rng=restore_rng)
    elif what == "selective":
        for attention in attentions:
            attention.__dict__["core"] = partial(_core, attention.core, restore_rng)
    return model


def _core(core: Callable[..., Tensor], restore_rng: bool, *qkv: Tensor, **where: Any) -> Any:
    return checkpoint(partial(core, **where), *qkv, restore_rng=restore_rng)


def _blocks(layers: Sequence[Layer], x: Any, *, every: int, restore_rng: bool, **where: Any) -> Any:
    return through([partial(layer, **where) for layer in layers], x, every=every, restore_rng=restore_rng)


def _chain(layers: Sequence[Layer], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


class _Segment:
    """One call of a function: its inputs, and what it saves, which exists only while it is computed again.

    Autograd holds numbers instead of tensors, and asks for the tensor behind a number in the backward pass. Each is
    handed out once and forgotten, so memory falls layer by layer; who asks again has it computed again.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, restore_rng: bool) -> None:
        leaves, self.structure = tree_flatten(args)
        self.fn, self.count = fn, 0
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in self.places]
        self.others = [None if place in self.places else leaf for place, leaf in enumerate(leaves)]
        # The result is held, not its node alone: with torch 2.11 what a node has saved goes with the result.
        self.inputs = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)
        self.needs_grad = [tensor.requires_grad for tensor in tensors]
        self.rng = _random_states(tensors) if restore_rng else None
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in _DEVICES
        ]
        self.again: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Something would be saved: keep a number instead."""
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        """The backward pass asks for what was saved under `number`."""
        if number not in self.again:
            self._compute_again()
        return self.again.pop(number)

    def _compute_again(self) -> None:
        found: list[Tensor] = []
        leaves = list(self.others)
        for place, tensor, needs in zip(self.places, self.inputs.grad_fn.saved_tensors, self.needs_grad, strict=True):
            leaves[place] = tensor.detach().requires_grad_(needs)  # a graph of its own, which is dropped below
        with ExitStack() as stack:
            if self.rng is not None:
                stack.enter_context(_random_states_of(self.rng))
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(lambda tensor: found.append(tensor.detach()), lambda none: none))
            self.fn(*tree_unflatten(leaves, self.structure))
        if len(found) != self.count:
            raise RuntimeError(
                f"{getattr(self.fn, '__name__', self.fn)} saved {self.count} tensors in the forward pass "
                f"and {len(found)} when it was computed again: it must do the same each time"
            )
        self.again = dict(enumerate(found))


class _Keep(torch.autograd.Function):
    """Keeps tensors where autograd keeps what it saves, so that they count as saved; computes nothing."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        context.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing depends on the result")


def _random_states(tensors: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        states[device] = torch.cuda.get_rng_state(device)
    return states


@contextmanager
def _random_states_of(states: dict[torch.device, Tensor]) -> Iterator[None]:
    """Throw the dice of `states` inside the block, and go on as before after it."""
    with torch.random.fork_rng(devices=[device for device in states if device.type == "cuda"]):
        for device, state in states.items():
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
        yield
