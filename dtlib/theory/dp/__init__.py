"""Data parallelism as algebra: which gradient, how many bytes, how many seconds, when it stops paying.

Letters: N ranks (`n`), D bytes of one rank's full gradient (`grad_bytes`), α seconds a message
(`alpha_seconds`), B bytes a second in one direction (`link_bytes_per_s`), b samples of a micro-batch
(`micro_batch`), a micro-batches between two updates (`accumulation`), k buckets (`num_buckets`). An
all-reduce is a ring: C(N) = 2(N−1)α + 2(N−1)/N · D/B.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .batch import (
    averaged_gradient,
    effective_batch,
    sent_bytes_per_sample,
    sent_bytes_per_step,
    token_weighted_gradient,
)
from .buckets import plan_buckets
from .overlap import (
    BucketSchedule,
    blocking_step_seconds,
    even_exposed_seconds,
    exposed_seconds,
    hidden_share,
    optimal_num_buckets,
    overlap_schedule,
    overlapped_step_seconds,
    ready_seconds,
)
from .scaling import (
    best_world_size,
    break_even_tokens,
    efficiency,
    strong_step_seconds,
)
from .simulate import Trajectory, data_parallel_sgd

__all__ = [
    "BucketSchedule",
    "Trajectory",
    "averaged_gradient",
    "best_world_size",
    "blocking_step_seconds",
    "break_even_tokens",
    "data_parallel_sgd",
    "effective_batch",
    "efficiency",
    "even_exposed_seconds",
    "exposed_seconds",
    "hidden_share",
    "optimal_num_buckets",
    "overlap_schedule",
    "overlapped_step_seconds",
    "plan_buckets",
    "ready_seconds",
    "sent_bytes_per_sample",
    "sent_bytes_per_step",
    "strong_step_seconds",
    "token_weighted_gradient",
]
