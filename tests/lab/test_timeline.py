"""A timeline: its numbers, what it says of real ranks, and the file for Perfetto."""

import json
import math
import pickle

import pytest

from dtlib import lab
from dtlib.lab.timeline.classify import (
    COMMUNICATION,
    COMPUTE,
    Interval,
)
from dtlib.lab.timeline.recorded import Timeline, Timelines, _clip

# --- the numbers of a timeline


def made(*intervals, rank=0, start=0.0, end=10.0):
    return Timeline(rank, start, end, tuple(Interval(kind, kind, a, b) for kind, a, b in intervals))


def test_numbers_of_a_timeline():
    timeline = made((COMPUTE, 0, 4), (COMPUTE, 3, 5), (COMMUNICATION, 4, 7), (COMMUNICATION, 6, 8))
    assert timeline.seconds == 10
    assert timeline.compute_seconds == 5
    assert timeline.communication_seconds == 4
    assert timeline.hidden_seconds == 1
    assert timeline.exposed_seconds == 3
    assert timeline.hidden_share == 0.25
    assert timeline.idle_seconds == 2


def test_without_communication_there_is_no_share():
    assert math.isnan(made((COMPUTE, 0, 4)).hidden_share)
    assert made().idle_seconds == 10


def test_a_timeline_that_has_not_ended_has_no_numbers():
    with pytest.raises(RuntimeError, match="once the block"):
        _ = Timeline().compute_seconds


@pytest.mark.parametrize(
    ("timelines", "why"),
    [([], "one rank at least"), ([made(rank=1), made(rank=1)], "different ranks")],
)
def test_what_cannot_be_merged(timelines, why):
    with pytest.raises(ValueError, match=why):
        Timeline.merge(timelines)


def test_merge_sorts_by_rank():
    merged = Timeline.merge([made(rank=2, start=1.0, end=5.0), made(rank=0, start=0.5, end=4.0)])
    assert [timeline.rank for timeline in merged.ranks] == [0, 2]
    assert (merged.start_seconds, merged.seconds) == (0.5, 4.5)


def test_a_timeline_says_its_numbers():
    timeline = made((COMPUTE, 0, 4), (COMPUTE, 3, 5), (COMMUNICATION, 4, 7), (COMMUNICATION, 6, 8), rank=1)
    line = "<timeline of rank 1: block 10 s, computing 5 s, communicating 4 s, exposed 3 s, hidden 25%>"
    assert repr(timeline) == line
    assert repr(Timeline(rank=2)) == "<timeline of rank 2, still recording>"
    merged = Timeline.merge([made(rank=0), timeline])
    assert repr(merged).splitlines() == [repr(merged.ranks[0]), line]
    assert merged._repr_html_().count("<tr>") == 3
    assert "25%" in merged._repr_html_()


# --- real ranks


def test_an_overlapped_collective_is_hidden_and_a_blocking_one_is_not():
    def step(overlap):
        import time

        import torch
        import torch.distributed as dist

        tensor = torch.ones(2**22)
        dist.all_reduce(tensor)
        with lab.timeline() as timeline:
            lab.barrier()
            launched = time.monotonic()
            if overlap:
                with timeline.span("backward", kind="compute"):
                    work = dist.all_reduce(tensor, async_op=True)
                    while not work.is_completed():
                        time.sleep(0.01)
                work.wait()
            else:
                dist.all_reduce(tensor)
            finished = time.monotonic()
        return timeline, launched, finished

    for timeline, launched, finished in lab.run(step, 2, args=(True,)):
        (interval,) = [i for i in timeline.intervals if i.kind == COMMUNICATION]
        assert interval.name == "all-reduce"
        assert launched <= interval.start_seconds < interval.end_seconds <= finished
        assert timeline.hidden_share > 0.9
        assert timeline.exposed_seconds == pytest.approx(
            timeline.communication_seconds - timeline.hidden_seconds, abs=1e-9
        )
    for timeline, launched, finished in lab.run(step, 2, args=(False,)):
        (interval,) = [i for i in timeline.intervals if i.kind == COMMUNICATION]
        assert launched <= interval.start_seconds < interval.end_seconds <= finished
        assert timeline.hidden_share == 0
        assert timeline.exposed_seconds == timeline.communication_seconds > 0


def test_a_collective_lasts_until_the_last_rank_has_come():
    def wait_for_the_slow_one():
        import time

        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        with lab.timeline() as timeline:
            lab.barrier()
            if dist.get_rank() == 1:
                time.sleep(0.3)
            arrived = time.monotonic()
            dist.all_reduce(torch.ones(1))
        return timeline, arrived

    (early, _), (late, arrived) = lab.run(wait_for_the_slow_one, 2)
    (interval,) = [i for i in early.intervals if i.kind == COMMUNICATION]
    assert early.communication_seconds > 0.1
    assert interval.start_seconds < arrived < interval.end_seconds  # one clock for both ranks
    assert late.communication_seconds < early.communication_seconds


def test_gloo_works_on_two_collectives_at_once_and_the_third_waits():
    def three():
        import torch
        import torch.distributed as dist

        tensors = [torch.ones(2**20) for _ in range(3)]
        dist.all_reduce(tensors[0])
        with lab.timeline() as timeline:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
        return timeline

    for timeline in lab.run(three, 2):
        starts = [i.start_seconds for i in timeline.intervals]
        ends = sorted(i.end_seconds for i in timeline.intervals)
        assert [i.name for i in timeline.intervals] == ["all-reduce"] * 3
        assert sorted(starts)[2] >= ends[0]


def test_ddp_is_seen_without_its_help():
    def train():
        import torch

        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            optimizer.zero_grad()
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
        with lab.timeline() as timeline:
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
        return timeline

    for timeline in lab.run(train, 2):
        kinds = {(i.kind, i.name) for i in timeline.intervals}
        assert {(COMPUTE, "forward"), (COMPUTE, "backward"), (COMPUTE, "optimizer")} <= kinds
        assert {name for kind, name in kinds if kind == COMMUNICATION} == {"all-reduce"}
        reduced = [i for i in timeline.intervals if i.kind == COMMUNICATION]
        backward = [i for i in timeline.intervals if i.name == "backward"]
        assert len(reduced) >= 3
        assert all(i.start_seconds > backward[0].start_seconds for i in reduced)


def test_annotated_communication_of_another_thread_is_seen():
    def ring_in_a_thread():
        import threading
        import time

        import torch
        from torch.profiler import record_function

        def exchange():
            with record_function("ring_all_reduce, bucket 1"):
                time.sleep(0.05)
                torch.ones(1000) + 1
                time.sleep(0.05)

        with lab.timeline() as timeline:
            thread = threading.Thread(target=exchange)
            thread.start()
            with timeline.span("backward", kind="compute"):
                thread.join()
        return timeline

    (timeline,) = lab.run(ring_in_a_thread, 1)
    (interval,) = [i for i in timeline.intervals if i.kind == COMMUNICATION]
    assert interval.name == "all-reduce"
    assert interval.seconds > 0.09
    assert timeline.hidden_share > 0.5
    assert {i.name for i in timeline.intervals if i.kind == COMPUTE} == {"backward"}


def test_the_profiler_stays_silent_and_the_rank_does_not(capfd):
    def speak():
        import os

        with lab.timeline():
            os.write(2, b"inside\n")
        print("after")

    lab.run(speak, 1)
    out = capfd.readouterr().out
    assert "inside" in out
    assert "after" in out
    assert len(out.splitlines()) == 2


# --- use without ranks


def test_outside_of_ranks_it_records_this_process():
    import torch

    with lab.timeline() as timeline, timeline.span("warm up"):
        torch.ones(200, 200) @ torch.ones(200, 200)
    assert timeline.rank == 0
    assert {i.name for i in timeline.intervals} == {"warm up"}
    assert 0 < timeline.compute_seconds <= timeline.seconds
    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_an_error_in_the_block_passes_and_the_next_timeline_works():
    def broken():
        with lab.timeline() as timeline, timeline.span("doomed", kind="compute"):
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        broken()
    with lab.timeline() as timeline:
        pass
    assert timeline.intervals == ()


def test_one_timeline_at_a_time():
    def nested():
        with lab.timeline():
            pass

    with lab.timeline(), pytest.raises(RuntimeError, match="one at a time"):
        nested()


def test_spans_are_checked():
    with lab.timeline() as timeline:
        with pytest.raises(ValueError, match="kind must be one of compute, communication, phase"):
            timeline.span("x", kind="waiting").__enter__()
        with pytest.raises(ValueError, match="name must be a non-empty string"):
            timeline.span("").__enter__()
    with pytest.raises(RuntimeError, match="inside the block"):
        timeline.span("late").__enter__()


def test_what_reaches_beyond_the_block_is_clipped():
    seen = [Interval(COMPUTE, "x", start, end) for start, end in ((0, 5), (8, 12), (20, 21), (-3, 1))]
    assert [(i.start_seconds, i.end_seconds) for i in _clip(seen, 1, 10)] == [(1, 5), (8, 10)]


# --- the file for Perfetto


def trace_of(timelines, tmp_path):
    path = tmp_path / "trace.json"
    timelines.write_chrome_trace(path)
    return json.loads(path.read_text())


def test_chrome_trace(tmp_path):
    first = made((COMPUTE, 1, 2), (COMMUNICATION, 1, 3), (COMMUNICATION, 2, 4), rank=0, start=1.0)
    second = made((COMPUTE, 2, 3), rank=1, start=1.5)
    trace = trace_of(Timeline.merge([second, first]), tmp_path)
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 4
    for event in complete:
        assert isinstance(event["pid"], int)
        assert threads[event["pid"], event["tid"]].startswith(event["cat"])
        assert event["dur"] > 0
        assert event["ts"] >= 0
    assert {(e["ts"], e["dur"]) for e in complete if e["pid"] == 1} == {(1e6, 1e6)}  # µs from the first rank's start
    assert len({e["tid"] for e in complete if e["pid"] == 0}) == 3  # two messages at once need two rows


def test_chrome_trace_of_one_rank(tmp_path):
    path = tmp_path / "trace.json"
    made((COMPUTE, 0, 1), rank=3).write_chrome_trace(path)
    assert {event["pid"] for event in json.loads(path.read_text())["traceEvents"]} == {3}


def test_a_timeline_draws_itself():
    assert Timelines((made((COMPUTE, 0, 1)),)).draw().axes
    assert made((COMPUTE, 0, 1)).draw().axes
