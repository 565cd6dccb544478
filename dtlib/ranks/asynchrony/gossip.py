"""Means of neighbours in place of the mean of all."""

from __future__ import annotations

import torch
from torch import nn

from dtlib.ranks.mesh import Group
from dtlib.ranks.shared.alike import refuse_unlike_calls, size_of
from dtlib.ranks.shared.peers import Peers, wait_for
from dtlib.ranks.shared.replicas import begin_alike, refuse_changes, signature
from dtlib.theory.valid import whole

from .flat import described, joined, spread, statistics, trained

GRAPHS = ("ring", "exponential")


class Gossip:
    """Call `mix` after each step of any optimizer: a rank's weights become the mean of its own and its neighbours'.

    On the "ring" these are the ranks before and after, a third each (one other rank of two: a half); Lian et al. 2017,
    arXiv 1705.09056. On the "exponential" graph round k takes half from the rank 2^(k mod ⌈log₂ N⌉) before, and gives
    as far ahead: after log₂ N rounds without a step between all have the mean, if N is a power of two (Assran et al.
    2019, arXiv 1811.10792). The mean of all ranks' weights stays as it is in each round, but for rounding.

    A rank sends the D bytes of the trained parameters to each of two (ring of three and more) or one. All begin with
    the weights and buffers of rank 0. ``ValueError`` on all ranks for what cannot be or differs between them, and for
    running statistics, which are not mixed.
    """

    def __init__(self, model: nn.Module, graph: str = "ring", *, group: Group = None) -> None:
        if graph not in GRAPHS:
            raise ValueError(f"graph must be one of {', '.join(GRAPHS)}, not {graph!r}")
        self.n = size_of(group)
        parameters = trained(model, group)
        if names := list(statistics(model)):
            raise ValueError(f"model must have no statistics beside its weights, as they are not mixed; it has {names}")
        refuse_unlike_calls("Gossip", f"{graph}: {described(parameters)}", group)
        self.graph, self.parameters = graph, list(parameters.values())
        self.peers, self.round = Peers(self.parameters[0].device, group), 0
        begin_alike(model, group)
        self.model, self._as_wrapped = model, signature(model)

    def distances(self) -> list[int]:
        """From how far back in the order of ranks the next round's weights come: as far ahead this rank's go."""
        if self.n == 1:
            return []
        if self.graph == "ring":
            return [1] if self.n == 2 else [1, self.n - 1]
        return [2 ** (self.round % (self.n - 1).bit_length())]

    @torch.no_grad()
    def mix(self) -> None:
        """One round. ``RuntimeError`` where the model's parameters are no longer those that are mixed."""
        refuse_changes(self._as_wrapped, signature(self.model))
        own, distances = joined(self.parameters), self.distances()
        arrived = [torch.empty_like(own) for _ in distances]
        for distance, flat in zip(distances, arrived, strict=True):
            to, source = (self.peers.rank + distance) % self.n, (self.peers.rank - distance) % self.n
            wait_for(self.peers.exchange(own, to, flat, source))
        spread(sum(arrived, own) / (1 + len(arrived)), self.parameters)
        self.round += 1

    def state_dict(self) -> dict[str, int]:
        """Which round comes next."""
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there; all ranks must load the same."""
        number = whole("round", state["round"], 0)
        refuse_unlike_calls("Gossip.load_state_dict", f"round={number}", self.peers.group)
        self.round = number
