"""Which samples a rank trains on, as a function of three numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtlib.ranks.mesh import Group
from dtlib.theory.valid import whole


class Sampler(Iterator[Tensor]):
    """Batches of indices below `num_samples` without an end: each epoch has all of them once, in an order of its own.

    Sample number i of the run is entry i mod `num_samples` of the permutation that `seed` and the epoch,
    ⌊i / `num_samples`⌋, make: so all that there is to save is one number, `position`, how many the ranks have drawn
    together. A batch at the end of an epoch goes on in the next one.

    Each step takes the next `batch` of them, and rank r of n the r-th n-th of these: the ranks' shares in rank order
    are the batch, whatever n is. A loader that reads ahead draws ahead of training: then set ``position`` to the number
    of samples that were trained on, before `capture`.

    ``ValueError`` for sizes that break a rule, or a `batch` that the ranks of `group` cannot share alike: their mean
    would not be that of the samples.
    """

    def __init__(self, num_samples: int, batch: int, *, seed: int = 0, group: Group = None) -> None:
        self.num_samples, self.batch = whole("num_samples", num_samples, 1), whole("batch", batch, 1)
        self.seed, self.position = whole("seed", seed, 0), 0
        self._rank, self._n = dist.get_rank(group), dist.get_world_size(group)
        if batch % self._n:
            raise ValueError(f"batch must be a multiple of the number of ranks, {self._n}, and {batch} is not")
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __next__(self) -> Tensor:
        """The next indices of this rank, int64 of shape (batch / n,)."""
        share = self.batch // self._n
        first = self.position + self._rank * share
        self.position += self.batch
        return torch.tensor([self._sample(i) for i in range(first, first + share)])

    def _sample(self, i: int) -> int:
        epoch, place = divmod(i, self.num_samples)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
        return int(self._order[place])

    def state_dict(self) -> dict[str, int]:
        """The position, and what must be the same for it to mean the same."""
        return {"position": self.position, "seed": self.seed, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; ``ValueError`` if it is of another order. The batch may be another."""
        for name in ("seed", "num_samples"):
            if state[name] != getattr(self, name):
                raise ValueError(f"{name} must be as it was saved, {state[name]}, not {getattr(self, name)}")
        self.position = whole("position", state["position"], 0)
