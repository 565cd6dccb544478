"""A GPT whose tokens lie on the ranks of a group, from the embedding to the loss.

Shapes: b sequences, s positions, h hidden, v vocabulary, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dtlib.ranks import model as whole_model
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import GPT, IGNORED, refuse_positions
from dtlib.ranks.shared.alike import described, refuse_unlike_calls, size_of
from dtlib.ranks.shared.replicas import begin_alike, split_modules
from dtlib.ranks.tp import sum_over_ranks
from dtlib.theory.cp import ORDERS
from dtlib.theory.cp.traffic import refuse_heads

from .layout import Layout
from .ring import ring_attention
from .tiles import Mask
from .ulysses import ulysses_attention

WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}


_orders: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""In which order the tokens of logits lie that a model has given."""


@dataclass(frozen=True)
class Context:
    """How a model's tokens lie. Which tokens a batch has goes through the model with them: so what is computed again
    is computed of the same ones, whatever came in between."""

    group: Group
    order: str
    way: str
    summed: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def enter(self, tokens_bs: Tensor, documents_bs: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """A batch comes: this rank's tokens of it (b, s/N), and what blocks must know of them: the `offset` (s/N,) of
        each column, their `layout` and `mask`."""
        if documents_bs is not None and documents_bs.shape != tokens_bs.shape:
            shape = tuple(tokens_bs.shape)
            raise ValueError(f"documents_bs must be of shape {shape}, as tokens_bs, not {tuple(documents_bs.shape)}")
        layout = Layout(tokens_bs.shape[1], self.group, self.order)
        packed = "" if documents_bs is None else " in documents"
        refuse_unlike_calls("tokens_bs", f"{described(tokens_bs)}{packed} in {self.order} order", self.group)
        positions_s = layout.positions(tokens_bs.device)
        offsets_s = positions_s - torch.arange(len(positions_s), device=tokens_bs.device)
        where = {"offset": offsets_s, "layout": layout, "mask": Mask(documents_bs=documents_bs)}
        return tokens_bs[:, positions_s], where

    def before_forward(self, model: GPT, arguments: tuple[Tensor, ...], where: dict[str, Any]) -> tuple[Any, Any]:
        """The model is called with all tokens: let it go on with this rank's."""
        tokens_bs = arguments[0] if arguments else where.pop("tokens_bs")
        offset = where.pop("offset", 0)
        refuse_positions(tokens_bs.shape[1], offset, model.config.seq)
        own_bs, mine = self.enter(tokens_bs, where.pop("documents_bs", None))
        mine["offset"] = mine["offset"] + (mine["layout"].take(offset, 0) if isinstance(offset, Tensor) else offset)
        return (own_bs,), where | mine

    def after_forward(self, model: GPT, arguments: Any, logits_bsv: Tensor) -> None:
        """Note for the loss in which order the logits lie."""
        _orders[logits_bsv] = self.order

    def sum_gradients(self, model: GPT, *call: Any) -> None:
        """From now on sum the gradients of what is trained: also of what was frozen when the model was split."""
        for parameter in model.parameters():
            if parameter.requires_grad and parameter not in self.summed:
                self.summed[parameter] = parameter.register_hook(lambda gradient: _summed(gradient, self.group))


class ContextCore(nn.Module):
    """Attention's core over the tokens of all ranks, by a ring or all-to-alls; shapes are those of the rank's own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, layout: Layout | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Queries, keys and values of tokens that lie as `layout` says to weighted values."""
        if layout is None:
            raise ValueError("layout must be given: attention is reached through the model, which knows it")
        return WAYS[self.way](q_basd, k_bgsd, v_bgsd, layout, mask)


def parallelize(
    model: GPT, group: Group = None, *, order: str = "zigzag", way: str = "ring", sum_gradients: bool = True
) -> GPT:
    """Split the tokens of `model`, which is changed and returned, over the ranks of `group` (None: all ranks).

    | | whole | this rank |
    |---|---|---|
    | weights | all | all |
    | tokens, activations, logits | (b, s), (b, s, h), (b, s, v) | (b, s/N), (b, s/N, h), (b, s/N, v) |
    | attention | | `ring_attention` or `ulysses_attention` |

    It is called with all tokens, ``model(tokens_bs)``, on all ranks alike, and with ``documents_bs=`` where several are
    packed into a sequence: each takes its own, in `order`, and gives their logits, for `next_token_loss` of this
    package. The gradients of the weights are summed over the ranks as autograd has them, an all-reduce for each, unless
    `sum_gradients` is False: then somebody else does, who knows when the last one of a step is there. What is frozen or
    not may change between steps, on all ranks alike. All ranks begin with the weights of the group's rank 0.

    ``ValueError`` before anything is sent for another model, one that is split already, dropout, another `order` or
    `way`, heads that `way` cannot share, and in a call for tokens that are not alike on all ranks or too many; on all
    ranks where their models are not alike.
    """
    n = _refuse(model, group, order, way)
    begin_alike(model, group)
    context = Context(group, order, way)
    for block in model.blocks:
        block.attention.core = ContextCore(way)
    model.register_forward_pre_hook(context.before_forward, with_kwargs=True)
    model.register_forward_hook(context.after_forward)
    if n > 1 and sum_gradients:
        context.sum_gradients(model)
        model.register_forward_pre_hook(context.sum_gradients)
    return model


def _summed(gradient: Tensor, group: Group) -> Tensor:
    return sum_over_ranks(gradient, group)


def next_token_loss(logits_bsv: Tensor, targets_bs: Tensor, *, group: Group = None, order: str | None = None) -> Tensor:
    """Cross-entropy in nats, the mean over all tokens that count, on all ranks the same.

    From this rank's logits (b, s/N, v) and all targets (b, s). The mean is taken over the tokens of all ranks: a mean
    of the ranks' means would weigh tokens of short parts more. `order` is that of the model which gave the logits, and
    must be said for others, a cast of them for one. ``ValueError`` for another one than the model's, none where it is
    not known, and logits of another length.
    """
    known = _orders.get(logits_bsv)
    if order is None and known is None:
        raise ValueError("order must be given for logits_bsv that are not what a model of parallelize returned")
    if known not in (None, order) and order is not None:
        raise ValueError(f"order must be {known}, in which the model's tokens lie, not {order!r}")
    refuse_unlike_calls("targets_bs", described(targets_bs), group)
    layout = Layout(targets_bs.shape[1], group, order or known)
    own_bs = layout.take(targets_bs)
    if logits_bsv.shape[:2] != own_bs.shape:
        shape = tuple(own_bs.shape)
        raise ValueError(f"logits_bsv must be of shape {shape} and a vocabulary, not {tuple(logits_bsv.shape)}")
    own = whole_model.next_token_loss(logits_bsv, own_bs, reduction="sum")
    return sum_over_ranks(own, group) / (targets_bs != IGNORED).sum()


def _refuse(model: GPT, group: Group, order: str, way: str) -> int:
    if not isinstance(model, GPT):
        raise ValueError(f"model must be a GPT of ranks.model, not {type(model).__name__}")
    if not dist.is_initialized():
        raise ValueError("group needs torch.distributed: call this in a rank of lab.run, or after init_process_group")
    n = size_of(group)
    if any(isinstance(each, ContextCore) or each in split_modules for each in model.modules()):
        raise ValueError("model must be whole, and is split already")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, not {way!r}")
    if model.config.dropout:
        raise ValueError(f"model must be without dropout, and has {model.config.dropout}")
    if way == "ulysses":
        refuse_heads(model.config.num_heads, model.config.kv_heads, n)
    return n
