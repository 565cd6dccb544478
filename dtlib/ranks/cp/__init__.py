"""Context parallelism on real processes: each rank has a part of every sequence, and keys and values come by.

The ring in few lines stands on the chapter's page. `ring_attention` adds masks, zig-zag order, uneven lengths, shared
heads, and a backward pass; `ulysses_attention` does the same by all-to-alls. `parallelize`
splits the tokens of a GPT:

    model = cp.parallelize(GPT(config), group)
    optimizer = torch.optim.AdamW(model.parameters())
    cp.next_token_loss(model(tokens), targets, group=group).backward()

Sources: Liu et al. 2023, arXiv 2310.01889; Jacobs et al. 2023, arXiv 2309.14509.
"""

from .gpt import Context, ContextCore, next_token_loss, parallelize
from .layout import Layout
from .ring import ring_attention
from .tiles import Mask
from .ulysses import ulysses_attention

__all__ = [
    "Context",
    "ContextCore",
    "Layout",
    "Mask",
    "next_token_loss",
    "parallelize",
    "ring_attention",
    "ulysses_attention",
]
