"""What recorded calls must have sent, whatever the algorithm: lower bounds that hold for every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def least_bytes(events: Sequence[Mapping[str, Any]], world_size: int) -> float:
    """What a rank sends in the recorded calls, when each collective meets its lower bound."""
    share = (world_size - 1) / world_size
    factors = {"send": 1.0, "receive": 0.0, "all_reduce": 2 * share, "all_gather": world_size - 1.0}
    return sum(event["bytes"] * factors.get(event["op"], share) for event in events if "bytes" in event)


def surely_sent_bytes(events: Sequence[Mapping[str, Any]], world_size: int) -> float:
    """What any rank sends in the recorded calls, whoever it is: in a broadcast, say, only some ranks send."""
    return least_bytes([event for event in events if event["op"] in ("send", "all_reduce")], world_size)
