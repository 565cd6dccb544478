"""A shard: some parameters end to end in one flat buffer, of which each rank owns a chunk.

The cut goes through parameters: a rank may own the end of one, all of the next and the start of a third. So the chunks
differ by one element at most, whatever the shapes, and what travels needs no padding. D is the buffer's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlib.ranks.collectives import ring_all_reduce
from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.exchange import NUM_PARTS, finish, gather, gather_parts, scatter
from dtlib.ranks.shared.parts import Piece, as_piece
from dtlib.ranks.shared.peers import Peers
from dtlib.ranks.shared.quantise import coded, coded_bytes, decoded
from dtlib.ranks.shared.replicas import group_of, raw_grad, set_raw_grad
from dtlib.theory.collectives import chunk_bounds

from .parameter import claim, mark


class Shard:
    """Parameters of one dtype, device and group as one flat buffer, and what a rank keeps of it.

    N are the ranks of `group`, or those that the parameters belong to, which then own its chunks among them.

    - `full`: D bytes, all weights; at stage 3 its memory comes and goes.
    - `chunk`: D/N bytes, this rank's part of them; `master` is its copy in another dtype, if the optimizer has one.
    - `sent`: D bytes, the gradient on its way to the owners, or None.
    - `grad`: D/N bytes, this rank's part of the mean gradient, or None; at stage 1 a part of `buffer`, of D bytes.

    `params` are the parameters by their number in the wrapper, `places` where each lies in `full`, and `pieces` where
    what this rank owns of it lies in the chunk. `weights` are the pieces as the optimizer steps them.
    """

    def __init__(
        self,
        params: Mapping[int, tuple[str, Tensor]],
        *,
        group: Group,
        stage: int,
        replicas: Group = None,
        param_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        quantised_block: int | None = None,
    ) -> None:
        _, first = next(iter(params.values()))
        self.peers = peers = Peers(first.device, group_of(first, group))
        self.number = next(iter(params))  # not a count of shards: ranks with other experts may have more of them
        self.stage, self.replicas, self.quantised_block = stage, replicas, quantised_block
        self.num_ranks = dist.get_world_size(group)
        self.factor = 1 / (self.num_ranks * (1 if replicas is None else dist.get_world_size(replicas)))
        self.names = {index: name for index, (name, _) in params.items()}
        self.params = {index: parameter for index, (_, parameter) in params.items()}
        self.shapes = {index: parameter.shape for index, parameter in self.params.items()}
        self.places, self.num_elements = dict[int, slice](), 0
        for index, shape in self.shapes.items():
            self.places[index] = slice(self.num_elements, self.num_elements + shape.numel())
            self.num_elements += shape.numel()
        self.bounds = chunk_bounds(self.num_elements, peers.n)
        self.own = slice(self.bounds[peers.rank], self.bounds[peers.rank + 1])
        self.pieces = dict(self._pieces())
        self.sent: Tensor | None = None
        self.grad: Tensor | None = None
        self.buffer: Tensor | None = None
        self.used = set[int]()  # parameters with a gradient in `grad`
        self.missing = 0  # gradients that are still to come in this backward pass
        self.hooks: Mapping[int, Any] = {}  # on the gradients; who wraps the module anew takes their place
        self._gathering: Iterator[None] = iter(())
        self._scattering: Iterator[None] = iter(())
        self._take_over(param_dtype, master_dtype)

    def _pieces(self) -> Iterator[tuple[int, slice]]:
        for index, place in self.places.items():
            start, stop = max(self.own.start, place.start), min(self.own.stop, place.stop)
            if start < stop:
                yield index, slice(start - self.own.start, stop - self.own.start)

    @torch.no_grad()
    def _take_over(self, param_dtype: torch.dtype | None, master_dtype: torch.dtype | None) -> None:
        first = next(iter(self.params.values()))
        self.is_trained, kept_dtype = first.requires_grad, master_dtype or first.dtype
        self.full = torch.empty(self.num_elements, dtype=param_dtype or first.dtype, device=first.device)
        self.chunk, self.master, self.state = self.full[self.own], None, "here"
        for index, parameter in self.params.items():
            self.view(self.full, index).copy_(parameter)
        if self.is_trained and kept_dtype != self.full.dtype:  # from the weights as they were, before any rounding
            self.master = torch.empty(self.chunk.shape, dtype=kept_dtype, device=first.device)
            for index, piece in self.pieces.items():
                self.master[piece] = self.params[index].reshape(-1)[self.within(index)]
        self.kinds = {}  # of gradients: what a rank has is a piece, or what it was before
        for index, parameter in self.params.items():
            parameter.data = self.view(self.full, index)
            self.kinds[index] = Piece if self.num_ranks > 1 else getattr(parameter, "kind", Tensor)
            claim(parameter, self, index, self.names[index])
        if self.stage == 3:
            self.chunk = self.chunk.clone()
            self.free()
        stepped = self.chunk if self.master is None else self.master
        self.weights = {index: nn.Parameter(stepped[piece]) for index, piece in self.pieces.items() if self.is_trained}

    def view(self, flat: Tensor, index: int) -> Tensor:
        """The part of parameter `index` in a buffer laid out as `full`, in its own shape."""
        return flat[self.places[index]].view(self.shapes[index])

    def within(self, index: int) -> slice:
        """Which elements of the flattened parameter `index` this rank owns."""
        piece, shift = self.pieces[index], self.own.start - self.places[index].start
        return slice(piece.start + shift, piece.stop + shift)

    # Weights: gather, wait, free

    @torch.no_grad()
    def gather(self, *, exact: bool = False) -> None:
        """Start to gather the weights; in 8 bits, if blocks of so many elements share a scale, unless `exact`.

        Sends (N−1)/N · D bytes, or (N−1)/N · (1 + 4/block) for each element. The owner's chunk stays exact.
        """
        if self.stage == 3:
            self.full.untyped_storage().resize_(self.num_elements * self.full.element_size())
            self.full[self.own] = self.chunk
        if self.quantised_block is None or exact:
            self._gathering = gather(self.peers, self.full, self.bounds, self.number)
        else:
            self._gathering = self.gather_rounded()
        next(self._gathering)
        self.state = "coming"

    def gather_rounded(self) -> Iterator[None]:
        """As `exchange.gather`, in 8 bits: `full` is in the end what was rounded, of every rank alike."""
        assert self.quantised_block is not None
        block, ranges = self.quantised_block, [slice(*ends) for ends in pairwise(self.bounds)]
        num_bytes = [coded_bytes(each.stop - each.start, 8, block) for each in ranges]
        codes = yield from gather_parts(self.peers, coded(self.full[self.own], 8, block), num_bytes, self.number)
        for each, part in zip(ranges, codes.split(num_bytes), strict=True):
            self.full[each] = decoded(part, each.stop - each.start, 8, block)

    def wait(self) -> None:
        """Return once the full weights are here, for the module to use."""
        finish(self._gathering)
        self.state = "here"
        for index, parameter in self.params.items():
            mark(parameter, away=False)
            parameter.data = self.view(self.full, index)

    def free(self) -> None:
        """Give the memory of the full weights back; a parameter is the piece that this rank owns, flat or empty.

        Autograd keeps views of the full weights, so it is their memory that comes and goes, under the same tensors.
        """
        finish(self._gathering)
        self.state = "away"
        for index, parameter in self.params.items():
            parameter.data = self.chunk[self.pieces.get(index, slice(0))]
            mark(parameter, away=True)
        self.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def take_full(self) -> None:
        """Keep this rank's chunk of the full weights, which were changed while they were here."""
        self.chunk.copy_(self.full[self.own])
        if self.master is not None:
            self.master.copy_(self.chunk)

    # The way of a gradient: reduce, advance, keep

    def begin_backward(self) -> None:
        """A backward pass begins: what lost its ``.grad`` by hand since the last one is forgotten."""
        self.missing = len(self.params)
        handed_out = self.used if self.grad is not None and self.master is None else set()
        if lost := [i for i, weight in self.weights.items() if i in handed_out and weight.grad is None]:
            self.forget(lost)

    @property
    def is_due(self) -> bool:
        """Whether another part of the reduction under way should be here: they end evenly over this one's gradients."""
        return self.missing % max(1, len(self.params) // min(NUM_PARTS, max(1, self.peers.n - 1))) == 0

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to reduce-scatter the gradients, divided by the ranks; a missing one counts as zero. Sends (N−1)/N · D
        bytes."""
        self.sent = sent = self.full.new_empty(self.num_elements)
        for index, parameter in self.params.items():
            gradient = raw_grad(parameter)
            if gradient is None:
                self.view(sent, index).zero_()
            else:
                torch.mul(gradient, self.factor, out=self.view(sent, index))
                self.used.add(index)
                set_raw_grad(parameter, None)
                del gradient  # its memory goes, before the next one's turn
        self._scattering = self.scatter(sent)
        self.advance()

    def scatter(self, sent: Tensor) -> Iterator[None]:
        """As `exchange.scatter`."""
        return scatter(self.peers, sent, self.bounds, self.number)

    @torch.no_grad()
    def advance(self) -> None:
        """Add up the part of the reduction that is due by now, and let the next one come."""
        next(self._scattering, None)

    @torch.no_grad()
    def keep(self) -> None:
        """Wait for the reduction, over the replicas too, and keep what the stage says."""
        finish(self._scattering)
        sent, self.sent = self.sent, None
        assert sent is not None
        own = sent[self.own]
        if self.replicas is not None:
            ring_all_reduce(own, group=self.replicas)
        if self.grad is not None:
            self.grad.add_(own)
        elif self.stage > 1:
            self.grad = own.clone()
        else:
            self.buffer, self.grad = sent, own

    def gradient_of(self, index: int) -> Tensor | None:
        """What this rank has of the mean gradient of a parameter: its piece, or in stage 1 the place in the buffer."""
        if self.grad is None or index not in self.used:
            return None
        here = self.grad[self.pieces.get(index, slice(0))] if self.buffer is None else self.view(self.buffer, index)
        return as_piece(here, self.kinds[index])

    # What the optimizer sees

    def hand_out(self, *, widened: bool = False) -> None:
        """Let the ``.grad`` of what the optimizer steps be the mean; parameters without one on any rank have none.

        Those of a master copy are of another dtype: they are made (`widened`) for the step alone.
        """
        for index, weight in self.weights.items():
            weight.grad = None
            if self.grad is not None and index in self.used and (self.master is None or widened):
                here = self.grad[self.pieces[index]].to(weight.dtype)
                weight.grad = as_piece(here, self.kinds[index])

    def end_step(self) -> None:
        """The optimizer has stepped `weights`: round the master copy to the weights' dtype."""
        if self.master is not None:
            self.chunk.copy_(self.master)
            self.hand_out()

    def forget(self, indices: Iterable[int], *, set_to_none: bool = True) -> None:
        """Forget the mean gradients of these parameters, or count them as zero."""
        if set_to_none:
            self.used -= set(indices)
            if not self.used:
                self.grad = self.buffer = None
        for index in indices:
            if self.grad is not None and index in self.pieces:
                self.grad[self.pieces[index]].zero_()
        self.hand_out()

    def tensors_by_kind(self) -> Iterator[tuple[Tensor, str]]:
        """What there is of its tensors now, and what each is for, in the words of ``lab.memory``."""
        kinds = {
            "parameters": (self.full, self.chunk),
            "optimizer": (self.master,),
            "gradients": (self.grad, self.buffer, self.sent),
        }
        return ((tensor, kind) for kind, tensors in kinds.items() for tensor in tensors if tensor is not None)
