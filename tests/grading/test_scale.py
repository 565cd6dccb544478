"""The scale sees every tensor that is alive, whoever keeps it, and nothing that is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.grading.harness.meter import metered
from dtlib.grading.harness.scale import MAX_READINGS, unweighed, weighing

SIZE = 4000  # elements of 4 bytes


def hidden_in_a_closure() -> Callable[[], torch.Tensor]:
    hidden = torch.ones(SIZE)
    return lambda: hidden


def hidden_behind_a_view() -> torch.Tensor:
    return torch.ones(SIZE)[:1]


def hidden_in_a_cycle() -> list[Any]:
    cycle: list[Any] = [torch.ones(SIZE)]
    cycle.append(cycle)
    return cycle


def never_touched_by_an_operation() -> torch.Tensor:
    return torch.from_numpy(np.zeros(SIZE, np.float32))


def made_by_another_thread() -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(SIZE)))
    thread.start()
    thread.join()
    return made


def kept_by_autograd() -> torch.Tensor:
    return (torch.ones(SIZE, requires_grad=True) * 1).exp().sum()


HIDDEN = (
    hidden_in_a_closure,
    hidden_behind_a_view,
    hidden_in_a_cycle,
    never_touched_by_an_operation,
    made_by_another_thread,
)


@pytest.mark.parametrize("hide", HIDDEN, ids=lambda hide: hide.__name__)
def test_whatever_is_alive_is_weighed(hide: Callable[[], Any]):
    with weighing() as scale:
        before = scale.held("before")
        kept = hide()
        assert scale.held("with it")["total"] - before["total"] == 4 * SIZE
        del kept
        assert scale.held("without it") == before
    assert [each["label"] for each in scale.counts["held"]] == ["before", "with it", "without it"]


def test_what_autograd_keeps_is_weighed_as_activations():
    with weighing() as scale:
        before = scale.held("before")
        loss = kept_by_autograd()
        reading = scale.held("with its graph")
        assert reading["activations"] == 4 * SIZE
        assert reading["total"] - before["total"] >= 2 * 4 * SIZE  # the leaf, what exp gave, and the loss
        del loss
        assert scale.held("without it") == before


def test_what_was_there_before_counts_from_the_start_and_may_go():
    there = [torch.ones(SIZE)]
    with weighing() as scale:
        first = scale.held("there")["total"]
        there.clear()
        assert scale.held("gone")["total"] == first - 4 * SIZE


def test_kinds_follow_from_owners_that_are_known():
    model = torch.nn.Linear(SIZE, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    with weighing() as scale:
        scale.know(model, optimizer)
        model(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()
        reading = scale.held("trained")
    assert reading["parameters"] == reading["gradients"] == 4 * SIZE
    assert reading["optimizer"] == 2 * 4 * SIZE + 4  # Adam counts its steps in a tensor


def test_peak_of_a_block_and_what_was_there_when_it_began():
    with weighing() as scale:
        kept = torch.ones(SIZE)
        with scale.peak("block"):
            more = torch.ones(SIZE) + 1
            del more
        now = scale.held("after")["total"]
        assert kept.numel() == SIZE
    (peak,) = scale.counts["peaks"]
    assert peak["label"] == "block"
    assert peak["before"] == now
    assert peak["total"] == now + 2 * 4 * SIZE


def test_what_leaves_for_numpy_or_a_list_is_noted():
    def noted(export: Callable[[torch.Tensor], Any]) -> int:
        tensor = torch.ones(SIZE)
        with weighing() as scale:
            kept = export(tensor)
        assert kept is not None
        return scale.exported_bytes

    assert noted(torch.Tensor.sum) == 0
    assert noted(unweighed) == 0
    assert noted(lambda tensor: tensor.numpy()) == 4 * SIZE
    assert noted(lambda tensor: tensor[:10].tolist()) == 40
    assert noted(lambda tensor: np.asarray(tensor)) == 4 * SIZE


def test_weighing_leaves_torch_as_it_was():
    before = torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.grad
    with weighing():
        assert torch.Tensor.numpy is not before[0]
    assert (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.grad) == before


def test_the_record_keeps_nothing_alive_and_the_scale_is_no_way_out_of_sight():
    def rank() -> dict[str, Any]:
        with metered(weighed=True) as meter:
            before = meter.scale.held("before")["total"]
            request = dist.all_reduce(torch.ones(SIZE), async_op=True)
            request.wait()
            del request
            dist.all_gather([torch.empty(SIZE) for _ in range(2)], torch.ones(SIZE))
            after = meter.scale.held("after")["total"]
        return {**meter.counts, "grown": after - before}

    for counts in lab.run(rank, 2):
        assert counts["grown"] == 0
        assert counts["escaped"] == counts["library"] == counts["built_in"] == []
        waits = [event["of"] for event in counts["events"] if event["op"] == "wait"]
        assert waits == [index for index, event in enumerate(counts["events"]) if "bytes" in event]


def test_a_way_out_of_sight_is_seen_beside_the_harness_own():
    def rank() -> list[str]:
        import gc

        with metered(weighed=True) as meter:
            meter.scale.held("before")
            gc.get_objects()
        return meter.counts["escaped"]

    assert lab.run(rank, 1) == [["gc.get_objects"]]


def test_torch_s_own_sharding_is_seen():
    def rank() -> list[bool]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        seen = []
        for call in (
            lambda: torch.optim.AdamW(torch.nn.Linear(4, 4).parameters()),
            lambda: fully_shard(torch.nn.Linear(4, 4)),
            lambda: ZeroRedundancyOptimizer(torch.nn.Linear(4, 4).parameters(), torch.optim.SGD, lr=0.1),
        ):
            with metered() as meter:
                call()
            seen.append(bool(meter.counts["built_in"]))
        return seen

    assert lab.run(rank, 2) == [[False, True, True]] * 2


def test_a_record_of_readings_without_end_is_cut():
    with weighing() as scale:
        scale.held_at = [{"label": "earlier"}] * (MAX_READINGS - 1)
        for _ in range(2):
            scale.held("more")
    assert [each["label"] for each in scale.counts["held"][-2:]] == ["earlier", "more"]
    assert len(scale.counts["held"]) == MAX_READINGS
