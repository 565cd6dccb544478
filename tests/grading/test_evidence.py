"""What a submission reports counts only as far as the kernel saw the same."""

from __future__ import annotations

from typing import Any

import pytest

from dtlib.grading import evidence
from dtlib.grading.harness import MAX_EVENTS, TROUBLE_MARK

CASE = {"world_size": 2}


def send(peer: int, num_bytes: int) -> dict[str, Any]:
    return {"op": "send", "bytes": num_bytes, "peer": peer}


def ranks(*events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"events": list(each), "sent_bytes": 1, "wire_bytes": 2, "library": []} for each in events]


def traffic(
    *messages: tuple[int, int, str, int], sent: tuple[int, int] = (400, 300), other: int = 0, complete: bool = True
):
    return {"sent_bytes": sent, "other_bytes": other, "messages": messages, "complete": complete, "settled": []}


def test_bytes_are_those_of_the_kernel():
    run = evidence.run_from(
        CASE, ranks([send(1, 400)], [send(0, 300)]), traffic((0, 1, "send", 400), (1, 0, "send", 300))
    )
    assert run.trouble is None
    assert [data["sent_bytes"] for data in run.ranks] == [400, 300]
    assert run.wire_bytes == 700


def test_bytes_that_no_open_connection_explains_belong_to_the_total():
    run = evidence.run_from(CASE, ranks([], []), traffic(other=1000))
    assert run.wire_bytes == 1700


@pytest.mark.parametrize(
    ("recorded", "seen", "said"),
    [
        ([send(1, 400)], [], "was recorded but never sent"),
        ([], [(0, 1, "send", 400)], "was sent but is not in the record"),
        ([send(1, 400)], [(0, 1, "send", 200), (0, 1, "send", 200)], "was recorded but never sent"),
        ([send(1, 400)], [(0, 1, "all_reduce", 200), (0, 1, "send", 400)], "a collective (all_reduce)"),
        ([{"op": "all_gather", "bytes": 4}], [(0, 1, "all_reduce", 200)], "a collective (all_reduce)"),
    ],
)
def test_a_record_that_the_network_does_not_bear_out_is_no_evidence(recorded: Any, seen: Any, said: str):
    run = evidence.run_from(CASE, ranks(recorded, []), traffic(*seen))
    assert run.trouble is not None
    assert run.trouble.kind == "tampered"
    assert said in run.trouble.text


@pytest.mark.parametrize(
    ("op", "what"),
    [
        ("all_reduce", "all_reduce"),
        ("reduce_scatter", "all_reduce"),
        ("reduce_scatter_tensor", "all_reduce"),
        ("all_gather_into_tensor", "all_gather"),
        ("broadcast", "broadcast"),
        ("all_to_all", "all_to_all"),
    ],
)
def test_a_recorded_collective_may_be_on_the_wire(op: str, what: str):
    run = evidence.run_from(
        CASE, ranks([{"op": op, "bytes": 100}], []), traffic((0, 1, what, 50), (1, 0, "barrier", 0))
    )
    assert run.trouble is None


def test_messages_that_nobody_framed_are_no_evidence():
    for seen in (traffic(complete=False), traffic(other=10**5)):
        run = evidence.run_from(CASE, ranks([], []), seen)
        assert run.trouble is not None
        assert "beside the messages" in run.trouble.text


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"events": None},
        {"events": [None]},
        {"events": [{"op": "send", "bytes": 4, "peer": []}]},
        {"events": [{"op": "send", "bytes": "x", "peer": 1}]},
        {"events": [{"op": "send"}] * (MAX_EVENTS + 1)},
        {TROUBLE_MARK: None},
        {TROUBLE_MARK: {"kind": 3, "type": []}},
        {evidence.FORGED: "x" * 10**6},
    ],
)
def test_forms_that_the_harness_does_not_write_never_raise(data: Any):
    run = evidence.run_from(CASE, [data, data], traffic())
    assert run.trouble is not None
    assert len(run.trouble.text) < 1000


def test_a_reported_line_opens_no_file(tmp_path):
    secret = tmp_path / "solutions.py"
    secret.write_text("the answer\n")
    report = {
        "kind": "raised",
        "type": "E",
        "text": "t",
        "file": str(secret),
        "number": 1,
        "function": "f",
        "source": "",
    }
    run = evidence.run_from(CASE, [{TROUBLE_MARK: report}, {}], traffic())
    assert run.trouble is not None
    assert "answer" not in str(run.trouble)


def test_without_a_private_network_the_ranks_own_counts_stay():
    run = evidence.run_from(CASE, ranks([], []), None)
    assert run.wire_bytes == 2
    assert run.ranks[0]["sent_bytes"] == 1


@pytest.mark.parametrize(
    ("sent_by_then", "said"),
    [
        ([[100_000, 100_000]], ""),
        ([[99_000, 100_000]], ""),
        ([[40_000, 100_000]], "rank 0 had not sent by the end of backward"),
        ([[100_000, 0]], "rank 1 had not sent by the end of backward"),
        ([], "took the harness's part"),
        ([[100_000, 100_000]] * 2, "took the harness's part"),
    ],
)
def test_what_a_record_says_was_under_way_must_have_been_sent(sent_by_then: Any, said: str):
    events = [{"op": "all_reduce", "bytes": 100_000}, {"op": "backward done"}, {"op": "all_reduce", "bytes": 9}]
    seen = {**traffic((0, 1, "all_reduce", 50)), "settled": sent_by_then}
    run = evidence.run_from(CASE, ranks(events, events), seen)
    assert said in str(run.trouble or "")
    assert (run.trouble is None) == (said == "")
