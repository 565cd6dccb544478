"""The complete version: the layers of `ranks.tp` with tokens that are split between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dtlib.ranks import tp
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import GPT
from dtlib.ranks.shared.alike import described, refuse_unlike_calls
from dtlib.ranks.tp.blocks import Layers
from dtlib.ranks.tp.gpt import split_all

from .conjugate import all_tokens, gather_tokens, refuse_length, scatter_sum, summed_tokens


@dataclass(frozen=True)
class SplitTokens:
    """What the layers of `ranks.tp` call where tokens lie split over `group`, in equal parts in rank order.

    With `gather_again` a column-parallel layer keeps its part of the input and gathers it again for the gradient of
    its weights: (t−1)/t · bsh elements sent for (t−1)/t · bsh elements not kept.
    """

    group: Group
    gather_again: bool = False

    def gather(self, x_bsi: Tensor) -> Tensor:
        """All tokens (b, s, i) from the ranks' parts; no gradient."""
        return all_tokens(x_bsi, self.group)

    def scatter(self, part_bsi: Tensor) -> Tensor:
        """This rank's tokens (b, s/t, i) of the sum of the ranks' parts; no gradient."""
        return summed_tokens(part_bsi, self.group)

    def scatter_sum(self, part_bsi: Tensor) -> Tensor:
        """As `scatter`, with a gradient."""
        return scatter_sum(part_bsi, self.group)

    def share(self, parameter: Tensor) -> Tensor:
        """`parameter`, used on this rank's tokens alone: its gradient is summed over the ranks, an all-reduce of its
        size in each backward pass, at the moment when autograd has it."""
        return parameter if dist.get_world_size(self.group) == 1 else tp.copy_to_ranks(parameter, self.group)


class GatheringLinear(tp.ColumnParallelLinear):
    """A column-parallel layer that gathers the ranks' tokens in front and scatters the input's gradient."""

    def __init__(self, *arguments: Any, tokens: SplitTokens, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tokens = tokens

    def enter(self, x_bsi: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens; kept are they or this rank's."""
        all_bsi = self.tokens.gather(x_bsi)
        return all_bsi, x_bsi if self.tokens.gather_again else all_bsi

    def again(self, kept_bsi: Tensor) -> Tensor:
        """All tokens."""
        return self.tokens.gather(kept_bsi) if self.tokens.gather_again else kept_bsi

    def start_sum(self, dx_bsi: Tensor) -> tuple[Tensor, list[Any]]:
        """This rank's tokens of the sum, at once."""
        return self.tokens.scatter(dx_bsi), []


class ScatteringLinear(tp.RowParallelLinear):
    """A row-parallel layer whose outputs are summed to the ranks that have their tokens."""

    def __init__(self, *arguments: Any, tokens: SplitTokens, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tokens = tokens

    def forward(self, x_bsi: Tensor) -> Tensor:
        """The outputs of this rank's tokens (b, s/t, o)."""
        refuse_unlike_calls("x_bsi of rows", described(x_bsi, but_last=True), self.group)
        y_bso = self.tokens.scatter_sum(F.linear(x_bsi, self.weight))
        return y_bso if self.bias is None else y_bso + self.tokens.share(self.bias).to(y_bso.dtype)


class ScatteringEmbedding(tp.VocabularyParallelEmbedding):
    """An embedding that is called with all tokens and gives the rows of this rank's."""

    def __init__(self, *arguments: Any, tokens: SplitTokens) -> None:
        super().__init__(*arguments)
        self.tokens = tokens

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """The rows (b, s/t, h); ``ValueError`` for a number of tokens that the ranks do not divide."""
        refuse_length("tokens_bs", tokens_bs, self.group)
        return super().forward(tokens_bs)

    def sum(self, part_bsh: Tensor) -> Tensor:
        """This rank's tokens of the sum over the ranks."""
        return self.tokens.scatter_sum(part_bsh)


class AroundExperts(tp.AroundExperts):
    """The pair around experts where tokens are split: all of them are gathered, and each rank gets its own answers."""

    def open(self, x_bsh: Tensor) -> Tensor:
        """All tokens (b, s, h) of the ranks' (b, s/t, h)."""
        return gather_tokens(x_bsh, self.group)

    def leave(self, y_bsh: Tensor) -> Tensor:
        """This rank's tokens of the sum of the ranks' answers."""
        return scatter_sum(y_bsh, self.group)


class SplitNorm(nn.Module):
    """`norm` (LayerNorm or RMSNorm) on this rank's tokens; the gradients of its weights are summed over the ranks."""

    def __init__(self, norm: nn.Module, tokens: SplitTokens) -> None:
        super().__init__()
        self.tokens = tokens
        self.__dict__["norm"] = norm  # not a child: the parameters stand here, under the names they had
        for name, parameter in norm.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """(b, s/t, h) to (b, s/t, h): a norm looks at one token at a time."""
        shared = {name: self.tokens.share(parameter) for name, parameter in self.named_parameters()}
        return functional_call(self.norm, shared, (x_bsh,))


class SplitPositions(nn.Module):
    """Learned positions: the rows of this rank's tokens, with gradients that are summed over the ranks."""

    def __init__(self, embedding: nn.Embedding, tokens: SplitTokens) -> None:
        super().__init__()
        self.weight, self.tokens = embedding.weight, tokens

    def forward(self, positions_s: Tensor) -> Tensor:
        """Positions (s,) of all tokens to the rows (s/t, h) of this rank's."""
        group = self.tokens.group
        mine = positions_s.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        return F.embedding(mine, self.tokens.share(self.weight))


def parallelize(model: GPT, group: Group = None, *, gather_again: bool = False) -> GPT:
    """Split `model`, which is changed and returned, over the ranks of `group` (None: all ranks), and its tokens too.

    | | `tp.parallelize` | here | sent by each rank, times (t−1)/t · bsh |
    |---|---|---|---|
    | embedding, its sum | (b, s, h) on all | (b, s/t, h) | forward 1, backward 1 |
    | norms, dropout, residual sums | (b, s, h) on all | (b, s/t, h) | nothing |
    | in front of a pair of matrices | nothing, all-reduce | all-gather, reduce-scatter | forward 1, backward 1 |
    | behind it | all-reduce, nothing | reduce-scatter, all-gather | forward 1, backward 1 |
    | head | nothing, all-reduce | all-gather, reduce-scatter | forward 1, backward 1 |

    A layer sends 8 and keeps sbh (4 + 30/t) and attention's core; with `gather_again` 10, and keeps 34 sbh/t. The
    weights of norms, the biases behind the sums and learned positions meet a part of the tokens on each rank: their
    gradients are summed over the group in each backward pass. All ranks are called with all tokens; logits, loss,
    clipping and checkpoints are those of `ranks.tp`. A number of positions that the ranks do not divide is refused
    with a ``ValueError`` when the model is called, before anything is sent; other errors as `tp.parallelize`. Experts
    are split as an MLP, and their router sees all tokens. What they get is not gathered again: it has travelled.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
    """
    tokens = SplitTokens(group, gather_again)
    each = (GatheringLinear, ScatteringLinear, ScatteringEmbedding)
    column, row, embedding = (partial(layer, tokens=tokens) for layer in each)
    split_all(model, group, 1, Layers(column, row, embedding, AroundExperts))
    for block in model.blocks:
        block.attention_norm = SplitNorm(block.attention_norm, tokens)
        block.mlp_norm = SplitNorm(block.mlp_norm, tokens)
        block.drop = tp.OwnDice(block.drop, group)
    model.norm = SplitNorm(model.norm, tokens)
    if not model.config.rotary:
        model.position_embedding = SplitPositions(model.position_embedding, tokens)
    return model
