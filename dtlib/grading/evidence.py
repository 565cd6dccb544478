"""Holds what a submission's own processes report against what the kernel saw of their network.

Bytes are taken from outside. Who sent which message, and which collective was called, is recorded inside (the
record alone knows when a message was waited for), so each message in the record must be found on the wire and each
one on the wire in the record. What does not agree is no evidence: the case counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .exercise import Case, Run, Trouble
from .harness import MAX_EVENTS, TROUBLE_MARK
from .harness.lower_bounds import surely_sent_bytes
from .runner import told

FORGED = "dtlib-grading-forged"
_MOST_OF = 0.95  # a collective's last bytes may wait for another rank
_SLACK_BYTES = 4096  # a connection that was opened and closed costs headers; an answer's data are far more
# What gloo puts on the wire for a collective of the record, by how its name begins: a reduce-scatter is an all-reduce.
_ON_THE_WIRE = (
    ("reduce_scatter", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("all_gather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
)
_NO_COLLECTIVE = ("send", "receive", "wait", "barrier")


def run_from(case: Case, ranks: Sequence[dict[str, Any]], traffic: Mapping[str, Any] | None) -> Run:
    """The `Run` of one case from each rank's observation and the warden's `traffic` (None: it was not metered)."""
    for rank, data in enumerate(ranks):
        if FORGED in data:
            return Run(case, trouble=Trouble("tampered", str(data[FORGED])[:600]))
        if TROUBLE_MARK in data:
            try:
                who = "the function" if len(ranks) == 1 else f"rank {rank}"
                return Run(case, trouble=told(cleaned(data[TROUBLE_MARK]), who))
            except (KeyError, TypeError, AttributeError):
                return Run(case, trouble=Trouble("tampered", "an error was reported that the harness does not write"))
    if "world_size" not in case:
        return Run(case, tuple(ranks))
    if traffic is None:
        inside = [data.pop("wire_bytes", None) for data in ranks]
        return Run(case, tuple(ranks), wire_bytes=inside[0])
    try:
        forged = contradiction(ranks, traffic)
    except (KeyError, TypeError, AttributeError, ValueError):
        forged = "the record of its messages is not what the harness writes"
    if forged:
        return Run(case, trouble=Trouble("tampered", forged))
    for data, sent_bytes in zip(ranks, traffic["sent_bytes"], strict=True):
        data.pop("wire_bytes", None)
        data["sent_bytes"] = sent_bytes
    return Run(case, tuple(ranks), wire_bytes=sum(traffic["sent_bytes"]) + traffic["other_bytes"])


def cleaned(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a submission's process reported of an error, as short texts: no file of its choice is ever opened."""
    texts = {key: str(report.get(key) or "")[:600] for key in ("kind", "type", "text", "function", "source")}
    number = report.get("number")
    return {**texts, "file": None, "number": number if isinstance(number, int) and texts["source"] else None}


def contradiction(ranks: Sequence[Mapping[str, Any]], traffic: Mapping[str, Any]) -> str:
    """Where the ranks' records and the network disagree, in words; "" where they agree."""
    if not traffic["complete"] or traffic["other_bytes"] > _SLACK_BYTES:
        return "data crossed the network beside the messages of torch.distributed, or on connections that were closed"
    recorded: Counter[tuple[int, int, int]] = Counter()
    called: set[str] = set()
    for rank, data in enumerate(ranks):
        if len(data["events"]) > MAX_EVENTS:
            raise ValueError("more events than the harness records")
        for event in data["events"]:
            if event["op"] == "send" and event["bytes"]:
                recorded[rank, event["peer"], event["bytes"]] += 1
            elif "bytes" in event and event["op"] not in _NO_COLLECTIVE:
                called.add(_on_the_wire(event["op"]))
    seen: Counter[tuple[int, int, int]] = Counter()
    collectives: set[str] = set()
    for source, target, what, num_bytes in traffic["messages"]:
        if what == "send" and num_bytes:
            seen[source, target, num_bytes] += 1
        elif what not in _NO_COLLECTIVE and num_bytes:
            collectives.add(what)
    unrecorded = sorted(collectives - called)
    if unrecorded:
        return (
            f"the network carried a collective ({unrecorded[0]}) that the record of calls does not hold: a backend was "
            "called around the functions of torch.distributed, or the record was changed"
        )
    if called:  # gloo itself may use messages for what it builds on them
        missing, surplus = recorded - seen, Counter[tuple[int, int, int]]()
    else:
        missing, surplus = recorded - seen, seen - recorded
    for difference, words in ((missing, "was recorded but never sent"), (surplus, "was sent but is not in the record")):
        if difference:
            source, target, num_bytes = min(difference)
            return f"a message of {num_bytes} B from rank {source} to rank {target} {words}"
    return _unsettled(ranks, traffic["settled"])


def _unsettled(ranks: Sequence[Mapping[str, Any]], settled: Sequence[Sequence[int]]) -> str:
    """Whether a record says that messages were under way at a meeting, and the network had not seen them; "" if not.

    `settled` are the bytes that each rank had sent at each meeting of `harness.meter.settle`.
    """
    for rank, data in enumerate(ranks):
        events = data["events"]
        meetings = [index for index, event in enumerate(events) if event["op"] == "backward done"]
        if len(meetings) != len(settled):
            return "the submission took the harness's part at a meeting of the ranks"
        for index, sent in zip(meetings, settled, strict=True):
            if sent[rank] < _MOST_OF * surely_sent_bytes(events[:index], len(ranks)) - _SLACK_BYTES:
                return f"rank {rank} had not sent by the end of backward what its record says it had"
    return ""


def _on_the_wire(op: str) -> str:
    return next((what for beginning, what in _ON_THE_WIRE if op.startswith(beginning)), op)
