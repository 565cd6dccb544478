"""The recorder sees every way to communicate, and the kernel's counts agree with theory."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from dtlib import lab
from dtlib.grading.harness.lower_bounds import least_bytes, surely_sent_bytes
from dtlib.grading.harness.meter import metered
from dtlib.grading.harness.recorder import Recorder
from dtlib.grading.rounds import collectives


def names(events: list[dict]) -> list[str]:
    return [event["op"] for event in events]


def test_every_collective_has_its_name():
    def rank() -> list[list[str]]:
        n = dist.get_world_size()
        tensor, many = torch.ones(4), [torch.ones(4) for _ in range(n)]
        calls = {
            "all_reduce": lambda: dist.all_reduce(tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
            "reduce": lambda: dist.reduce(tensor, 0),
            "all_gather": lambda: dist.all_gather(many, tensor),
            "gather": lambda: dist.gather(tensor, many if dist.get_rank() == 0 else None, 0),
            "scatter": lambda: dist.scatter(tensor, many if dist.get_rank() == 0 else None, 0),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty(4), tensor),
        }
        seen = []
        for name, call in calls.items():
            recorder = Recorder()
            with recorder.recording():
                call()
            seen.append([name, *collectives(recorder.events)])
        return seen

    for name, *called in lab.run(rank, 2)[0]:
        assert called == [name]


def test_bytes_of_a_call_are_those_that_a_rank_puts_in():
    def rank() -> list[int]:
        n, recorder, tensor = dist.get_world_size(), Recorder(), torch.ones(12)
        with recorder.recording():
            dist.all_reduce(tensor)
            dist.all_gather([torch.empty(4) for _ in range(n)], torch.ones(4))
            dist.reduce_scatter(torch.empty(4), list(tensor.chunk(n)))
            functional.reduce_scatter_tensor(tensor, "sum", 0, dist.group.WORLD).sum()
            dist.all_to_all_single(torch.empty(12), tensor)
        return [event["bytes"] for event in recorder.events if "bytes" in event]

    assert lab.run(rank, 3) == [[48, 16, 48, 48, 48]] * 3


def test_calls_from_cpp_and_other_threads_are_seen():
    def rank() -> dict:
        recorder = Recorder()
        with recorder.recording():
            functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
            model(torch.ones(1, 3)).sum().backward()
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
            thread.start()
            thread.join()
        return {"ops": names(recorder.events), "native": [bool(e.get("native")) for e in recorder.events]}

    told = lab.run(rank, 2)[0]
    assert told["ops"].count("all_reduce") == 3  # functional, DDP's bucket, the thread's
    assert told["native"][0]
    assert any(told["native"][1:])
    assert not told["native"][-1]


def test_events_of_messages_and_waits():
    def rank() -> list[dict]:
        recorder, me = Recorder(), dist.get_rank()
        with recorder.recording():
            request = dist.isend(torch.ones(3), 1 - me)
            dist.recv(torch.empty(3), 1 - me)
            request.wait()
        return recorder.events

    assert lab.run(rank, 2)[0] == [
        {"op": "send", "bytes": 12, "peer": 1},
        {"op": "receive", "bytes": 12, "peer": 1},
        {"op": "wait", "of": 1},
        {"op": "wait", "of": 0},
    ]


def test_every_way_to_wait_and_to_ask_is_seen():
    def rank() -> list[dict]:
        recorder, tensor = Recorder(), torch.ones(3)
        with recorder.recording():
            dist.all_reduce(tensor, async_op=True).synchronize()
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            torch.futures.wait_all([dist.all_reduce(tensor, async_op=True).get_future()])
            request = dist.all_reduce(tensor, async_op=True)
            while not (request.is_completed() and request.is_completed()):
                pass
        return recorder.events

    events = lab.run(rank, 2)[0]
    calls = [index for index, event in enumerate(events) if event["op"] == "all_reduce"]
    assert len(calls) == 4
    waited = {event["of"] for event in events if event["op"] == "wait"}
    assert waited >= {*calls[:2], -1}  # of several at once nobody can tell which
    (poll,) = [event for event in events if event["op"] == "poll"]
    assert poll["of"] == calls[3]
    assert poll["times"] > 1


def test_recording_leaves_torch_as_it_was():
    def rank() -> bool:
        def parts() -> tuple:
            return dist.ProcessGroup.send, dist.Work.wait, dist.Work.is_completed, torch._C.Future.wait

        before = parts()
        with Recorder().recording():
            assert dist.ProcessGroup.send is not before[0]
        return parts() == before

    assert lab.run(rank, 1) == [True]


def test_record_of_an_endless_talker_is_cut():
    recorder = Recorder()
    for _ in range(10_000):
        recorder.mark("x")
    assert len(recorder.events) == 4000


def test_meter_counts_what_the_kernel_carried():
    num_bytes = 4 * 100_000

    def rank() -> dict:
        with metered() as meter:
            dist.all_reduce(torch.ones(num_bytes // 4))
        return meter.counts

    for counts in lab.run(rank, 2):
        assert abs(counts["sent_bytes"] - num_bytes) < 0.01 * num_bytes
        assert least_bytes(counts["events"], 2) == num_bytes


def test_least_bytes_of_each_collective():
    events = [{"op": name, "bytes": 100} for name in ("send", "receive", "all_reduce", "all_gather", "reduce_scatter")]
    assert least_bytes([*events, {"op": "wait", "of": 0}], 4) == 100 + 0 + 150 + 300 + 75
    assert surely_sent_bytes(events, 4) == 100 + 150
