"""ZeRO on real processes: data parallelism whose ranks split what all of them would keep.

Stage 3 in few lines stands on the chapter's page. `Zero` has the three stages: wrap a module, and train it with the
optimizer that comes with it:

    model = zero.Zero(module, functools.partial(torch.optim.AdamW, lr=1e-3), stage=2)
    loss_of(model(tokens), targets).backward()
    model.clip_grad_norm_(1.0)
    model.optimizer.step()
    model.optimizer.zero_grad()

`save` writes a checkpoint, each rank its part; `load` reads it on any number of ranks and in any stage, and `merge`
without any ranks at all.
"""

from .checkpoint import held, load, merge, save
from .shard import Shard
from .zero import Zero

__all__ = ["Shard", "Zero", "held", "load", "merge", "save"]
