"""The two halves of a transformer layer, split over the ranks of a group: attention by heads, the MLP by its width.

Shapes: b sequences, s positions, h hidden, a heads of queries, g heads of keys and values, d = h/a entries of a head,
f width of the MLP, t ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.experts import Apart
from dtlib.ranks.mesh import Group
from dtlib.ranks.model import MLP, Attention
from dtlib.ranks.shared.alike import size_of
from dtlib.ranks.shared.split import Ranges, evenly

from .experts import AroundExperts
from .linear import ColumnParallelLinear, RowParallelLinear
from .vocabulary import VocabularyParallelEmbedding


@dataclass(frozen=True)
class Layers:
    """What a whole layer becomes where its weights are split."""

    column: Callable[..., nn.Module] = ColumnParallelLinear
    row: Callable[..., nn.Module] = RowParallelLinear
    embedding: Callable[..., nn.Module] = VocabularyParallelEmbedding
    around: Callable[[Group], Apart] = AroundExperts


ALL_TOKENS = Layers()
"""Of ranks that have all tokens each."""


def split_attention(
    attention: Attention, group: Group = None, *, sharers: Group = None, chunks: int = 1, layers: Layers = ALL_TOKENS
) -> Attention:
    """Leave this rank's heads of `attention`, which is changed and returned; it is the same on all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | input and output | (b, s, h) | (b, s, h) |
    | `qkv` | (h + 2gd, h) | (h/t + 2gd/t, h) |
    | `out` | (h, h) | (h, h/t) |
    | queries | (b, a, s, d) | (b, a/t, s, d) |
    | keys, values | (b, g, s, d) | (b, max(g/t, 1), s, d) |

    - forward: heads do not look at each other, so one all-reduce, b·s·h elements, behind `out`;
    - input gradient: one all-reduce, b·s·h elements, behind `qkv`;
    - weight gradient: nothing sent, unless t > g: then t/g ranks have a key and value head each alike, which gets the
      sum of its gradients over them, `sharers` (made by `sharers_of` if not given).

    A mask of dropout on the attention matrix differs from rank to rank, see `OwnDice`. ``ValueError`` unless t is at
    most g, or a multiple of it up to a; ranks may have one group of heads more than others. Source: Shoeybi et al.
    2019, arXiv 1909.08053, section 3.
    """
    t, rank = size_of(group), dist.get_rank(group)
    a, g, d = attention.num_heads, attention.num_kv_heads, attention.out.in_features // attention.num_heads
    refuse_degree(a, g, t)
    sharers = sharers_of(g, group) if sharers is None else sharers
    queries, shared_rows = queries_of(a, g, t), 2 * d if t > g else 0
    columns = tuple((range(each.start * d, each.stop * d),) for each in queries)
    attention.qkv = layers.column(
        attention.qkv, group, rows=rows_of(a, g, d, t), shared_rows=shared_rows, sharers=sharers
    )
    attention.core = OwnDice(attention.core, group)
    attention.out = layers.row(attention.out, group, columns=columns, chunks=chunks)
    attention.num_heads = len(queries[rank])
    attention.num_kv_heads = len(evenly("num_kv_heads", g, t)[rank][0]) if t <= g else 1
    return attention


def split_mlp(mlp: MLP, group: Group = None, *, chunks: int = 1, layers: Layers = ALL_TOKENS) -> MLP:
    """Leave this rank's part of the width of `mlp`, GELU or SwiGLU, which is changed and returned; it is the same on
    all ranks of `group`.

    | | whole | this rank |
    |---|---|---|
    | input and output | (b, s, h) | (b, s, h) |
    | `up` | (f, h); SwiGLU (2f, h) | (f/t, h); (2f/t, h): as many of the gate as of the rest |
    | `down` | (h, f) | (h, f/t) |

    - forward: one all-reduce, b·s·h elements, behind `down`;
    - input gradient: one all-reduce, b·s·h elements, behind `up`;
    - weight gradient: nothing sent.

    ``ValueError`` where f is below t. Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """
    f = mlp.down.in_features
    rows = evenly("down.in_features", f, size_of(group))
    if mlp.swiglu:
        rows = tuple((*each, range(each[0].start + f, each[0].stop + f)) for each in rows)
    mlp.up = layers.column(mlp.up, group, rows=rows)
    mlp.down = layers.row(mlp.down, group, chunks=chunks)
    return mlp


def queries_of(num_heads: int, num_kv_heads: int, t: int) -> list[range]:
    """The heads of queries that each of `t` ranks has: whole groups, or slices of one where t is above the groups."""
    shared = num_heads // num_kv_heads
    if t <= num_kv_heads:
        return [range(each.start * shared, each.stop * shared) for (each,) in evenly("num_kv_heads", num_kv_heads, t)]
    parts = [each for (each,) in evenly("num_heads", shared, t // num_kv_heads)]
    return [range(g * shared + each.start, g * shared + each.stop) for g in range(num_kv_heads) for each in parts]


def rows_of(num_heads: int, num_kv_heads: int, d: int, t: int) -> tuple[Ranges, ...]:
    """The rows of `qkv` (g, a/g + 2, d) that each of `t` ranks has: its queries with their keys and values."""
    shared = num_heads // num_kv_heads
    rows: list[Ranges] = []
    for queries in queries_of(num_heads, num_kv_heads, t):
        g = queries.start // shared
        start = (queries.start + 2 * g) * d  # behind the queries of earlier groups stand their keys and values
        if t <= num_kv_heads:
            rows.append((range(start, start + len(queries) // shared * (shared + 2) * d),))
        else:
            keys = (shared * (g + 1) + 2 * g) * d
            rows.append((range(start, start + len(queries) * d), range(keys, keys + 2 * d)))
    return tuple(rows)


def sharers_of(num_kv_heads: int, group: Group) -> Group:
    """The ranks of `group` that have the same head of keys and values as this one, as a group of their own.

    None where each rank has heads of its own. All ranks of `group` must call it.
    """
    size_of(group)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) <= num_kv_heads:
        return None
    size = len(ranks) // num_kv_heads
    first = dist.get_rank(group) // size * size
    return dist.new_group(ranks[first : first + size], use_local_synchronization=True)


class OwnDice(nn.Module):
    """`module`, which drops entries with probability p, throwing other dice on each rank of `group`.

    Where all ranks hold the same tensor they must drop the same of it, from one stream; where each holds a part, other
    entries. The rank's own stream begins in each call with a number that the common one draws, and with the rank: so
    whoever restores the common stream, as a checkpoint of activations does, restores both. The common stream moves on
    by one draw.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module, self.group = module, group

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """The module's own."""
        is_fake = dist.get_backend(self.group) == "fake"  # without values there are no dice
        if is_fake or not (self.training and self.module.p):
            return self.module(x, *others)
        drawn = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
            torch.manual_seed(drawn + dist.get_rank(self.group) + 1)
            return self.module(x, *others)


def refuse_degree(num_heads: int, num_kv_heads: int, t: int) -> None:
    """``ValueError`` unless `t` ranks can split these heads."""
    if not (t <= num_kv_heads or (t % num_kv_heads == 0 and t <= num_heads)):
        raise ValueError(
            f"group must have at most num_kv_heads={num_kv_heads} ranks, or a multiple of it up to "
            f"num_heads={num_heads}, not {t}"
        )
