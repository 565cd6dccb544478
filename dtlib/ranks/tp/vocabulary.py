"""The vocabulary split over the ranks of a group: its embedding, and a cross-entropy that never gathers the logits.

Shapes: b sequences, s positions, n = b·s tokens, h hidden, v vocabulary, t ranks. Rank r has the r-th slice of the
vocabulary, as even as it gets: nothing is padded, the first v mod t ranks have one token more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtlib.ranks.mesh import Group
from dtlib.ranks.model import IGNORED
from dtlib.ranks.shared.alike import described, refuse_unlike_calls, size_of
from dtlib.ranks.shared.split import Split, SplitModule, evenly

from .conjugate import sum_over_ranks


class VocabularyParallelEmbedding(SplitModule):
    """This rank's rows of `embedding`, which must be the same on all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | tokens | (b, s) | (b, s) |
    | weight | (v, h) | (v/t, h) |
    | output | (b, s, h) | (b, s, h) |

    - forward: a row where the rank has it and zeros elsewhere; then an all-reduce of b·s·h elements;
    - input gradient: tokens have none;
    - weight gradient: each rank adds up the rows that it has, nothing sent.

    ``ValueError`` where there are fewer tokens in the vocabulary than ranks. Source: Shoeybi et al. 2019, arXiv
    1909.08053, section 3.
    """

    def __init__(self, embedding: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.group, self.splits, self.vocab = group, {}, embedding.num_embeddings
        self.mine = vocabulary_of(self.vocab, group)
        self.take("weight", embedding.weight, Split(0, evenly("vocab", self.vocab, dist.get_world_size(group))))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """The rows of `tokens_bs`, on all ranks; ``ValueError`` for a token outside of the vocabulary (on a CPU)."""
        return self.sum(self.own_rows(tokens_bs))

    def own_rows(self, tokens_bs: Tensor) -> Tensor:
        """The rows that this rank has, and zeros for other tokens."""
        _refuse_others("tokens_bs", tokens_bs, self.vocab, self.group)
        refuse_unlike_calls("tokens_bs", described(tokens_bs), self.group)
        local_bs, here_bs = _local(tokens_bs, self.mine)
        return F.embedding(local_bs, self.weight).masked_fill(~here_bs[..., None], 0)

    def sum(self, part_bsh: Tensor) -> Tensor:
        """Over the ranks, with a gradient."""
        return sum_over_ranks(part_bsh, self.group) if dist.get_world_size(self.group) > 1 else part_bsh


def vocabulary_of(vocab: int, group: Group = None) -> range:
    """The tokens that this rank of `group` has; ``ValueError`` where `vocab` is below the number of ranks."""
    return evenly("vocab", vocab, size_of(group))[dist.get_rank(group)][0]


def next_token_loss(
    logits_bsv: Tensor, targets_bs: Tensor, *, vocab: int, group: Group = None, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy in nats of `targets_bs` (b, s), as `ranks.model.next_token_loss`, on all ranks the same, from this
    rank's slice (b, s, v/t) of the logits over a vocabulary of `vocab` tokens.

    Sends 3 n elements in two all-reduces: the largest logit of each token, then the sum of exponentials and the
    target's logit; nothing in the backward pass. Keeps the rank's slice of the probabilities, in float32 at least.

    −log softmax(x)_y = log Σ_r Σ_j exp(x_rj − m) − (x_y − m), m the maximum over all ranks.

    ``ValueError`` for logits that are no such slice, a target outside of the vocabulary (on a CPU), or a `reduction`
    that is not ``"mean"`` or ``"sum"``. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """
    mine = vocabulary_of(vocab, group)
    if logits_bsv.shape != (*targets_bs.shape, len(mine)):
        shape = tuple(logits_bsv.shape)
        raise ValueError(f"logits_bsv must be of shape (b, s, {len(mine)}), this rank's of {vocab} tokens, not {shape}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, not {reduction!r}")
    refuse_unlike_calls("targets_bs", f"{described(targets_bs)} and logits of {logits_bsv.dtype}", group)
    counted_bs = targets_bs != IGNORED
    _refuse_others("targets_bs", targets_bs.where(counted_bs, 0), vocab, group)
    losses_n = _CrossEntropy.apply(logits_bsv.flatten(0, 1), targets_bs.flatten(), mine, group)
    total = losses_n.where(counted_bs.flatten(), 0).sum()
    return total / counted_bs.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits_nv: Tensor, targets_n: Tensor, mine: range, group: Group) -> Tensor:
        wide_nv = logits_nv.to(torch.promote_types(logits_nv.dtype, torch.float32))
        largest_n = wide_nv.amax(-1)
        _all_reduce(largest_n, group, dist.ReduceOp.MAX)
        shifted_nv = wide_nv - largest_n[:, None]
        local_n, here_n = _local(targets_n, mine)
        target_n = shifted_nv.gather(1, local_n[:, None])[:, 0].masked_fill(~here_n, 0)
        exponentials_nv = shifted_nv.exp_()
        sums_2n = torch.stack([exponentials_nv.sum(-1), target_n])
        _all_reduce(sums_2n, group)
        context.save_for_backward(exponentials_nv.div_(sums_2n[0, :, None]), local_n, here_n)
        context.dtype = logits_nv.dtype
        return sums_2n[0].log() - sums_2n[1]

    @staticmethod
    @once_differentiable
    def backward(context: Any, dlosses_n: Tensor) -> Any:
        probabilities_nv, local_n, here_n = context.saved_tensors
        dlogits_nv = probabilities_nv * dlosses_n[:, None]
        dlogits_nv.scatter_add_(1, local_n[:, None], (-dlosses_n * here_n)[:, None])
        return dlogits_nv.to(context.dtype), None, None, None


def _all_reduce(tensor: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group=group)


def _local(tokens: Tensor, mine: range) -> tuple[Tensor, Tensor]:
    """Tokens as rows of this rank (0 where it has none), and where it has one."""
    here = (tokens >= mine.start) & (tokens < mine.stop)
    return (tokens - mine.start).where(here, 0), here


def _refuse_others(name: str, tokens: Tensor, vocab: int, group: Group) -> None:
    """No rank would have them, and all would go on with zeros. On a GPU to look at them would be to wait for them."""
    if tokens.device.type != "cpu" or dist.get_backend(group) == "fake" or not tokens.numel():
        return
    low, high = tokens.aminmax()
    if low < 0 or high >= vocab:
        worst = low if low < 0 else high
        raise ValueError(f"{name} must be from 0 to vocab-1={vocab - 1}, not {worst.item()}")
