"""The recorder outlives its rank, and names who is behind, or in something else, before the backend hangs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.ranks.reliability import flight
from dtlib.ranks.reliability.flight import Call, behind, diagnose, read


def calls(*kinds, first=1, open_last=False, shape=(3,), dtype="float32"):
    found = [Call(first + i, kind, shape, dtype, True, f"a.py:{i}") for i, kind in enumerate(kinds)]
    return [*found[:-1], found[-1]._replace(finished=not open_last)] if found else []


A, B, C = "all_reduce", "broadcast", "barrier"


@pytest.mark.parametrize(
    ("records", "verdict", "number", "ranks"),
    [
        ([calls(A, B, open_last=True), calls(A)], "behind", 2, (1,)),
        ([calls(A, B, C), calls(A), calls(A, B)], "behind", 2, (1,)),  # the earliest that is not entered
        ([calls(A), []], "behind", 1, (1,)),
        ([calls(A, B, C, first=90), calls(A, B)], "behind", 90, (1,)),  # no call is in both records
        ([calls(A, B), calls(A, C)], "differ", 2, (0, 1)),
        ([calls(A, B), calls(A, C), calls(A, B)], "differ", 2, (1,)),
        ([calls(A, B, C), calls(A, C), calls(A, B, C)], "differ", 2, (1,)),  # it left one out: not just behind
        ([calls(A), calls(A, shape=(4,)), calls(A)], "differ", 1, (1,)),
        ([calls(A), calls(A, dtype="float64"), calls(A)], "differ", 1, (1,)),
        ([calls(A, open_last=True), calls(A)], "inside", 1, (0,)),
        ([calls(A, B), calls(A, B)], "together", 2, ()),
        ([[], []], "together", 0, ()),
        ([calls(A)], "together", 1, ()),
        ([calls(A, B)] * 99 + [calls(A)], "behind", 2, (99,)),
    ],
)
def test_what_records_tell(records, verdict, number, ranks):
    found = diagnose(dict(enumerate(records)))
    assert (found.verdict, found.number, found.ranks) == (verdict, number, ranks), found
    assert str(found) == found.text
    assert all(f"rank {rank}" in found.text for rank in ranks if verdict != "inside")
    if verdict in ("inside", "together"):
        assert behind(dict(enumerate(records))) == ()


def test_behind_names_all_that_have_not_come():
    assert behind({0: calls(A, B, C), 1: calls(A), 2: calls(A, B)}) == (1, 2)
    assert behind({0: []}) == ()


def by_last_kind(records):
    """Ranks whose last call is of another kind than rank 0's: a call of the same kind before is as good to it."""
    return tuple(rank for rank, each in records.items() if each and each[-1].kind != records[0][-1].kind)


def by_unfinished(records):
    """Who waits is taken for who is waited for."""
    return tuple(rank for rank, each in records.items() if each and not each[-1].finished)


def by_length(records):
    """Rings are all full."""
    return tuple(rank for rank, each in records.items() if len(each) < max(map(len, records.values())))


@pytest.mark.parametrize("mutant", [by_last_kind, by_unfinished, by_length])
def test_mutants_name_another(mutant):
    records = {
        0: calls(A, A, open_last=True, first=8),
        1: calls(A, A, first=7),
        2: calls(A, A, open_last=True, first=8),
    }
    assert behind(records) == (1,) != mutant(records)


@pytest.mark.parametrize("bad", [{}, {0: [*calls(A), *calls(A)]}, {0: [*calls(A), *calls(A, first=3)]}])
def test_records_with_holes_are_refused(bad):
    for ask in (behind, diagnose):
        with pytest.raises(ValueError, match="records must"):
            ask(bad)


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="folder must hold records"):
        read(tmp_path)
    with pytest.raises(ValueError, match="last must be at least 1, not 0"), flight.recorded(tmp_path, last=0):
        pass


def dies_when_others_wait(folder, culprit):
    """Ends this rank once all have written down that they entered the fifth collective, `culprit` that it left the
    fourth."""
    while not all(
        calls and calls[-1].number == 5 - (rank == culprit) and (rank != culprit or calls[-1].finished)
        for rank, calls in read(folder).items()
    ):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def work(folder, fault, culprit=1):
    x, rank = torch.ones(5, dtype=torch.float64), dist.get_rank()
    with flight.recorded(folder, last=3):
        for _ in range(4):
            dist.all_reduce(x)
        if fault != "kill" and rank == 0:
            threading.Thread(target=dies_when_others_wait, args=(folder, culprit), daemon=True).start()
        if rank == culprit:
            if fault == "skip":
                dist.send(x, dst=0)  # waits for nobody who receives
                dist.recv(x, src=0)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
        dist.all_reduce(x, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize(("fault", "n"), [("kill", 2), ("kill", 4), ("stop", 3), ("skip", 2)])
def test_records_outlive_their_rank(tmp_path, fault, n):
    with pytest.raises(lab.RankError):
        lab.run(work, n, args=(str(tmp_path), fault))
    records = read(tmp_path)
    assert sorted(records) == list(range(n))
    assert [call.number for call in records[1]] == [2, 3, 4]
    assert all(call.kind == "all_reduce, op SUM" and call.finished for call in records[1])
    assert records[1][0].what == "all_reduce, op SUM (5,) of float64"
    assert "test_flight.py" in records[1][0].where
    assert "work" in records[1][0].where
    if fault == "kill":  # the others may have been ended before they came
        return
    found = diagnose(records)
    assert (found.verdict, found.number, found.ranks) == ("behind", 5, (1,)), found
    assert "op MAX" in found.text
    assert not records[0][-1].finished


def everything(folder, last):
    rank, n = dist.get_rank(), dist.get_world_size()
    x, many = torch.full((2,), float(rank)), [torch.empty(2) for _ in range(n)]
    with flight.recorded(folder, last=last, compare=True):
        started = dist.all_reduce(x, async_op=True)
        before = read(folder)[rank][-1].finished
        started.wait()
        after = read(folder)[rank][-1].finished
        dist.broadcast(x, src=n - 1)
        dist.reduce(x, 0)
        dist.all_gather(many, x)
        dist.gather(x, many if rank == 0 else None, dst=0)
        dist.scatter(x, many if rank == 0 else None, src=0)
        dist.all_gather_into_tensor(torch.empty(2 * n), x)
        dist.all_to_all_single(torch.empty(n), torch.ones(n))
        dist.all_gather_object([None] * n, "a")
        dist.barrier()
    dist.barrier()  # after the block nothing is written
    return before, after, x.tolist()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_collective_is_written_down(tmp_path, n):
    found = lab.run(everything, n, args=(str(tmp_path), 32))
    assert all((before, after) == (False, True) for before, after, _ in found)
    records = read(tmp_path)
    assert diagnose(records).verdict == "together"
    assert len(records) == n
    kinds = [call.kind.split(",")[0] for call in records[n - 1]]
    assert kinds[:5] == ["all_reduce", "broadcast", "reduce", "all_gather", "gather"]
    assert kinds[5:8] == ["scatter", "all_gather_into_tensor", "all_to_all_single"]
    assert kinds[8:] == ["all_gather", "all_gather", "barrier"]  # objects: sizes, then bytes
    assert all("test_flight.py" in call.where for call in records[0])  # and not where torch calls torch


def unlike(folder, how, compare):
    last = dist.get_rank() == dist.get_world_size() - 1
    x = torch.ones(4 + (last and how == "shape"), dtype=torch.float64 if last and how == "dtype" else torch.float32)
    with flight.recorded(folder, compare=compare):
        dist.barrier()
        try:
            if last and how == "kind":
                dist.barrier()
            elif how == "root":
                dist.broadcast(x, src=int(last))
            else:
                dist.all_reduce(x, op=dist.ReduceOp.MAX if last and how == "op" else dist.ReduceOp.SUM)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("how", "n"), [("shape", 3), ("dtype", 2), ("kind", 3), ("root", 2), ("op", 4)])
def test_unlike_calls_are_named_on_all_ranks_before_they_are_made(tmp_path, how, n):
    found = lab.run(unlike, n, args=(str(tmp_path), how, True))
    assert all(f"collective 2: rank {n - 1 if n > 2 else 0} is in" in each for each in found), found
    assert all(("most in" if n > 2 else "no call has a majority") in each for each in found)
    assert all(len(calls) == 1 for calls in read(tmp_path).values())  # none entered the second


def test_without_comparing_nobody_is_told(tmp_path):
    assert lab.run(unlike, 2, args=(str(tmp_path), "op", False)) == ["", ""]
    assert diagnose(read(tmp_path)).verdict == "differ"  # but the records know


def cost(folder, compare):
    word, rows = (
        torch.zeros(1, dtype=torch.int64),
        [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())],
    )
    dist.all_gather(rows, word)
    with flight.recorded(folder, compare=compare), lab.wire() as wire:
        dist.barrier()
    with lab.wire() as barrier:
        dist.barrier()
    with lab.wire() as gathering:
        dist.all_gather(rows, word)
    return wire.total_bytes - barrier.total_bytes, gathering.total_bytes


@pytest.mark.parametrize("n", [1, 2, 3])
def test_comparing_costs_a_gathering_of_a_word_and_recording_nothing(tmp_path, n):
    assert {extra for extra, _ in lab.run(cost, n, args=(str(tmp_path), False))} == {0}
    for extra, gathering in lab.run(cost, n, args=(str(tmp_path), True)):
        assert extra == gathering >= n * (n - 1) * 8  # a fingerprint


def other_group(folder):
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with flight.recorded(folder, group=pair):
            dist.all_reduce(torch.ones(1), group=pair)
            dist.broadcast(torch.ones(1), group_src=1, group=pair)
    dist.barrier()
    if dist.get_rank() == 0:
        with flight.recorded(folder + "x"):
            dist.all_reduce(torch.ones(1), group=pair)
    elif dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=pair)


def test_only_the_groups_own_calls_are_written_down(tmp_path):
    lab.run(other_group, 3, args=(str(tmp_path / "f"),))
    assert [[call.kind for call in each] for each in read(tmp_path / "f").values()] == [
        ["all_reduce, op SUM", "broadcast, src 1"]
    ] * 2
    assert read(tmp_path / "fx") == {0: [], 1: [], 2: []}


def torchs_states():
    from torch._C import _distributed_c10d

    dist.all_reduce(torch.ones(3))
    dist.barrier()
    entries = json.loads(_distributed_c10d._dump_fr_trace_json()).get("entries", [])
    return {each["state"] for each in entries if each["profiling_name"].startswith("gloo")}


def test_torchs_own_recorder_does_not_say_what_has_finished_on_gloo(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    for found in lab.run(torchs_states, 2):
        assert found <= {"scheduled"}  # older releases record nothing of it


def test_a_record_that_is_not_whole_was_not_entered(tmp_path):
    with (
        mock.patch.object(flight.alike, "size_of", return_value=2),
        mock.patch.object(dist, "get_rank", return_value=0),
    ):
        recorder = flight._Recorder(tmp_path, 0, 2, 2)
    for number in (1, 2, 3):
        recorder.enter(Call(number, A, (3,), "float32", where="a.py:1"))
    at = flight.SLOT_BYTES + flight._SLOT.size  # the third's: a ring of two begins again
    recorder.file[at : at + 9] = b'[5, "all_'
    assert [call.number for call in read(tmp_path)[0]] == [2]
