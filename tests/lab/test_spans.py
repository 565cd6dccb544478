"""`lab.memory_spans`: a step of a small network, cut at its events, with bytes counted by hand."""

import pytest
import torch
from torch import nn

from dtlib import lab

FLOAT = 4


def step():
    """8 rows through a matrix of 16 by 16, a hyperbolic tangent, and a mean."""
    layer, rows = nn.Linear(16, 16, bias=False), torch.zeros(8, 16, requires_grad=True)
    model = nn.Sequential(layer, nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lab.memory_spans(model, optimizer, rows, units=["0"]) as spans:
        model(rows).sum().backward()
        rows.grad = None
        optimizer.step()
    return spans


def test_events_and_bytes_counted_by_hand():
    spans = step()
    assert [(span.event, span.name) for span in spans] == [
        ("begin", ""), ("forward", ""), ("forward", "0"), ("forward done", "0"), ("forward done", ""),
        ("backward", ""), ("backward", "0"), ("backward done", "0"), ("backward done", ""), ("gradient", "0.weight"),
        ("step", ""), ("step done", ""), ("end", ""),
    ]  # fmt: skip
    by_event = {(span.event, span.name): span for span in spans}
    weight, rows = FLOAT * 16 * 16, FLOAT * 8 * 16
    assert {span.held.parameters for span in spans} == {weight}
    assert by_event["begin", ""].held.temporary == rows
    assert by_event["forward done", "0"].held.activations == rows  # the layer keeps its input
    assert by_event["forward done", ""].held.activations == 2 * rows  # and the tangent its output
    assert by_event["gradient", "0.weight"].held.gradients >= weight
    assert by_event["backward", "0"].fullest.total > by_event["backward", "0"].held.total
    assert by_event["step", ""].held.gradients == weight
    assert all(span.fullest.total >= span.held.total for span in spans)


def test_fake_tensors_tell_the_same():
    assert lab.at_scale(step, 1).result == step()


def test_spans_and_memory_agree_on_the_peak():
    model, rows = nn.Linear(64, 64), torch.zeros(4, 64)
    with lab.memory(model, rows, detail="marks") as memory, lab.memory_spans(model, rows) as spans:
        model(rows).sum().backward()
    assert max(span.fullest.total for span in spans) == memory.peak


def test_a_module_tells_what_its_other_tensors_are_for():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.copy, self.mine = torch.zeros(32), [torch.zeros(16)]

        def tensors_by_kind(self):
            return [(self.copy, "optimizer"), (self.mine[0], "gradients")]

    holder = Holder()
    with lab.memory(holder) as memory:
        assert (memory.now.optimizer, memory.now.gradients) == (FLOAT * 32, FLOAT * 16)
        holder.mine = [torch.zeros(8)]
        assert memory.now.gradients == FLOAT * 8
    assert memory.now.temporary == 0


def test_units_must_be_parts():
    with (
        pytest.raises(ValueError, match="units must be names of modules in module, and 'head' is none"),
        lab.memory_spans(nn.Linear(2, 2), units=["head"]),
    ):
        pass
