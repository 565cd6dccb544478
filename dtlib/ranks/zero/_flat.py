"""Parameters laid end to end in one flat buffer, which is cut into one chunk for each rank.

The cut goes through parameters: a rank may own the end of one, all of the next and the start of a third. So the chunks
differ by one element at most, whatever the shapes, and what travels needs no padding. D is the buffer's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dtlib.theory.collectives import chunk_bounds

from ._exchange import Scatter


@dataclass
class Piece:
    """The part of one parameter that lies in this rank's chunk.

    Its elements are [`start`, `stop`) of the flattened parameter, and `at` is where they begin in the chunk. `weight`
    is what the optimizer steps: a view of the chunk, or of its master copy.
    """

    index: int
    start: int
    stop: int
    at: int
    weight: nn.Parameter = field(init=False)

    def of(self, chunk: Tensor) -> Tensor:
        """Its elements in a tensor as long as the chunk."""
        return chunk[self.at : self.at + self.stop - self.start]


class Flat:
    """Some parameters of one dtype and device as one flat buffer, and what a rank keeps of it.

    - `full`: D bytes, all parameters; in stage 3 its memory comes and goes.
    - `shard`: D/N bytes, this rank's chunk of it.
    - `master`: the chunk in another dtype, if the optimizer works on a copy.
    - `grad`: D/N bytes, this rank's chunk of the mean gradient, or None.
    - `buffer`: D bytes, where gradients are collected on their way, or None. `filled` are the parameters whose part
      of it counts.
    """

    def __init__(self, number: int, indices: Sequence[int], params: Sequence[Tensor], rank: int, n: int) -> None:
        self.number, self.indices = number, list(indices)
        self.shapes = {i: p.shape for i, p in zip(indices, params, strict=True)}
        self.starts: dict[int, int] = {}
        self.num_elements = 0
        for index in self.indices:
            self.starts[index] = self.num_elements
            self.num_elements += self.shapes[index].numel()
        self.bounds = chunk_bounds(self.num_elements, n)
        self.own = slice(self.bounds[rank], self.bounds[rank + 1])
        self.pieces = list(self._pieces())
        self.full = torch.empty(self.num_elements, dtype=params[0].dtype, device=params[0].device)
        with torch.no_grad():
            for index, parameter in zip(self.indices, params, strict=True):
                self.view(self.full, index).copy_(parameter)
        self.shard = self.full[self.own]
        self.master: Tensor | None = None
        self.grad: Tensor | None = None
        self.resting: set[int] = set()  # parameters without a gradient on any rank
        self.buffer: Tensor | None = None
        self.filled: set[int] = set()
        self.missing, self.started = 0, False
        self.scatter: Scatter | None = None

    def _pieces(self) -> list[Piece]:
        pieces = []
        for index in self.indices:
            begin = self.starts[index]
            start = max(self.own.start, begin)
            stop = min(self.own.stop, begin + self.shapes[index].numel())
            if start < stop:
                pieces.append(Piece(index, start - begin, stop - begin, start - self.own.start))
        return pieces

    def view(self, flat: Tensor, index: int) -> Tensor:
        """The part of parameter `index` in a buffer laid out as this one, in its own shape."""
        shape = self.shapes[index]
        return flat[self.starts[index] : self.starts[index] + shape.numel()].view(shape)

    def tensors_by_kind(self) -> Iterator[tuple[Tensor, str]]:
        """What there is of its tensors now, and what each is for."""
        yield from ((self.full, "parameters"), (self.shard, "parameters"))
        if self.master is not None:
            yield self.master, "optimizer"
        yield from ((each, "gradients") for each in (self.grad, self.buffer) if each is not None)

    def make_weights(self, master_dtype: torch.dtype | None) -> None:
        """Make what the optimizer steps: views of the chunk, or of a new copy of it in `master_dtype`."""
        if master_dtype not in (None, self.shard.dtype):
            self.master = self.shard.to(master_dtype)
        for piece in self.pieces:
            piece.weight = nn.Parameter(piece.of(self.shard if self.master is None else self.master))

    def take_master(self) -> None:
        """Round the master copy to the weights' dtype."""
        if self.master is not None:
            self.shard.copy_(self.master)

    def give_master(self) -> None:
        """Widen the weights to the master copy, after they have been set from outside."""
        if self.master is not None:
            self.master.copy_(self.shard)

    @torch.no_grad()
    def collect(self, index: int, gradient: Tensor, factor: float) -> Tensor:
        """Add `factor` times a gradient to what is on its way; returns its place in the buffer."""
        if self.buffer is None:
            self.buffer = torch.empty(self.num_elements, dtype=self.full.dtype, device=self.full.device)
        view = self.view(self.buffer, index)
        if index in self.filled:
            view.add_(gradient, alpha=factor)
        else:
            torch.mul(gradient, factor, out=view)
            self.filled.add(index)
        return view

    @torch.no_grad()
    def clear_missing(self) -> None:
        """Count the parameters that nobody filled as zero."""
        if self.buffer is None:
            self.buffer = torch.zeros(self.num_elements, dtype=self.full.dtype, device=self.full.device)
        else:
            for index in self.indices:
                if index not in self.filled:
                    self.view(self.buffer, index).zero_()
