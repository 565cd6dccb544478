"""Faults on real ranks: what happens to the rank, what the others notice of it, and that nothing is left behind."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from dtlib import lab
from dtlib.lab.launch import faults, launcher, supervisor

STEPS = 6


def train(folder=None):
    """Every rank adds the sum of all gradients to its weights; each leaves its id, and the steps that it began."""
    rank = dist.get_rank()
    weights = torch.zeros(2, 3)
    for step in range(STEPS):
        if folder:
            with open(Path(folder, str(rank)), "a") as file:
                file.write(f"{os.getpid()}\n")
        lab.step(step, {"weights": weights})
        gradient = torch.full((2, 3), rank + 1.0)
        dist.all_reduce(gradient)
        weights += gradient
    return weights


def begun(folder):
    """How many steps each rank was about to begin; every process of the run is gone, stopped ones too."""
    lines = {int(file.name): file.read_text().split() for file in folder.iterdir()}
    pids = {int(pid) for each in lines.values() for pid in each}
    assert len(pids) == len(lines)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    return [len(each) for _, each in sorted(lines.items())]


def killed_at_three(folder):
    """What must hold where rank 1 is killed at step 3, and the run ends with it."""
    with pytest.raises(lab.RankError) as caught:
        lab.run(train, 3, args=(folder,), faults=[lab.kill(rank=1, step=3)])
    message = str(caught.value)
    assert message.startswith(
        "rank 1 of 3 was killed by signal 9 (SIGKILL) at step 3: lab.kill(rank=1, step=3)\n\n"
        "ranks 0 and 2 then lost the connection to it\n\nranks 0 and 2 were in all_reduce at step 3"
    )
    assert (caught.value.rank, caught.value.step) == (1, 3)
    assert begun(folder) == [4, 4, 4]


def test_a_killed_rank_is_named_with_signal_and_step_and_the_others_with_their_collective(tmp_path):
    killed_at_three(tmp_path)


def sends_no_signal(monkeypatch):
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: None)


def is_a_step_late(monkeypatch):
    mark = faults.Striker.mark
    monkeypatch.setattr(faults.Striker, "mark", lambda self, rank, pid, step: mark(self, rank, pid, step - 1))


def takes_the_neighbour(monkeypatch):
    mark = faults.Striker.mark
    monkeypatch.setattr(faults.Striker, "mark", lambda self, rank, pid, step: mark(self, (rank + 1) % 3, pid, step))


def stops_instead(monkeypatch):
    kill = os.kill
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: kill(pid, signal.SIGTERM))


@pytest.mark.parametrize("mutant", [sends_no_signal, is_a_step_late, takes_the_neighbour, stops_instead])
def test_a_kill_that_is_none_is_noticed(mutant, tmp_path, here):
    mutant(here)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        killed_at_three(tmp_path)


def test_a_stopped_rank_is_named_when_the_time_is_up_and_the_others_with_their_collective(tmp_path):
    with pytest.raises(lab.RankTimeout) as caught:
        lab.run(train, 3, args=(tmp_path,), timeout_s=4, faults=[lab.stop(rank=2, step=4)])
    message = str(caught.value)
    assert "ank 2 was stopped by signal 19 (SIGSTOP) at step 4" in message
    assert "anks 0 and 1 were in all_reduce at step 4" in message
    assert caught.value.steps == {0: 4, 1: 4, 2: 4}
    assert begun(tmp_path) == [5, 5, 5]


def test_with_return_exceptions_the_others_say_what_they_noticed(tmp_path):
    def told():
        try:
            return train(tmp_path)
        except RuntimeError as error:
            return type(error).__name__

    first, second, third = lab.run(told, 3, faults=[lab.kill(rank=1, step=2)], return_exceptions=True)
    assert (first, third) == ("RuntimeError", "RuntimeError")
    assert isinstance(second, lab.RankError)
    assert (second.rank, second.step) == (1, 2)
    assert begun(tmp_path) == [3, 3, 3]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_flipped_bit_is_another_number_and_no_error(n):
    right = torch.full((2, 3), STEPS * n * (n + 1) / 2)
    assert all(torch.equal(each, right) for each in lab.run(train, n))
    last = n - 1
    found = lab.run(train, n, faults=[lab.flip(rank=last, step=4, tensor="weights", element=4, bit=31)])
    before = 4 * n * (n + 1) / 2
    wrong = right.clone()
    wrong[1, 1] -= 2 * before  # bit 31 is the sign
    for rank, each in enumerate(found):
        assert torch.equal(each, wrong if rank == last else right)


def test_every_bit_of_a_dtype_is_where_it_says():
    for dtype, bit, value in (
        (torch.float32, 22, 1.5),
        (torch.float64, 63, -1.0),
        (torch.bfloat16, 15, -1.0),
        (torch.int64, 3, 9),
        (torch.uint8, 7, 129),
    ):
        tensor = torch.ones(2, 2, dtype=dtype).t()
        faults.Flip(rank=0, step=0, tensor="x", element=1, bit=bit).apply({"x": tensor})
        assert tensor.ne(1).sum() == 1
        assert tensor[0, 1] == value


@pytest.mark.parametrize("factor", [1.5, 4.0, 20.0])
def test_a_slowed_rank_runs_one_part_in_factor_of_the_time_however_late_its_turns_are(factor):
    rng, duty, now, ran = random.Random(1), faults.Duty(factor, since=0.0), 0.0, 0.0
    while now < 500:
        before, then = duty.runs, now
        now += max(duty.wait(), 0.0) + rng.uniform(1e-6, 0.05)
        ran += (now - then) * before
        duty.turn(now)
    assert ran / now == pytest.approx(1 / factor, rel=0.01)


def test_a_slowed_rank_computes_less_than_its_part_of_a_core():
    def share_of_a_core():
        lab.step(0)
        wall, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - wall < 1:
            pass
        return (time.process_time() - cpu) / (time.monotonic() - wall)

    # A busy machine makes it less, never more; without the fault it has all of a core, or a few parts in ten.
    slowed = lab.run(share_of_a_core, 1, faults=[lab.slow(rank=0, step=0, factor=20)])[0]
    assert 0 < slowed < 0.1


def test_a_slowed_rank_that_is_stopped_later_stays_stopped(tmp_path):
    struck = [lab.slow(rank=1, step=1, factor=2), lab.stop(rank=1, step=3)]
    with pytest.raises(lab.RankTimeout, match=r"ank 1 was stopped by signal 19"):
        lab.run(train, 2, args=(tmp_path,), timeout_s=4, faults=struck)
    assert begun(tmp_path) == [4, 4]


def test_marks_put_nothing_on_the_wire_and_a_fault_happens_once():
    def marked():
        with lab.wire() as wire:
            for _ in range(3):
                lab.step(1, {"x": x})
            lab.barrier()
        return wire.total_bytes, x.item()

    x = torch.ones(1, requires_grad=True)
    found = lab.run(marked, 2, faults=[lab.flip(rank=0, step=1, tensor="x", bit=31)])
    assert found == [(0, -1.0), (0, 1.0)]


def test_a_slow_rank_may_be_stopped_and_killed_later(tmp_path):
    struck = [lab.slow(rank=0, step=1, factor=3), lab.kill(rank=0, step=4)]
    with pytest.raises(lab.RankError, match=r"rank 0 of 2 was killed by signal 9 \(SIGKILL\) at step 4"):
        lab.run(train, 2, args=(tmp_path,), faults=struck)
    assert begun(tmp_path)[0] == 5


def test_a_rank_whose_cables_are_pulled_is_named(tmp_path, lacking):
    cluster = lab.cluster(2, 1, inside=50e6, across=50e6)
    try:
        lab.run(int, cluster=cluster)
    except RuntimeError as refused:
        lacking(str(refused))
    with pytest.raises(lab.RankTimeout) as caught:
        lab.run(train, args=(tmp_path,), cluster=cluster, timeout_s=5, faults=[lab.cut(rank=1, step=2)])
    assert "ank 1 had its cables pulled at step 2" in str(caught.value)
    assert begun(tmp_path) == [3, 3]


def test_a_full_disk_tears_what_is_written_and_not_the_result(tmp_path):
    def write():
        path, said = tmp_path / str(dist.get_rank()), []
        for step in range(2):
            lab.step(step)
            try:
                path.write_bytes(b"a" * 3000)
            except OSError as error:
                said.append((step, error.strerror))
        print("a" * 50)
        return said, b"result" * 10_000

    struck = [lab.fill(rank=1, step=1, room_bytes=1000)]
    first, second = lab.run(write, 2, faults=struck)
    assert first == ([], b"result" * 10_000)
    assert second == ([(1, "File too large")], b"result" * 10_000)
    assert [(tmp_path / each).stat().st_size for each in "01"] == [3000, 1000]
    with pytest.raises(lab.RankError, match=r"rank 0 of 1 raised OSError: \[Errno 27\] File too large") as caught:
        lab.run(lambda: (lab.step(0), (tmp_path / "x").write_bytes(b"a")), 1, faults=[lab.fill(rank=0, step=0)])
    assert "rank 0 had no room left for files of more than 0 bytes at step 0" in str(caught.value)


def test_a_fault_that_did_not_happen_is_an_error():
    with pytest.raises(RuntimeError, match=r"lab.kill\(rank=0, step=6\) has not happened: .* marked was 5"):
        lab.run(train, 2, faults=[lab.kill(rank=0, step=6)])
    with pytest.raises(RuntimeError, match="the last step that it marked there is not"):
        lab.run(lambda: None, 2, faults=[lab.kill(rank=0, step=0)])


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (ValueError, "rank must be below the world_size 2", lambda: [lab.kill(rank=2, step=0)]),
        (ValueError, "rank must be at least 0", lambda: [lab.kill(rank=-1, step=0)]),
        (ValueError, "step must be at least 0", lambda: [lab.stop(rank=0, step=-1)]),
        (ValueError, "step must be a whole number", lambda: [lab.stop(rank=0, step=1.5)]),
        (ValueError, "factor must be a finite number above 1", lambda: [lab.slow(rank=0, step=0, factor=1)]),
        (ValueError, "factor must be a finite number above 1", lambda: [lab.slow(rank=0, step=0, factor="2")]),
        (ValueError, "bit must be at least 0", lambda: [lab.flip(rank=0, step=0, tensor="x", bit=-1)]),
        (ValueError, "room_bytes must be at least 0", lambda: [lab.fill(rank=0, step=0, room_bytes=-1)]),
        (TypeError, "tensor must be the name", lambda: [lab.flip(rank=0, step=0, tensor=3, bit=1)]),
        (ValueError, "needs a cluster", lambda: [lab.cut(rank=0, step=0)]),
        (ValueError, "needs a cluster", lambda: [lab.slow(rank=0, step=0, factor=2, of="link")]),
        (ValueError, 'of must be "card" or "link"', lambda: [lab.slow(rank=0, step=0, factor=2, of="disk")]),
        (ValueError, "once in a step", lambda: [lab.kill(rank=0, step=1), lab.stop(rank=0, step=1)]),
        (TypeError, "faults must be a list", lambda: ["kill"]),
        (TypeError, "faults must be a list", lambda: lab.kill(rank=0, step=0)),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(error, message, wrong, monkeypatch):
    monkeypatch.setattr(launcher, "start", lambda job: pytest.fail("started"))
    with pytest.raises(error, match=message):
        lab.run(train, 2, faults=wrong())


def test_a_tensor_or_bit_that_is_not_there_is_named_on_the_rank():
    for wrong, message in (
        ({"tensor": "bias", "bit": 0}, "tensor must be one that lab.step is given, not 'bias'"),
        ({"tensor": "weights", "bit": 32}, "bit must be below 32"),
        ({"tensor": "weights", "bit": 0, "element": 6}, "element must be below 6"),
    ):
        with pytest.raises(lab.RankError, match=message):
            lab.run(train, 1, faults=[lab.flip(rank=0, step=1, **wrong)])


def test_under_torchrun_faults_are_refused(monkeypatch):
    monkeypatch.setattr(launcher.torchrun, "is_active", lambda: True)
    with pytest.raises(RuntimeError, match=r"faults need ranks that lab\.run has started itself"):
        lab.run(train, 2, faults=[lab.kill(rank=0, step=0)])


def test_a_step_is_marked_inside_a_run_with_a_number():
    with pytest.raises(RuntimeError, match=r"lab.step\(\)"):
        lab.step(0)
    for wrong in (lambda: lab.step(-1), lambda: lab.step(0, [torch.ones(1)])):
        with pytest.raises(lab.RankError, match=r"number must be|tensors must be"):
            lab.run(wrong, 1)


@pytest.fixture
def here(monkeypatch):
    """Supervisors that are forked from this process, and not from the fork server: with what a test has changed."""

    def start(job_fd, _supervise, _modules):
        control, theirs = launcher.socket.socketpair()
        pid = os.fork()
        if not pid:
            control.close()
            supervisor.supervise(theirs, job_fd, fork=True)
        theirs.close()
        launcher.recv_frame(control)
        return control, pid

    monkeypatch.setattr(launcher, "start_supervisor", start)
    yield monkeypatch
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
