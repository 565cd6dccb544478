"""Compression as algebra: how far a compressed gradient is off, what of it adds up on the way, its bytes, and when it
pays.

Letters: n elements (`elements`), N ranks (`n` where ranks are counted), s levels, k entries kept, r rank of the
low-rank factors; δ contraction: ‖x − C(x)‖² ≤ (1 − δ) ‖x‖²; G a bound on a gradient's norm; D bytes of the dense
gradient and D' of the compressed one; T_c seconds that compression adds. An *error* is a share of the square,
‖x − C(x)‖²/‖x‖², and so is a *variance*, E‖C(x) − x‖²/‖x‖² of an unbiased C.

Arguments out of range raise ``ValueError``, which names the argument, its value and the rule.
"""

from .feedback import feedback, feedback_error_bound, feedback_rate
from .low_rank import (
    best_low_rank_error,
    low_rank_contraction,
    low_rank_elements,
    low_rank_ratio,
    matrix_shape,
    power_sgd,
    resnet18_cifar_shapes,
)
from .paying import (
    HOW,
    across_break_even,
    break_even_bandwidth,
    end_to_end_speedup,
    exchange_seconds,
    hierarchy_seconds,
    step_seconds,
)
from .quantise import (
    cast_error,
    qsgd,
    qsgd_bytes,
    qsgd_variance,
    qsgd_variance_bound,
    quantised_bytes,
    sign,
    sign_contraction,
    sum_bits,
)
from .sparse import (
    expected_support,
    random_k_error,
    random_k_variance,
    sparse_bytes,
    top_k,
    top_k_contraction,
)
from .traffic import all_gathered_bytes, all_reduced_bytes, most_gathering_ranks, two_pass_bytes

__all__ = [
    "HOW",
    "across_break_even",
    "all_gathered_bytes",
    "all_reduced_bytes",
    "best_low_rank_error",
    "break_even_bandwidth",
    "cast_error",
    "end_to_end_speedup",
    "exchange_seconds",
    "expected_support",
    "feedback",
    "feedback_error_bound",
    "feedback_rate",
    "hierarchy_seconds",
    "low_rank_contraction",
    "low_rank_elements",
    "low_rank_ratio",
    "matrix_shape",
    "most_gathering_ranks",
    "power_sgd",
    "qsgd",
    "qsgd_bytes",
    "qsgd_variance",
    "qsgd_variance_bound",
    "quantised_bytes",
    "random_k_error",
    "random_k_variance",
    "resnet18_cifar_shapes",
    "sign",
    "sign_contraction",
    "sparse_bytes",
    "step_seconds",
    "sum_bits",
    "top_k",
    "top_k_contraction",
    "two_pass_bytes",
]
