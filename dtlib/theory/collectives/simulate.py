"""Ranks as rows of a numpy array: run a schedule, count what it sends, and see who knows what after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtlib.theory import valid

from .chunks import chunk_bounds
from .schedule import Round, Schedule, schedule

OPS = ("sum", "mean", "max")

Rows = NDArray[Any]


@dataclass(frozen=True)
class Simulation:
    """What a simulated collective did.

    `results` holds what the collective gives each rank, in rank order; `sent_bytes` what each rank sent;
    `steps` the rounds in which something travelled; `longest_bytes` the longest message of each round;
    `rounds` the schedule that was run.
    """

    results: list[Rows]
    sent_bytes: tuple[int, ...]
    steps: int
    longest_bytes: tuple[int, ...]
    rounds: Schedule = field(repr=False)

    def seconds(self, alpha_seconds: float, link_bytes_per_s: float) -> float:
        """The α–β clock: each round takes α plus its longest message over B."""
        valid.timed(0, 1, alpha_seconds, link_bytes_per_s)
        return sum(alpha_seconds + size / link_bytes_per_s for size in self.longest_bytes)


def simulate(
    algorithm: str,
    rows: Any,
    op: str = "sum",
    *,
    ranks_per_node: int | None = None,
    src: int = 0,
) -> Simulation:
    """Run `algorithm` on `rows`, an (N, length) array whose row r is what rank r holds; `rows` itself is not changed.

    The results are, for an all-reduce or a broadcast, each rank's whole row; for ``ring_reduce_scatter`` rank
    r's chunk r; for ``tree_reduce`` the row of `src` and the untouched rows of the others; for
    ``ring_all_gather`` the gathered row, made of chunk r of each row r (the rest of a row is ignored); for
    ``pairwise_all_to_all`` the chunks that were sent to rank r, in the order of their senders. `op` is sum,
    mean (of floating point) or max. Raises ``ValueError`` for an array that is not two-dimensional, an
    unknown `op`, the mean of integers, or what `schedule` refuses.
    """
    state = np.array(rows)
    if state.ndim != 2 or not len(state):
        raise ValueError(f"rows must be an (N, length) array with N of at least 1, not of shape {state.shape}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    if op == "mean" and state.dtype.kind not in "fc":
        raise ValueError(f"op must be sum or max for {state.dtype}: a mean of whole numbers is not whole")
    n, length = state.shape
    rounds = schedule(algorithm, length, n, ranks_per_node=ranks_per_node, src=src)
    received = _exchanged(state) if algorithm == "pairwise_all_to_all" else None
    if algorithm == "ring_all_gather":
        state = _own_chunks(state)
    for transfers in rounds:
        run_round(state, transfers, op, received)
    bounds = chunk_bounds(length, n)
    if op == "mean":
        state = _averaged(algorithm, state, n, src)
    results = received if received is not None else list(state)
    if algorithm == "ring_reduce_scatter":
        results = [state[rank, bounds[rank] : bounds[rank + 1]] for rank in range(n)]
    sent = [0] * n
    for transfer in (t for transfers in rounds for t in transfers):
        sent[transfer.source] += (transfer.stop - transfer.start) * state.itemsize
    longest = tuple(max(t.stop - t.start for t in transfers) * state.itemsize for transfers in rounds)
    return Simulation(results, tuple(sent), len(rounds), longest, rounds)


def run_round(state: Rows, transfers: Round, op: str = "sum", received: list[Rows] | None = None) -> None:
    """Carry out one round on `state` in place: all messages leave before any arrives.

    Messages with a `place` are written to the second buffers, `received`.
    """
    messages = [state[t.source, t.start : t.stop].copy() for t in transfers]
    for t, message in zip(transfers, messages, strict=True):
        if t.place is not None:
            if received is None:
                raise ValueError("received must be a list of buffers: this round fills a second one")
            received[t.target][t.place : t.place + len(message)] = message
            continue
        here = state[t.target, t.start : t.stop]
        if not t.combine:
            here[:] = message
        elif op == "max":
            np.maximum(here, message, out=here)
        else:
            here += message


def contributions(algorithm: str, n: int, *, ranks_per_node: int | None = None, src: int = 0) -> NDArray[np.int64]:
    """Who knows what after each step, as an array [step, rank, chunk, contributor].

    An entry counts how often the contributor's value is inside what the rank holds for that chunk, for a
    buffer of n chunks of one element; step 0 is the start. A correct all-reduce ends in ones everywhere: a 0
    is a missing value, a 2 one that was added twice. Not for the all-to-all, which has a second buffer.
    """
    rounds = schedule(algorithm, n, n, ranks_per_node=ranks_per_node, src=src)
    if algorithm == "pairwise_all_to_all":
        raise ValueError("algorithm must be one that works in place; pairwise_all_to_all does not")
    held = np.zeros((n, n, n), dtype=np.int64)
    held[np.arange(n), :, np.arange(n)] = 1
    if algorithm == "ring_all_gather":
        held *= np.eye(n, dtype=np.int64)[:, :, None]
    history = [held.copy()]
    for transfers in rounds:
        run_round(held, transfers)
        history.append(held.copy())
    return np.stack(history)


def _averaged(algorithm: str, state: Rows, n: int, src: int) -> Rows:
    """Divide by n what was added up: everywhere, or at the root alone for a reduce; nothing where nothing was added."""
    if algorithm in ("ring_all_gather", "pairwise_all_to_all", "tree_broadcast"):
        return state
    if algorithm == "tree_reduce":
        state[src] /= n
        return state
    return state / n


def _own_chunks(state: Rows) -> Rows:
    """Keep chunk r of row r and blank the rest, so that nothing can be gathered that was not sent."""
    n, length = state.shape
    bounds, kept = chunk_bounds(length, n), np.zeros_like(state)
    for rank in range(n):
        kept[rank, bounds[rank] : bounds[rank + 1]] = state[rank, bounds[rank] : bounds[rank + 1]]
    return kept


def _exchanged(state: Rows) -> list[Rows]:
    """The second buffers of an all-to-all, with each rank's chunk for itself in place."""
    n, length = state.shape
    bounds, buffers = chunk_bounds(length, n), []
    for rank in range(n):
        chunk = state[rank, bounds[rank] : bounds[rank + 1]]
        buffer = np.zeros(n * len(chunk), dtype=state.dtype)
        buffer[rank * len(chunk) : (rank + 1) * len(chunk)] = chunk
        buffers.append(buffer)
    return buffers
