"""ZeRO on real processes: data parallelism whose ranks split what all of them would keep.

Wrap a module, and train it with the optimizer that comes with it:

    model = zero.ZeroStage2(module, functools.partial(torch.optim.AdamW, lr=1e-3))
    loss_of(model(tokens), targets).backward()
    model.clip_grad_norm_(1.0)
    model.optimizer.step()
    model.optimizer.zero_grad()

With N ranks and Ψ parameters of `width` bytes, each rank keeps and sends in a step:

| | weights | gradients | optimizer states | sent, in (N−1)/N · Ψ · width |
|---|---|---|---|---|
| `ZeroStage1` | all | all | 1/N | 2 |
| `ZeroStage2` | all | 1/N | 1/N | 2 |
| `ZeroStage3` | 1/N | 1/N | 1/N | 3 |

`save` writes a checkpoint, each rank its part; `load` reads it on any number of ranks and in any stage, and `merge`
without any ranks at all.
"""

from .checkpoint import load, merge, save
from .gathered import ZeroStage3
from .replicated import ZeroStage1, ZeroStage2

__all__ = ["ZeroStage1", "ZeroStage2", "ZeroStage3", "load", "merge", "save"]
