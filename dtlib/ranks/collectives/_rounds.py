"""Run a schedule: the plan is data (`dtlib.theory.collectives.schedule`), this executor only does as it says."""

from __future__ import annotations

from typing import Any

import torch

from dtlib.ranks.shared.peers import Peers, combine, new_scratch, pieces_ahead, segments, wait_for
from dtlib.theory.collectives import Round, Transfer, schedule


def run_schedule(
    peers: Peers,
    algorithm: str,
    buffer: torch.Tensor,
    op: str = "sum",
    *,
    second: torch.Tensor | None = None,
    **options: int,
) -> None:
    """Carry out this rank's part of `algorithm` on a flat `buffer`, in place; a mean comes out as a sum.

    Transfers with a `place` are received into `second`. `options` go to `schedule`.
    """
    for transfers in schedule(algorithm, buffer.numel(), peers.n, **options):
        run_round(peers, transfers, buffer, op, second=second)


def run_round(
    peers: Peers, transfers: Round, buffer: torch.Tensor, op: str, *, second: torch.Tensor | None = None
) -> None:
    """This rank's send and receive of one round, if it has any."""
    outgoing = next((t for t in transfers if t.source == peers.rank), None)
    incoming = next((t for t in transfers if t.target == peers.rank), None)
    leaving = buffer[:0] if outgoing is None else buffer[outgoing.start : outgoing.stop]
    landing = buffer[:0] if incoming is None else _landing(incoming, buffer, second)
    to = peers.rank if outgoing is None else outgoing.target
    source = peers.rank if incoming is None else incoming.source
    added = incoming is not None and incoming.combine
    if not peers.pipelined:
        arrived = new_scratch(landing, landing.numel()) if added else landing
        wait_for(peers.exchange(leaving, to, arrived, source))
        if added:
            combine(landing, arrived, op, out=landing)
        return
    cuts = _cut(leaving, outgoing is not None and outgoing.combine)
    sends = [peers.send(leaving[start:stop], to) for start, stop in cuts]
    if added:
        sends = _receive_and_combine(peers, landing, source, op, sends, leaving)
    else:
        wait_for([peers.receive(landing[start:stop], source) for start, stop in _cut(landing, added)])
    wait_for(sends)


def _landing(incoming: Transfer, buffer: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    if incoming.place is None:
        return buffer[incoming.start : incoming.stop]
    if second is None:
        raise ValueError("second must be a tensor: this schedule fills a second buffer")
    return second[incoming.place : incoming.place + incoming.stop - incoming.start]


def _cut(tensor: torch.Tensor, added: bool) -> list[tuple[int, int]]:
    return segments(0, tensor.numel(), tensor.element_size(), added=added)


def _receive_and_combine(
    peers: Peers, landing: torch.Tensor, source: int, op: str, sends: list[Any], leaving: torch.Tensor
) -> list[Any]:
    """Add what arrives to `landing`, a piece while the next one travels; returns the sends still to wait for.

    Where the same memory is `leaving`, a piece is overwritten once it has left.
    """
    pieces = _cut(landing, added=True)
    ahead = pieces_ahead(pieces, landing.element_size())
    scratch = [new_scratch(landing, stop - start) for start, stop in pieces[:ahead]]
    receives: list[Any] = []

    def post(index: int) -> None:
        if index < len(pieces):
            start, stop = pieces[index]
            receives.append(peers.receive(scratch[index % ahead][: stop - start], source))

    for index in range(ahead):
        post(index)
    overwrites_leaving = leaving.numel() > 0 and landing.data_ptr() == leaving.data_ptr()
    for index, (start, stop) in enumerate(pieces):
        receives[index].wait()
        if overwrites_leaving:
            sends[index].wait()
        here = landing[start:stop]
        combine(here, scratch[index % ahead][: stop - start], op, out=here)
        post(index + ahead)
    return [] if overwrites_leaving else sends  # a send is waited for once: gloo hangs on a second wait
