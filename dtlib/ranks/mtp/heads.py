"""Heads that predict n tokens at each position, and their losses with one set of logits at a time.

Shapes: b sequences, s positions, h hidden, v vocabulary. Head k = 0, …, n − 1 stands at position i and predicts token
i + 1 + k, which is ``targets_bs[:, i + k]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtlib.ranks.model import GPT, IGNORED, RMSNorm, next_token_loss, refuse_positions
from dtlib.theory.valid import amount, whole

Loss = Callable[..., Tensor]


def ahead(targets_bs: Tensor, k: int) -> Tensor:
    """The targets k positions on: column i has what column i + k had, and the last k columns count for nothing."""
    return F.pad(targets_bs[:, whole("k", k, 0) :], (0, min(k, targets_bs.shape[1])), value=IGNORED)


def following(tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
    """The token behind each position, also where it is no target that counts; behind the last one its target."""
    return torch.cat([tokens_bs[:, 1:], targets_bs[:, -1:]], 1)


class Heads(nn.Module):
    """A `model` and n − 1 further heads of a layer, as its last one, and a norm each; the embedding and the head's
    matrix are shared.

    Heads read what `states` gives, one (b, s, h) a head. Their losses are sums over the targets that count, times
    `weights` (one a head, 1 by default), divided by the number of *next* tokens that count, as in DeepSeek-V3's report:
    a head further ahead has fewer targets, and one quotient for all makes the loss of a batch the sum of those of its
    micro-batches. ``loss(logits, targets, reduction="sum")`` is `next_token_loss`, or that of a vocabulary that is cut.
    """

    def __init__(
        self,
        model: GPT,
        predicted: int,
        *,
        weights: Sequence[float] | None = None,
        loss: Loss = next_token_loss,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.model, self.predicted, self.loss = model, whole("predicted", predicted, 1), loss
        given = [1.0] * self.predicted if weights is None else list(amount("weights", list(weights)))
        if len(given) != self.predicted:
            raise ValueError(f"weights must be {self.predicted} numbers, one a head, not {len(given)}")
        self.weights, config, more = given, model.config, self.predicted - 1
        norm = RMSNorm if config.rms_norm else nn.LayerNorm
        as_last = replace(config, num_layers=max(more, 1), first_dense=0)  # with experts where the last layer has some
        self.blocks = GPT(as_last, seed=seed).blocks if more else nn.ModuleList()
        self.norms = nn.ModuleList(norm(config.hidden, dtype=config.dtype) for _ in range(more))

    def states(self, tokens_bs: Tensor, targets_bs: Tensor) -> Iterator[Tensor]:
        """What each head's norm reads, (b, s, h), head by head."""
        refuse_positions(tokens_bs.shape[1], 0, self.model.config.seq)
        return self.states_behind(self.trunk(tokens_bs), following(tokens_bs, targets_bs))

    def trunk(self, tokens_bs: Tensor) -> Tensor:
        """What all heads share, (b, s, h)."""
        raise NotImplementedError

    def states_behind(self, trunk_bsh: Tensor, following_bs: Tensor) -> Iterator[Tensor]:
        """`states`, from what the trunk gives and the token that follows each position."""
        raise NotImplementedError

    def logits(self, k: int, state_bsh: Tensor) -> Tensor:
        """Scores (b, s, v) of head k."""
        norm = self.norms[k - 1] if k else self.model.norm
        return self.model.head(norm(state_bsh))

    def sum_of_losses(self, k: int, state_bsh: Tensor, targets_bs: Tensor) -> Tensor:
        """The loss of head k, summed over its targets and weighted."""
        return self.weights[k] * self.loss(self.logits(k, state_bsh), ahead(targets_bs, k), reduction="sum")

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """The loss of all heads in one graph, which keeps n sets of logits until it goes backward.

        ``ValueError`` where no target counts.
        """
        states = self.states(tokens_bs, targets_bs)
        sums = [self.sum_of_losses(k, state_bsh, targets_bs) for k, state_bsh in enumerate(states)]
        return torch.stack(sums).sum() / counted(targets_bs)

    def backward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """Add to ``.grad`` what ``forward(...).backward()`` would, with one set of logits at a time; returns the loss.

        Each head goes forward and backward down to its state, which collects the gradient; then all states go backward
        through what they share, once. Modules behind each other keep their layers' activations until then.
        """
        total, tokens, ends, gradients = torch.zeros(()), counted(targets_bs), [], []
        for k, state_bsh in enumerate(self.states(tokens_bs, targets_bs)):
            leaf_bsh = state_bsh.detach().requires_grad_()
            loss = self.sum_of_losses(k, leaf_bsh, targets_bs) / tokens
            loss.backward()
            total = total.to(loss) + loss.detach()
            del loss
            ends.append(state_bsh)
            gradients.append(leaf_bsh.grad)
        torch.autograd.backward(ends, gradients)
        return total


class IndependentHeads(Heads):
    """Heads beside each other: each has a layer of its own on the trunk, which is all layers of `model` but the last;
    that one is the first head's.

    | | reads | own parameters |
    |---|---|---|
    | trunk | tokens (b, s) | l − 1 layers, the embedding |
    | head k | the trunk (b, s, h) | a layer, a norm |

    Source: Gloeckle et al. 2024, arXiv 2404.19737.
    """

    def trunk(self, tokens_bs: Tensor) -> Tensor:
        """All layers but the last, (b, s, h)."""
        x_bsh = self.model.embed(tokens_bs)
        for block in self.model.blocks[:-1]:
            x_bsh = block(x_bsh)
        return x_bsh

    def states_behind(self, trunk_bsh: Tensor, following_bs: Tensor) -> Iterator[Tensor]:
        """The trunk through each head's layer."""
        for block in (self.model.blocks[-1], *self.blocks):
            yield block(trunk_bsh)

    def backward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """As `Heads.backward`; a head's layer goes backward with it, so one layer's activations are kept, not n."""
        refuse_positions(tokens_bs.shape[1], 0, self.model.config.seq)
        trunk_bsh, total, tokens = self.trunk(tokens_bs), torch.zeros(()), counted(targets_bs)
        leaf_bsh = trunk_bsh.detach().requires_grad_()
        for k, state_bsh in enumerate(self.states_behind(leaf_bsh, following(tokens_bs, targets_bs))):
            loss = self.sum_of_losses(k, state_bsh, targets_bs) / tokens
            loss.backward()
            total = total.to(loss) + loss.detach()
            del loss, state_bsh
        trunk_bsh.backward(leaf_bsh.grad)
        return total


class SequentialModules(Heads):
    """Modules behind each other: module k joins what the one before gives at position i with the embedding of token
    i + k, projects the 2h numbers to h, and goes through a layer of its own.

    | | reads | own parameters |
    |---|---|---|
    | trunk | tokens (b, s) | l layers, the embedding |
    | module k | (b, s, h) of k − 1, tokens k on | two norms, (h, 2h), a layer, a norm |

    Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2.
    """

    def __init__(self, model: GPT, predicted: int, **options: Any) -> None:
        super().__init__(model, predicted, **options)
        config, more = model.config, self.predicted - 1
        norm = RMSNorm if config.rms_norm else nn.LayerNorm
        self.state_norms = nn.ModuleList(norm(config.hidden, dtype=config.dtype) for _ in range(more))
        self.token_norms = nn.ModuleList(norm(config.hidden, dtype=config.dtype) for _ in range(more))
        self.projections = nn.ModuleList(
            nn.Linear(2 * config.hidden, config.hidden, bias=False, dtype=config.dtype) for _ in range(more)
        )
        generator = torch.Generator().manual_seed(options.get("seed", 1))
        for each in self.projections:
            if not each.weight.is_meta:
                nn.init.normal_(each.weight, std=0.02, generator=generator)

    def trunk(self, tokens_bs: Tensor) -> Tensor:
        """All layers, (b, s, h)."""
        return self.model.run_blocks(self.model.embed(tokens_bs))

    def states_behind(self, trunk_bsh: Tensor, following_bs: Tensor) -> Iterator[Tensor]:
        """The trunk, and what each module makes of it: beyond the last token of token 0, for no target."""
        state_bsh = trunk_bsh
        yield state_bsh
        for k in range(1, self.predicted):
            tokens_bs = ahead(following_bs, k - 1)
            state_bsh = self.module(k, state_bsh, tokens_bs.where(tokens_bs != IGNORED, 0))
            yield state_bsh

    def module(self, k: int, state_bsh: Tensor, tokens_bs: Tensor, **where: Any) -> Tensor:
        """Module k ≥ 1 on the states of the one before and the tokens k positions on: (b, s, h)."""
        token_bsh = self.token_norms[k - 1](self.model.token_embedding(tokens_bs))
        joined_bsh = torch.cat([self.state_norms[k - 1](state_bsh), token_bsh], -1)
        return self.blocks[k - 1](self.projections[k - 1](joined_bsh), **where)


def counted(targets_bs: Tensor) -> int:
    """The next tokens that count; ``ValueError`` where none does."""
    number = int((targets_bs != IGNORED).sum())
    if not number:
        raise ValueError("targets must have one that counts, and all are ignored")
    return number
