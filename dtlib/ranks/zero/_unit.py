"""A unit: the parameters that stage 3 gathers, uses and frees together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dtlib.ranks.collectives._peers import Peers

from ._exchange import Gather
from ._flat import Flat
from ._quantised import QuantisedGather


class Unit:
    """One module's own parameters, those of the units inside it left out, as flat buffers of one dtype each.

    The full weights are `away` (a rank has its chunk alone), `coming` (memory is there, chunks are on their way) or
    `here`. While they are away a parameter of the module is the piece that this rank owns, flat and perhaps empty.
    Autograd keeps views of the full buffers; so their memory is given back and asked for anew under the same tensors.
    """

    def __init__(self, name: str, module: nn.Module, peers: Peers, quantised_block: int | None) -> None:
        self.name, self.module, self.peers, self.quantised_block = name, module, peers, quantised_block
        self.flats: list[Flat] = []
        self.trainable: list[Flat] = []
        self.params: dict[int, Tensor] = {}
        self.state = "away"
        self.done = False  # in this backward pass
        self.open_calls = 0  # forward passes whose input gradients are still to come
        self._gathers: list[Gather | QuantisedGather] = []

    @torch.no_grad()
    def add(self, flat: Flat, params: Sequence[Tensor]) -> None:
        """Take over a flat buffer: from now on this rank keeps its chunk of it."""
        flat.shard = flat.shard.clone()
        self.flats.append(flat)
        if params[0].requires_grad:
            self.trainable.append(flat)
        self.params.update(zip(flat.indices, params, strict=True))
        self._put_away(flat)

    @property
    def has_frozen(self) -> bool:
        """Whether gradients of its inputs may need weights that have no gradient themselves."""
        return len(self.trainable) < len(self.flats)

    @property
    def full_bytes(self) -> int:
        """Bytes of its full weights."""
        return sum(flat.num_elements * flat.shard.element_size() for flat in self.flats)

    @torch.no_grad()
    def start(self, *, exact: bool = False) -> None:
        """Start to gather the full weights, unless they are here or coming."""
        if self.state != "away":
            return
        for flat in self.flats:
            flat.full.untyped_storage().resize_(flat.num_elements * flat.full.element_size())
            where = (self.peers, flat.full, flat.bounds, flat.number)
            if self.quantised_block is None or exact:
                flat.full[flat.own] = flat.shard
                self._gathers.append(Gather(*where))
            else:
                self._gathers.append(QuantisedGather(*where, block=self.quantised_block, shard=flat.shard))
        self.state = "coming"

    def bring(self, *, exact: bool = False) -> None:
        """Return once the full weights are here; `exact` ones even where they are rounded for their use."""
        if exact and self.quantised_block is not None:
            self.send_away()
        self.start(exact=exact)
        if self.state == "coming":
            self._wait()
            for flat in self.flats:
                for index in flat.indices:
                    self.params[index].data = flat.view(flat.full, index)
            self.state = "here"

    def send_away(self) -> None:
        """Free the full weights."""
        if self.state == "away":
            return
        self._wait()
        for flat in self.flats:
            self._put_away(flat)
        self.state = "away"

    @torch.no_grad()
    def write_back(self) -> None:
        """Keep this rank's chunk of the full weights, which were changed while they were here."""
        for flat in self.flats:
            flat.shard.copy_(flat.full[flat.own])
            flat.give_master()

    def _wait(self) -> None:
        for gather in self._gathers:
            gather.wait()
        self._gathers = []

    def _put_away(self, flat: Flat) -> None:
        for index in flat.indices:
            self.params[index].data = flat.shard[:0]
        for piece in flat.pieces:
            self.params[piece.index].data = piece.of(flat.shard)
        flat.full.untyped_storage().resize_(0)


def choose(module: nn.Module, units: Iterable[nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """The units of `module` by name, itself first, in the order of registration.

    By default the children of its outermost ``ModuleList`` and ``Sequential`` containers. ``ValueError`` for one that
    is no part of `module`.
    """
    names = {id(each): name for name, each in reversed(list(module.named_modules()))}
    if units is None:
        wanted = set(_children_of_containers(module))
    else:
        wanted = set()
        for each in units:
            if not isinstance(each, nn.Module):
                raise TypeError(f"units must be modules, not {each!r}")
            if id(each) not in names:
                raise ValueError(f"units must be parts of module, and a {type(each).__name__} is none")
            wanted.add(id(each))
    wanted.add(id(module))
    return [(name, each) for name, each in module.named_modules() if id(each) in wanted]


def _children_of_containers(module: nn.Module) -> Iterable[int]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        yield from (id(child) for child in module)
    else:
        for child in module.children():
            yield from _children_of_containers(child)


def assign(module: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> dict[int, int]:
    """Which of `units` each parameter (by ``id``) belongs to: the innermost around all modules that have it."""
    number = {id(each): position for position, (_, each) in enumerate(units)}
    chains: dict[int, list[int]] = {}
    for name, each in module.named_modules(remove_duplicate=False):
        chain = _units_around(module, name, number)
        for parameter in each._parameters.values():
            if parameter is not None:
                seen = chains.setdefault(id(parameter), chain)
                chains[id(parameter)] = [unit for unit in seen if unit in chain]
    return {identity: chain[-1] for identity, chain in chains.items()}


def _units_around(module: nn.Module, name: str, number: dict[int, int]) -> list[int]:
    chain = [number[id(module)]]
    at = module
    for part in filter(None, name.split(".")):
        at = at._modules[part]
        if id(at) in number:
            chain.append(number[id(at)])
    return chain
