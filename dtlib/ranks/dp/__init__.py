"""Data parallelism on real processes: wrappers that average the gradients of a module over the ranks.

Wrap a module and train it as one process would; after ``backward()`` every rank's ``.grad`` holds the mean over the
ranks. Three ways to send the same bytes:

- `NaiveDataParallel`: one all-reduce a parameter, after the backward pass;
- `FlatDataParallel`: one all-reduce of everything, after the backward pass;
- `BucketedDataParallel`: one all-reduce a bucket, while the backward pass is still running.
"""

from .base import DataParallel, global_mean_loss
from .bucketed import BucketedDataParallel
from .simple import FlatDataParallel, NaiveDataParallel

__all__ = [
    "BucketedDataParallel",
    "DataParallel",
    "FlatDataParallel",
    "NaiveDataParallel",
    "global_mean_loss",
]
