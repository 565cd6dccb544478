"""What the exercises of this chapter draw: the experts of tokens."""

import numpy as np

from dtlib.grading.exercises.inputs import Array, Rng


def experts(rng: Rng, tokens: int, top_k: int, popular: Array) -> Array:
    """The `top_k` different experts of each token, whole numbers [tokens, choices]: those that are more `popular`, with
    all tokens or with each, are drawn more often, and earlier; of popularity 0 never."""
    with np.errstate(divide="ignore"):
        liked = np.log(popular) + rng.gumbel(size=(tokens, popular.shape[-1]))
    return np.argsort(-liked, axis=1)[:, :top_k].astype(np.int64)


def uneven(rng: Rng, num_experts: int) -> Array:
    """How popular experts are with a router that nobody has balanced."""
    return np.exp(rng.normal(0, 1, num_experts))
