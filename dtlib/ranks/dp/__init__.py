"""Data parallelism on real processes: wrappers that average the gradients of a module over the ranks.

Wrap a module and train it as one process would; after ``backward()`` every rank's ``.grad`` holds the mean over the
ranks. Three ways to send the same bytes:

- `NaiveDataParallel`: one all-reduce a parameter, after the backward pass;
- `FlatDataParallel`: one all-reduce of everything, after the backward pass;
- `BucketedDataParallel`: one all-reduce a bucket, or another `Exchange`, while the backward pass is still running.

Buckets in few lines, without buffers, unused parameters and micro-batches, stand on the chapter's page. A parameter
that some of the ranks hold alone, as experts are, `belongs_to` a group of its own.
"""

from dtlib.ranks.shared.replicas import belongs_to

from .base import DataParallel, global_mean_loss
from .blocking import FlatDataParallel, NaiveDataParallel
from .bucketed import Bucket, BucketedDataParallel, Exchange, all_reduce
from .checkpoint import load, save

__all__ = [
    "Bucket",
    "BucketedDataParallel",
    "DataParallel",
    "Exchange",
    "FlatDataParallel",
    "NaiveDataParallel",
    "all_reduce",
    "belongs_to",
    "global_mean_loss",
    "load",
    "save",
]
