"""Collectives from scratch, on send and receive alone. A bare ring stands on the chapter's page.

For 1 rank and more, tensors of any length (0, and not divisible by the ranks), contiguous or not, in floating
point or whole numbers. `op` is sum, mean or max; `group` a torch.distributed group, whose ranks are meant
wherever a rank is named.

| function | result | on which rank |
|---|---|---|
| `ring_all_reduce`, `tree_all_reduce`, `recursive_doubling_all_reduce`, `halving_doubling_all_reduce`, \
`two_level_all_reduce`, `parallel_rings_all_reduce`, `naive_all_reduce` | the reduced tensor, in place | all |
| `tree_reduce` | the reduced tensor, in place | `dst` |
| `ring_reduce_scatter` | chunk r of the reduced tensor, new | r |
| `ring_all_gather` | the chunks of all ranks joined, new | all |
| `pairwise_all_to_all` | chunk r of every rank joined, new | r |
| `tree_broadcast` | the tensor of `src`, in place | all |

What each sends, and in how many steps, stands in `dtlib.theory.collectives` under the same name. Every rank
of the group must call the same function with the same shape and dtype: another size ends in an abort of gloo, another
dtype of that size in other numbers. With torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or
``dist.set_debug_level(dist.DebugLevel.DETAIL)``, ranks compare before they send, and what differs is a ``ValueError``.
That is not the default, see `lab.run`.
Autograd does not see what they do.
"""

from .ring import (
    parallel_rings_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    two_level_all_reduce,
)
from .rounds import (
    halving_doubling_all_reduce,
    naive_all_reduce,
    pairwise_all_to_all,
    recursive_doubling_all_reduce,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

__all__ = [
    "halving_doubling_all_reduce",
    "naive_all_reduce",
    "pairwise_all_to_all",
    "parallel_rings_all_reduce",
    "recursive_doubling_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
    "two_level_all_reduce",
]
