"""What must be alike on replicas, and what must not go into an update: checked while they train."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared import alike
from dtlib.theory.valid import amount, whole

_AT_ONCE = 2**20  # words that are widened to 64 bits at a time: a checksum takes some 40 MB, however long the tensor
_WORDS = {1: torch.uint8, 2: torch.int16}


def checksum(tensor: Tensor) -> Tensor:
    """64 bits that stand for the bits of `tensor`: Σ wᵢ xᵢ mod 2⁶⁴, of words of at most 4 bytes and odd weights.

    An odd number has an inverse mod 2⁶⁴, so a flipped bit is never missed. The weights differ and look random: other
    changes, as of places, are missed with a chance of at most about 2⁻³². (Of words of 8 bytes two highest bits come to
    2⁶⁴, that is 0.) Sums of whole numbers do not depend on their order. Equal bits are equal, NaN too; 0.0 and -0.0 are
    not. Returns an int64 tensor of no dimensions on the device of `tensor`."""
    return _weighed(tensor.detach().contiguous().flatten().view(_WORDS.get(tensor.element_size(), torch.int32)))


def _weighed(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), _AT_ONCE):
        part = words[first : first + _AT_ONCE].long()
        total += (part * _weights(first, len(part), part.device)).sum()
    return total


def _weights(first: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits that look random: Steele, Lea & Flood 2014 (SplitMix), of the places."""
    z = torch.arange(first + 1, first + count + 1, device=device) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
    return (z ^ (z >> 31)) | 1


@dataclass(frozen=True)
class Drift:
    """Replicas that are not alike: of each rank that most others outvote the first parameter in which it differs, and
    the parameters of which no value has a majority, as of 2 ranks that differ: one is wrong, and nothing says which."""

    step: int
    first: dict[int, str]
    undecided: tuple[str, ...]

    def __str__(self) -> str:
        said = [f"rank {rank} differs from most, first in {name}" for rank, name in self.first.items()]
        if self.undecided:
            said.append(f"ranks differ in {self.undecided[0]}, and no value has a majority")
        return f"step {self.step}: " + "; ".join(said)


class Drifted(RuntimeError):
    """Raised on all ranks alike; `drift` says who differs."""

    def __init__(self, drift: Drift) -> None:
        super().__init__(str(drift))
        self.drift = drift


def drift_of(names: Sequence[str], checksums: Sequence[Sequence[int]], step: int = 0) -> Drift | None:
    """Who differs, from a row of checksums of each rank, one for each name; None where all rows are alike.

    Each parameter is voted on by itself, by more than half of the ranks. ``ValueError`` for rows of other lengths.
    """
    for rank, row in enumerate(checksums):
        if len(row) != len(names):
            raise ValueError(f"checksums must have {len(names)} of each rank, one a name; rank {rank} has {len(row)}")
    first, undecided = dict[int, str](), list[str]()
    for name, column in zip(names, zip(*checksums, strict=True), strict=False):
        value, votes = Counter(column).most_common(1)[0]
        if 2 * votes <= len(column):
            undecided.append(name)
            continue
        for rank, each in enumerate(column):
            if each != value:
                first.setdefault(rank, name)
    return Drift(step, dict(sorted(first.items())), tuple(undecided)) if first or undecided else None


class Replicas:
    """Watches that the parameters (and buffers) of `module` are the same bits on all ranks of `group`.

    Call `step` after each optimizer step, on all ranks. Every `every` steps each rank sends one checksum of all its
    parameters to the others, 8 (N−1) bytes around the ring, and reads its weights once; where these differ another 8
    for each parameter, and `Drifted` is raised on all ranks. A change that stays is thus found within `every` steps.
    What drifts alike on all ranks is not found, nor what is no parameter, as an optimizer's state before its next step.
    """

    def __init__(self, module: nn.Module, *, every: int, group: Group = None) -> None:
        self.every = whole("every", every, 1)
        alike.size_of(group)
        self.module, self.group, self.num_steps = module, group, 0

    def step(self) -> None:
        """Count a step, and compare if it is time to. Raises `Drifted`."""
        self.num_steps += 1
        if self.num_steps % self.every == 0 and (drift := self.look()) is not None:
            raise Drifted(drift)

    def look(self) -> Drift | None:
        """Compare now, on all ranks: who differs, or None."""
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        if not state:
            return None
        sums = torch.stack([checksum(tensor) for tensor in state.values()])
        totals = alike.gathered(_weighed(sums).reshape(1), self.group)
        if (totals == totals[0]).all():
            return None
        return drift_of(list(state), alike.gathered(sums, self.group).tolist(), self.num_steps)


class Altered(RuntimeError):
    """Raised on all ranks alike: `first` has the first tensor that has changed of each rank of which one has."""

    def __init__(self, first: Mapping[int, str]) -> None:
        super().__init__(
            "; ".join(f"{name} of rank {rank} has changed while nobody used it" for rank, name in first.items())
        )
        self.first = dict(first)


class AtRest:
    """Watches that tensors are the same bits when they are used again as when they were left: also what no other rank
    has, shards of weights and of an optimizer's states.

    `leave` them after an optimizer step and `look` before the next one uses them. Either reads them once; looking sends
    a byte to each other rank, and names where something is wrong. What a rank computes wrongly in between is not found.
    """

    def __init__(self, group: Group = None) -> None:
        alike.size_of(group)
        self.group, self.sums = group, dict[str, int]()

    def leave(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember a checksum of each of this rank's `tensors`."""
        self.sums = {name: int(checksum(tensor)) for name, tensor in tensors.items()}

    def look(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `Altered` on all ranks unless all `tensors` are as they were left; ``ValueError`` for other names."""
        if self.sums and tensors.keys() != self.sums.keys():
            raise ValueError(f"tensors must be those that were left, {list(self.sums)}, not {list(tensors)}")
        changed = next((name for name, total in self.sums.items() if int(checksum(tensors[name])) != total), None)
        device = next(iter(tensors.values())).device if tensors else None
        if not alike.gathered(torch.tensor([changed is not None], dtype=torch.uint8, device=device), self.group).any():
            return
        names: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(names, changed, group=self.group)
        raise Altered({rank: name for rank, name in enumerate(names) if name is not None})


def not_finite(parameters: Iterable[nn.Parameter], group: Group = None) -> tuple[int, ...]:
    """The ranks of `group` with a gradient that has an inf or a NaN: the same answer on all, who then skip alike.

    Each rank sends a byte to the others, N−1 in all. After an all-reduce of gradients the answer is the same without a
    word, as a NaN reaches all; where ranks have their own, in ZeRO or slices, a rank that skips alone is not like the
    others any more. Parameters without a gradient count as finite. The numbers are those within the group.
    """
    alike.size_of(group)
    grads = [each.grad for each in parameters if each.grad is not None]
    bad = torch.tensor([any(not bool(torch.isfinite(grad).all()) for grad in grads)], dtype=torch.uint8)
    device = grads[0].device if grads else torch.device("cpu")
    return tuple(alike.gathered(bad.to(device), group).flatten().nonzero().flatten().tolist())


class Spikes:
    """Watches a loss: ``"go"``, ``"skip"`` this step's update, or ``"roll back"`` to a checkpoint.

    A loss spikes if it is not finite or above m + `factor` s: m is the median of the last `window` losses that did not,
    s their spread (1.4826 of the median distance from m, and at least a hundredth of m). A batch may be bad, and is
    skipped; after `patience` spikes in a row it is the weights that are, and skipping no longer helps. Chowdhery et al.
    2022 (PaLM) restart some 100 steps before, and leave out the batches seen since.

    Give all ranks the same number, the loss averaged over them: each decides for itself. Before there are `window`
    losses only those that are not finite spike. A slow rise is followed and not seen.
    """

    def __init__(self, *, window: int = 32, factor: float = 8.0, patience: int = 3) -> None:
        self.patience = whole("patience", patience, 1)
        self.factor = float(amount("factor", factor, positive=True))
        self.losses = deque[float](maxlen=whole("window", window, 2))
        self.in_a_row = 0

    def look(self, loss: float) -> str:
        """What to do about a step with this loss, before its update. After ``"roll back"`` it starts afresh."""
        if not self._spikes(loss):
            self.losses.append(loss)
            self.in_a_row = 0
            return "go"
        self.in_a_row += 1
        if self.in_a_row < self.patience:
            return "skip"
        self.losses.clear()
        self.in_a_row = 0
        return "roll back"

    def _spikes(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self.losses) < (self.losses.maxlen or 0):
            return False
        middle = median(self.losses)
        spread = max(1.4826 * median(abs(each - middle) for each in self.losses), abs(middle) / 100)
        return loss > middle + self.factor * spread
