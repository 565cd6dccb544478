"""Heads at the end of a pipeline, and with a vocabulary that is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.activations import checkpoint
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import IGNORED
from dtlib.ranks.pp import Stage
from dtlib.ranks.shared.replicas import begin_alike
from dtlib.ranks.tp import next_token_loss
from dtlib.ranks.tp import parallelize as split_model
from dtlib.theory.footprint import stage_layers

from .heads import Heads, IndependentHeads


class LastStage(nn.Module):
    """The last stage of a pipeline: its layers of the trunk, and all heads behind them.

    | in | out | ``loss(out, targets)`` |
    |---|---|---|
    | (b, s, h), or tokens where it is the first, too | the trunk (b, s, h) | all heads, summed over the targets |

    The executor of `ranks.pp` divides by the next tokens that count, as `Heads` does. With `in_turn` a head's scores
    are computed once more in the backward pass, so that one set of logits is there at a time. ``ValueError`` from the
    loss of modules behind each other where a target is ignored: they have to read that token.
    """

    def __init__(self, heads: Heads, blocks: Sequence[nn.Module], *, first: bool, in_turn: bool = True) -> None:
        super().__init__()
        self.trunk = Stage(heads.model, blocks, first=first, last=False)
        alone = isinstance(heads, IndependentHeads)
        self.parts = nn.ModuleList([*heads.children()][1:])
        self.ends = nn.ModuleList([heads.model.norm, heads.model.head])
        self.ends.extend([heads.model.blocks[-1]] if alone else [heads.model.token_embedding])
        self.whole, self.in_turn = [heads], in_turn  # in a list: its other layers are not this stage's

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        """Through this stage's layers of the trunk."""
        return self.trunk(x, **where)

    def loss(self, trunk_bsh: Tensor, targets_bs: Tensor) -> Tensor:
        """The weighted losses of all heads, each summed over the targets that count."""
        heads, sums = self.whole[0], []
        if not isinstance(heads, IndependentHeads) and (targets_bs == IGNORED).any():
            raise ValueError("targets must all count where modules read them, and some are ignored")
        for k, state_bsh in enumerate(heads.states_behind(trunk_bsh, targets_bs)):
            sum_of = partial(heads.sum_of_losses, k)
            sums.append(checkpoint(sum_of, state_bsh, targets_bs) if self.in_turn else sum_of(state_bsh, targets_bs))
        return torch.stack(sums).sum()


def cut(heads: Heads, num_stages: int, layers: Sequence[int] | None = None, *, in_turn: bool = True) -> list[nn.Module]:
    """The trunk of `heads` as `num_stages` stages, the last with all heads; `layers` says how many layers of the trunk
    each has, by default as even as possible. Its last stage has the ``loss`` for `ranks.pp.Pipeline`.

    Modules behind each other look tokens up at the end of the pipeline, and a tied head is the embedding: in both
    cases the first stage and the last hold ``heads.model.token_embedding.weight``, the executor's ``tied``.
    ``ValueError`` for `layers` that are not all of the trunk.
    """
    blocks = list(heads.model.blocks[:-1] if isinstance(heads, IndependentHeads) else heads.model.blocks)
    counts = list(stage_layers(len(blocks), num_stages) if layers is None else layers)
    if len(counts) != num_stages or sum(counts) != len(blocks) or min(counts) < 0:
        raise ValueError(f"layers must be {num_stages} numbers that add up to {len(blocks)}, not {counts}")
    stages: list[nn.Module] = []
    for stage, count in enumerate(counts[:-1]):
        stages.append(Stage(heads.model, blocks[:count], first=stage == 0, last=False))
        blocks = blocks[count:]
    return [*stages, LastStage(heads, blocks, first=not stages, in_turn=in_turn)]


def parallelize(heads: Heads, group: Group = None) -> Heads:
    """Split `heads`, which is changed and returned, over the ranks of `group`, as `tp.parallelize` does with a GPT: the
    layers of further heads by columns and rows, the vocabulary over the ranks. No head's logits are whole anywhere.

    Norms and projections are on every rank. ``ValueError`` as `tp.parallelize`.
    """
    if not dist.is_initialized():
        raise ValueError("group needs torch.distributed: call this in a rank of lab.run")
    begin_alike(heads, group)
    model, own = heads.model, heads.model.blocks
    model.blocks = nn.ModuleList([*own, *heads.blocks])
    try:
        split_model(model, group)
    finally:
        model.blocks = own
    heads.loss = partial(next_token_loss, vocab=model.config.vocab, group=group)
    return heads
