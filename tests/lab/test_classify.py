"""What the profiler's events amount to: computing, communication, phases."""

import pytest

from dtlib.lab.timeline.classify import (
    COMMUNICATION,
    COMPUTE,
    PHASE,
    Event,
    Span,
    classify,
    communication_name,
)


def op(name, start, end, thread=1, **options):
    return Event(name, start, end, thread, **options)


def note(name, start, end, thread=1):
    return Event(name, start, end, thread, annotation=True)


def gloo(name, start, end, thread=9):
    return Event(f"gloo:{name}", start, end, thread, annotation=True, is_async=True)


def found(events, spans=()):
    return [(i.kind, i.name, i.start_seconds, i.end_seconds) for i in classify(events, spans)]


def test_operators_compute_and_collectives_communicate():
    events = [op("aten::mm", 0, 5), op("aten::add", 1, 2), gloo("all_reduce", 3, 8), op("c10d::allreduce_", 5, 6)]
    assert found(events) == [(COMPUTE, "compute", 0, 5), (COMMUNICATION, "all-reduce", 3, 8)]


def test_an_annotated_collective_swallows_what_its_thread_does():
    events = [
        note("ring_all_reduce of bucket 3", 0, 10),
        note("reduce_scatter", 0, 5),
        op("aten::add_", 1, 2),
        gloo("send", 0.5, 3, thread=1),
        gloo("all_gather", 20, 21, thread=1),
        op("aten::mm", 4, 6, thread=2),
    ]
    assert found(events) == [
        (COMMUNICATION, "all-reduce", 0, 10),
        (COMPUTE, "compute", 4, 6),
        (COMMUNICATION, "all-gather", 20, 21),
    ]


def test_an_annotation_around_torchs_collective_is_not_counted_twice():
    events = [note("all-reduce, bucket 1", 0, 10), gloo("all_reduce", 1, 9), gloo("broadcast", 2, 3)]
    assert found(events) == [(COMMUNICATION, "all-reduce, bucket 1", 0, 10), (COMMUNICATION, "broadcast", 2, 3)]


def test_short_pauses_are_the_interpreters_unless_a_message_leaves():
    ms = 1e-3
    ops = [op("aten::mm", 0, ms), op("aten::mm", 1.05 * ms, 2 * ms), op("aten::mm", 3 * ms, 4 * ms)]
    assert found(ops) == [(COMPUTE, "compute", 0, 2 * ms), (COMPUTE, "compute", 3 * ms, 4 * ms)]
    call = op("c10d::send", 1.01 * ms, 1.04 * ms)
    assert [(start, end) for _, _, start, end in found([*ops, call])] == [(op.start, op.end) for op in ops]


def test_hooks_of_the_backward_are_not_computing():
    events = [
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 0, 10),
        op("torch::autograd::AccumulateGrad", 0, 10),
        op("RingBackward0", 0, 10),
        op("_Ring", 0, 10),  # a function of our own, forward: named as its class, with no namespace
        op("aten::mul", 1, 2),
        op("c10d::allreduce_", 3, 4),
        op("aten::div", 8, 9),
    ]
    assert found(events) == [(COMPUTE, "backward", 1, 2), (COMPUTE, "backward", 8, 9)]


def test_phases_name_what_runs_in_them():
    events = [
        note("DistributedDataParallel.forward", 0, 2),
        op("aten::mm", 1, 1.5),
        op("torch.distributed.ddp.reducer::copy_bucket_to_grad", 2, 3),
        note("Optimizer.step#AdamW.step", 4, 5),
        op("aten::add_", 4, 5),
        note("weight gradient", 6, 7),
        op("aten::mm", 6, 7),
        note("my own thing", 8, 9),
        op("aten::mm", 8, 9),
    ]
    names = [name for _, name, _, _ in found(events)]
    assert names == ["forward", "backward", "optimizer", "weight gradient", "compute"]


def test_spans_of_the_program_win():
    spans = [
        Span(PHASE, "attention", 0, 4, 1),
        Span(COMPUTE, "numpy", 10, 20, 1),
        Span(COMMUNICATION, "disk", 15, 16, 1),
    ]
    events = [
        op("autograd::engine::evaluate_function: Mm", 0, 3),
        op("aten::mm", 1, 2),
        op("aten::mm", 11, 12),
        op("aten::mm", 30, 31, thread=2),
    ]
    assert found(events, spans) == [
        (COMPUTE, "attention", 1, 2),
        (COMPUTE, "numpy", 10, 15),
        (COMMUNICATION, "disk", 15, 16),
        (COMPUTE, "numpy", 16, 20),
        (COMPUTE, "compute", 30, 31),
    ]


def test_on_a_gpu_its_kernels_count():
    events = [
        op("aten::mm", 0, 9),
        op("ampere_sgemm", 1, 5, device=True),
        op("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 4, 8, device=True),
    ]
    assert found(events) == [(COMPUTE, "compute", 1, 5), (COMMUNICATION, "all-reduce", 4, 8)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("all_reduce", "all-reduce"),
        ("ring all-reduce, bucket 3", "all-reduce"),
        ("AllReduce", "all-reduce"),
        ("reduce_scatter_tensor", "reduce-scatter"),
        ("_all_gather_base", "all-gather"),
        ("alltoall_base", "all-to-all"),
        ("tree_broadcast", "broadcast"),
        ("send to 3", "send"),
        ("recv", "recv"),
        ("reduce", "reduce"),
        ("barrier", "barrier"),
        ("forward", None),
        ("reduced precision", None),
        ("resend", None),
        ("small reduce", None),
        ("", None),
    ],
)
def test_names_of_collectives(text, name):
    assert communication_name(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("all-reduce bucket 3", "all-reduce, bucket 3"),
        ("All_Reduce, flat", "all-reduce, flat"),
        ("allreduce: 7", "all-reduce, 7"),
        ("ring_all_reduce, bucket 1", "all-reduce"),
        ("reduce_scatter_tensor", "reduce-scatter"),
        ("send to 3", "send, to 3"),
    ],
)
def test_annotations_are_spelled_as_in_the_book(text, name):
    assert found([note(text, 0, 1)]) == [(COMMUNICATION, name, 0, 1)]
