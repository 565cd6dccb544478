"""Exchanges that send less than the gradient, for `dp.BucketedDataParallel`.

    model = dp.BucketedDataParallel(model, exchange=compression.PowerSGD(rank=2))

| exchange | travels by | of n entries a rank's message has | remembers |
|---|---|---|---|
| `Cast(dtype)` | all-reduce | n in 2 bytes | |
| `Int8(block)` | all-to-all, all-gather | n/N + 4 bytes a block, twice | |
| `QSGD(levels)` | all-gather | ⌈log₂(2s+1)⌉ bits each, a norm | how often it drew |
| `Sign()` | all-gather | 1 bit each, a scale | what was left out |
| `TopK(share)` | all-gather | k values, k places | what was left out |
| `RandomK(share)` | all-reduce | k values | what was left out, how often it drew |
| `PowerSGD(rank)` | all-reduce, twice | r(o + i) values | what was left out, Q |
| `Hierarchy(g, across)` | exact inside nodes | what `across` sends of n/g | what `across` does |

Top-k with feedback and PowerSGD stand on the chapter's page in twenty lines each; here they work bucket by bucket while
the backward pass runs, outlive re-filled buckets, save what they remember, and tell gradients that are not finite. See
`Compressed`. All leave the same bits on all ranks, where these compute alike. Gradients of float64 travel as float64,
but for scales, norms and what `Int8` adds up. An exchange of one's own is a class with one method.
`ZeroPlusPlus` is no exchange, but stage 3 of ZeRO whose weights and gradients travel in codes.
"""

from .base import Compressed
from .dense import Cast, Int8
from .gathered import QSGD, Sign, TopK
from .hierarchy import Hierarchy
from .reduced import PowerSGD, RandomK
from .zeropp import ZeroPlusPlus

__all__ = ["QSGD", "Cast", "Compressed", "Hierarchy", "Int8", "PowerSGD", "RandomK", "Sign", "TopK", "ZeroPlusPlus"]
