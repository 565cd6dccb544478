"""lab.memory counts every byte of every tensor once, under the right kind, until it is freed."""

import copy
import pickle
import threading

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from dtlib import lab
from dtlib.lab.memory.storages import KindBytes
from dtlib.ranks import dp
from dtlib.ranks.model import GPT, batches, load_text, next_token_loss, preset

H, B = 8, 5  # hidden, batch
LINEAR = 4 * (H * H + H)  # bytes of one Linear(H, H) in float32
X = 4 * B * H  # bytes of one activation


def _stack(num_layers=3, **options):
    return nn.Sequential(*(nn.Linear(H, H, **options) for _ in range(num_layers)))


def _step(model, x, optimizer=None):
    loss = model(x).sum()
    loss.backward()
    if optimizer is not None:
        optimizer.step()


def _gpt(seq=16, **changes):
    tokens_bs, targets_bs = next(batches(load_text(), batch=2, seq=seq))
    model = GPT(preset("tiny", seq=seq, **changes))

    def step(optimizer=None):
        next_token_loss(model(tokens_bs), targets_bs).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return model, step, tokens_bs, targets_bs


def test_linear_layers_through_forward_and_backward_by_hand():
    model, x = _stack(), torch.randn(B, H)
    with lab.memory(model, x) as memory:
        assert memory.now == KindBytes(parameters=3 * LINEAR, temporary=X)
        y = model(x)
        # Each layer keeps its input for the gradient of its weight; y itself is kept by nobody but us.
        assert memory.now == KindBytes(parameters=3 * LINEAR, activations=3 * X, temporary=X)
        y.sum().backward()
        del y
        assert memory.now == KindBytes(parameters=3 * LINEAR, gradients=3 * LINEAR, temporary=X)
    assert memory.now.total == 6 * LINEAR + X


def test_the_peak_is_found_between_two_looks():
    with lab.memory() as memory:
        a = torch.zeros(1000)
        (a + 1 + 2).sum()  # two temporaries of 4000 bytes at one time, beside `a`
        assert memory.now == KindBytes(temporary=4000)
    assert (memory.peak, memory.at_peak) == (12000, KindBytes(temporary=12000))


@pytest.mark.parametrize(
    ("make", "state_bytes"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 3 * LINEAR),
        (lambda params: torch.optim.AdamW(params), 2 * 3 * LINEAR + 6 * 4),  # and the step of each tensor
        (lambda params: torch.optim.AdamW(params, amsgrad=True), 3 * 3 * LINEAR + 6 * 4),
        (lambda params: torch.optim.Adafactor(params), 3 * (4 * 2 * H + 4 * H) + 6 * 4),  # rows, columns; biases whole
    ],
)
def test_optimizer_states_by_hand(make, state_bytes):
    with lab.memory() as memory:
        model, x = _stack(), torch.randn(B, H)
        optimizer = make(model.parameters())
        assert memory.now.optimizer == 0
        _step(model, x, optimizer)
        held = KindBytes(parameters=3 * LINEAR, gradients=3 * LINEAR, optimizer=state_bytes, temporary=X)
        assert memory.now == held
        optimizer.zero_grad(set_to_none=False)
        assert memory.now == held
        optimizer.zero_grad()
    assert memory.now == KindBytes(parameters=3 * LINEAR, optimizer=state_bytes, temporary=X)


def test_accumulation_adds_into_the_same_gradients():
    with lab.memory() as memory:
        model, x = _stack(), torch.randn(B, H)
        for _ in range(3):
            _step(model, x)
            assert memory.now.gradients == 3 * LINEAR
    assert memory.at_peak.parameters == 3 * LINEAR


def test_views_and_work_in_place_take_nothing():
    with lab.memory() as memory:
        a = torch.zeros(10, 10)
        b, c, d = a.t(), a[3], a.flatten()
        a.add_(1).mul_(2)
        torch.add(a, a, out=a)
        assert memory.now.total == memory.peak == 400
        del a, b, d
        assert memory.now.total == 400  # a row keeps the whole matrix
        del c
        assert memory.now.total == 0


def test_a_storage_that_grows_and_shrinks():
    with lab.memory() as memory:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)  # what FSDP2 does with a gathered parameter
        assert memory.now.total == 0
        a.untyped_storage().resize_(400)
        assert memory.now.total == 400
        a.resize_(200)
        assert memory.now.total == 800


def test_a_parameter_whose_data_is_replaced_is_its_new_data():
    with lab.memory() as memory:
        model = nn.Linear(H, H)
        model.weight.data = torch.empty(0)
        assert memory.now == KindBytes(parameters=4 * H)
        flat = torch.zeros(3 * H * H)
        model.weight.data = flat[: H * H].view(H, H)
        assert memory.now == KindBytes(parameters=4 * (3 * H * H + H))


@pytest.mark.parametrize("tied", [True, False])
def test_the_courses_gpt_with_tied_and_untied_head(tied):
    model, step, *inputs = _gpt(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters())
    size = 4 * model.config.num_params
    with lab.memory(model, optimizer, inputs) as memory:
        step()
        assert memory.now == KindBytes(parameters=size, gradients=size, temporary=2 * 8 * 2 * 16)
        step(optimizer)
    assert memory.now.optimizer == 2 * size + 4 * len(list(model.parameters()))
    assert memory.now.gradients == 0


def test_frozen_weights_have_no_gradient_and_need_no_input():
    with lab.memory() as memory:
        model, x = _stack(), torch.randn(B, H)
        for layer in model[:2]:
            layer.requires_grad_(False)
        _step(model, x)
    assert memory.now == KindBytes(parameters=3 * LINEAR, gradients=LINEAR, temporary=X)
    # Only the last layer keeps its input; the sum keeps nothing. At the peak two activations live.
    assert max(moment.held.activations for moment in memory.timeline) == X


def test_without_gradients_nothing_is_kept():
    with lab.memory() as memory:
        model, x = _stack(), torch.randn(B, H)
        with torch.no_grad():
            model(x)
    assert all(moment.held.activations == 0 for moment in memory.timeline)
    assert memory.peak == 3 * LINEAR + 3 * X  # x, and what goes into a layer and what comes out


def test_a_graph_that_is_dropped_takes_what_it_kept_along():
    with lab.memory() as memory:
        x = torch.randn(B, H, requires_grad=True)
        y = x.exp().exp().tanh()
        assert memory.now == KindBytes(activations=3 * X, temporary=X)  # results of all three, and x
        del y
        assert memory.now == KindBytes(temporary=X)


def test_bf16_takes_half():
    with lab.memory() as memory:
        model, x = _stack(dtype=torch.bfloat16), torch.randn(B, H, dtype=torch.bfloat16)
        y = model(x)
        assert memory.now == KindBytes(parameters=3 * LINEAR // 2, activations=3 * X // 2, temporary=X // 2)
        y.sum().backward()
        assert memory.now.gradients == 3 * LINEAR // 2


def test_buffers_and_dropout_masks():
    with lab.memory() as memory:
        model, x = nn.Sequential(nn.BatchNorm1d(H), nn.Dropout(0.5)), torch.randn(B, H)
        model(x).sum().item()
        assert memory.now == KindBytes(parameters=2 * 4 * H, buffers=2 * 4 * H + 8, temporary=X)
        y = model(x)
        # batch norm keeps x, mean and 1/deviation; dropout its mask, scaled and in float32
        assert memory.now.activations == X + 2 * 4 * H + X
        assert y.shape == x.shape


def test_master_weights_are_optimizer_state_when_labelled():
    with lab.memory() as memory:
        model = _stack(dtype=torch.bfloat16)
        masters = [parameter.detach().float() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(masters, momentum=0.9)
        memory.label("optimizer", *masters)
        for master in masters:
            master.grad = torch.ones_like(master)
        optimizer.step()
    assert memory.now == KindBytes(parameters=3 * LINEAR // 2, gradients=3 * LINEAR, optimizer=2 * 3 * LINEAR)


def test_an_optimizer_is_known_from_its_beginning():
    with lab.memory() as memory:
        shards = [torch.zeros(H) for _ in range(3)]  # of no module
        optimizer = torch.optim.AdamW(shards)
        shards[0].grad = torch.zeros(H)
        assert memory.now == KindBytes(parameters=3 * 4 * H, gradients=4 * H)
    assert optimizer.state == {}


def test_what_was_there_before_counts_from_the_start():
    model, x = _stack(), torch.randn(B, H)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, x, optimizer)
    with lab.memory() as memory:  # it is told of nothing
        memory.mark("start")
        _step(model, x, optimizer)
    with lab.memory([{"all of it": (model, optimizer)}, x]) as told:
        told.mark("start")
        _step(model, x, optimizer)
    states = KindBytes(parameters=3 * LINEAR, gradients=3 * LINEAR, optimizer=2 * 3 * LINEAR + 6 * 4)
    assert memory.timeline[0].held == states
    assert told.timeline[0].held == states.plus("temporary", X)
    assert memory.peak == told.peak
    assert memory.at_peak == told.at_peak


def test_checkpoints_keep_the_input_and_then_recompute():
    with lab.memory() as memory:
        model, x = _stack(4), torch.randn(B, H, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False)
        assert memory.now == KindBytes(parameters=4 * LINEAR, activations=X, temporary=X)
        y.sum().backward()
    (recomputed,) = (m for m in memory.timeline if m.label == "3 recompute")
    assert recomputed.held.activations == 3 * X  # the inputs of the layers before; its own is still to be kept
    assert memory.now.activations == 0


def test_the_timeline_tells_a_step_layer_by_layer():
    with lab.memory() as memory:
        model, x = _stack(2), torch.randn(B, H, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters())
        memory.mark("built")
        _step(model, x, optimizer)
    assert [moment.label for moment in memory.timeline] == [
        "built",
        "Sequential forward",
        "0 forward",
        "0 forward done",
        "1 forward",
        "1 forward done",
        "Sequential forward done",
        "1 backward",
        "Sequential backward",
        "1 backward done",
        "0 backward",
        "0 backward done",
        "Sequential backward done",
        "SGD step",
        "SGD step done",
    ]
    assert [moment.held.activations // X for moment in memory.timeline[:7]] == [0, 0, 0, 1, 1, 2, 2]
    assert all(moment.peak >= moment.held.total for moment in memory.timeline)
    assert max(moment.peak for moment in memory.timeline) == memory.peak


def test_every_operation_when_asked_and_marks_alone():
    with lab.memory(detail="ops") as memory:
        torch.zeros(3).mul_(2)
    assert [moment.label for moment in memory.timeline] == ["op zeros", "op mul_"]
    with lab.memory(detail="marks") as memory:
        _step(_stack(), torch.randn(B, H))
        memory.mark("end")
    assert [moment.label for moment in memory.timeline] == ["end"]


def test_what_another_thread_frees_is_seen_with_the_next_look():
    with lab.memory() as memory:
        held = [torch.zeros(1000), torch.zeros(10)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert memory.now.total == 0
        worker = threading.Thread(target=lambda: held.append(torch.zeros(2000)))  # its operations are not seen
        worker.start()
        worker.join()
        held[0].add_(1)  # but what it made is, when it is touched
        assert memory.now.total == 8000
        held.clear()
        assert memory.now.total == 0
    assert (memory.peak, memory.at_peak.total) == (8000, 8000)


def test_an_inner_block_has_the_peak_of_its_part():
    with lab.memory() as whole:
        a = torch.zeros(1000)
        del a
        with lab.memory() as part:
            b = torch.zeros(100)
        del b
        torch.zeros(500)
    assert (whole.peak, part.peak, part.now.total) == (4000, 400, 400)


def test_all_is_as_before_after_an_error():
    before = torch.UntypedStorage.resize_, torch.autograd.graph.saved_tensors_hooks.__enter__
    a = []

    def fail():
        a.append(torch.zeros(10))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), lab.memory() as memory:
        fail()
    assert memory.now.total == 40
    assert (torch.UntypedStorage.resize_, torch.autograd.graph.saved_tensors_hooks.__enter__) == before
    a.clear()
    with lab.memory() as again:
        pass
    assert again.peak == 0
    assert again.timeline == ()


def test_the_allocator_of_torch_has_the_same_peak():
    model, step, *inputs = _gpt(seq=64, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    with lab.memory(model, optimizer, inputs) as memory:
        start = memory.now.total
        step(optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(optimizer)
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        total += change.nbytes()
        peak = max(peak, total)
    # Kernels have scratch memory, which nobody sees from outside, but here none at the peak.
    assert memory.at_peak.activations > 0
    assert memory.peak - start == peak


def test_torchs_own_tracker_has_the_same_peak():
    model, step, *inputs = _gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    with lab.memory(model, optimizer, inputs) as memory:
        step(optimizer)
    twin, twin_step, *twin_inputs = _gpt()
    twin_optimizer = torch.optim.AdamW(twin.parameters())
    theirs = MemTracker()
    theirs.track_external(twin, twin_optimizer, *twin_inputs)
    with theirs:
        twin_step(twin_optimizer)
    kinds = {str(kind.value if hasattr(kind, "value") else kind): size for kind, size in _cpu(theirs, "peak").items()}
    assert kinds["Total"] == memory.peak
    assert kinds["Parameter"] == memory.at_peak.parameters
    now = {str(kind.value if hasattr(kind, "value") else kind): size for kind, size in _cpu(theirs, "current").items()}
    assert now["Optstate"] == memory.now.optimizer
    assert now["Total"] == memory.now.total


def _cpu(tracker, which):
    return tracker.get_tracker_snapshot(which)[torch.device("cpu")]


def test_the_process_grows_by_what_is_counted():
    """In a new process: one that has run other tests may take the tensor from what those have given back."""
    size = 256 * 2**20

    def grow():
        process = psutil.Process()
        with lab.memory() as memory:
            before = process.memory_info().rss
            a = torch.ones(size, dtype=torch.uint8)
            grown = process.memory_info().rss - before
            return memory.now.temporary, a.numel(), grown

    counted, bytes_of_tensor, grown = lab.run(grow, 1)[0]
    assert counted == bytes_of_tensor == size
    assert grown == pytest.approx(size, rel=0.1)


def test_ranks_send_home_what_they_counted():
    def train(wrap):
        config = preset("tiny", seq=16)
        tokens_bs, targets_bs = next(batches(load_text(), batch=2, seq=16, rank=dist.get_rank(), world_size=2))
        with lab.memory(detail="marks") as memory:
            model = wrap(GPT(config))
            next_token_loss(model(tokens_bs), targets_bs).backward()
            memory.mark("backward done")
            for parameter in model.parameters():
                parameter.grad = None
        return 4 * config.num_params, memory

    ours = lab.run(train, 2, args=[dp.BucketedDataParallel])
    naive = lab.run(train, 2, args=[dp.NaiveDataParallel])
    torchs = lab.run(train, 2, args=[nn.parallel.DistributedDataParallel])
    for size, memory in (*ours, *naive, *torchs):
        assert memory.timeline[-1].held.gradients == memory.now.parameters == size
        assert memory.timeline[-1].label == "backward done"
        assert memory.now.gradients == 0
    inputs = 2 * 8 * 16
    # gloo's thread may hold what it reduced last for a moment longer: a norm's 64 numbers, or the bucket
    assert all(memory.now.temporary - inputs in (0, 4 * 64) for _, memory in naive)
    assert all(memory.now.temporary - inputs in (size, 2 * size) for size, memory in ours)  # the buckets stay
    for size, memory in torchs:  # torch's DDP keeps its buckets beside the gradients
        assert memory.timeline[-1].held.temporary >= size


def test_a_result_is_plain_data():
    with lab.memory() as memory:
        a = torch.zeros(10)
        memory.mark("made")
    del a
    for same in (pickle.loads(pickle.dumps(memory)), copy.deepcopy(memory)):
        assert (same.peak, same.at_peak, same.now, same.timeline) == (
            memory.peak,
            memory.at_peak,
            memory.now,
            memory.timeline,
        )
    assert memory.table.splitlines()[-1].split() == ["total", "40", "B", "40", "B"]
    assert "<td" in memory._repr_html_()
    with pytest.raises(AttributeError):
        memory.peak = 0


def test_meta_tensors_have_no_memory_and_sparse_gradients_do():
    with lab.memory() as memory:
        with torch.device("meta"):
            GPT(preset("tiny"))
        assert memory.now.total == 0
        table = nn.Embedding(100, H, sparse=True)
        table(torch.tensor([3, 5])).sum().backward()
        assert memory.now.gradients == 2 * 8 + 2 * 4 * H


@pytest.mark.parametrize("wrong", [3, "model", [object()]])
def test_what_has_no_tensors_is_refused(wrong):
    with pytest.raises(TypeError, match="held must be modules, optimizers and tensors, not"), lab.memory(wrong):
        pass


def test_other_wrong_input_is_named():
    with (
        pytest.raises(ValueError, match="detail must be one of marks, modules, ops, not 'all'"),
        lab.memory(detail="all"),
    ):
        pass
    with lab.memory() as memory:
        with pytest.raises(ValueError, match=r"kind must be one of parameters, gradients, .* not 'master'"):
            memory.label("master", torch.zeros(1))
        with pytest.raises(TypeError, match="tensors must be tensors, not 3"):
            memory.label("optimizer", 3)
    with pytest.raises(RuntimeError, match="after the end of the block"):
        memory.mark("late")
    with pytest.raises(RuntimeError, match="after the end of the block"):
        memory.label("optimizer", torch.zeros(1))


def test_gradients_may_be_dropped_while_a_peak_waits_to_be_explained():
    """A gradient that is being taken apart still hangs on its parameter: looking at it there ends the process."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())

    def steps() -> list[tuple[int, KindBytes]]:
        seen = []
        with lab.memory(model, detail="marks") as memory:
            for drop in (lambda p: setattr(p, "grad", None), lambda p: delattr(p, "grad"), lambda p: None):
                model(torch.ones(8, 64)).sum().backward()
                held = torch.zeros(200_000)
                for parameter in model.parameters():
                    drop(parameter)
                del held
                seen.append((memory.peak, memory.at_peak))
        return seen

    (seen,) = lab.run(steps, 1)
    peak, kinds = seen[0]
    assert kinds == KindBytes(parameters=num_bytes, gradients=num_bytes, temporary=800_000)
    assert peak == kinds.total
