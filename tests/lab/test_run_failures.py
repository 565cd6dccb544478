"""What a reader is told when a run goes wrong: each test holds the message."""

import os
import re
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dtlib import lab


def test_a_rank_raises():
    def main():
        if dist.get_rank() == 2:
            raise ValueError("the gradient is bad")
        dist.barrier()

    with pytest.raises(lab.RankError) as caught:
        lab.run(main, 4)
    message = str(caught.value)
    assert message.startswith(
        "rank 2 of 4 raised ValueError: the gradient is bad\n\nTraceback (most recent call last):"
    )
    assert 'raise ValueError("the gradient is bad")' in message
    assert "worker.py" not in message, "the reader's traceback starts in the reader's code"
    assert caught.value.rank == 2


def test_a_thread_of_a_rank_raises():
    """Without an ear for it the rank returns None, and the traceback is a line among what is printed."""

    def main():
        def load():
            raise ValueError("the batch is bad")

        thread = threading.Thread(target=load if dist.get_rank() == 1 else sys.exit, name="loader")
        thread.start()
        thread.join()
        return dist.get_rank()

    with pytest.raises(lab.RankError) as caught:
        lab.run(main, 3)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 raised ValueError in its thread 'loader': the batch is bad\n\nTraceback")
    assert 'in load\n    raise ValueError("the batch is bad")' in caught.value.traceback
    assert "worker.py" not in message
    assert "threading.py" not in message
    with lab.session(2) as session:
        with pytest.raises(lab.RankError, match=r"in its thread .*: here"):
            session.cell(
                "import threading\ndef f(): raise ValueError('here')\n"
                "t = threading.Thread(target=f)\nt.start()\nt.join()"
            )
        assert session["rank"] == [0, 1], "told once"


def test_the_others_run_on_where_that_is_asked_for():
    """A rank is killed, one raises; the third notices both, meets nobody in vain, and returns."""

    def main():
        rank = dist.get_rank()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            raise ValueError("the disk is full")
        with pytest.raises(RuntimeError, match="not all of them will meet here any more"):
            lab.barrier()
        with pytest.raises(RuntimeError, match=r"gloo|Connection"):
            dist.barrier()
        return "noticed"

    for _ in range(3):  # whoever ends first
        noticed, killed, raised = lab.run(main, 3, return_exceptions=True, timeout_s=30)
        assert noticed == "noticed"
        assert isinstance(killed, lab.RankError)
        assert str(killed).startswith("rank 1 of 3 was killed by signal 9 (SIGKILL)")
        assert "rank 2" not in str(killed), "each error is of its own rank"
        assert "raise ValueError" in raised.traceback
        assert (killed.rank, raised.rank) == (1, 2)
    assert lab.run(dist.get_rank, 2, return_exceptions=True) == [0, 1]
    with pytest.raises(TypeError, match="return_exceptions must be True or False, not 'yes'"):
        lab.run(main, 3, return_exceptions="yes")


def test_ranks_that_fail_and_a_time_limit_for_those_that_hang():
    def main():
        if dist.get_rank() == 0:
            raise ValueError("gone")
        time.sleep(60)

    with pytest.raises(lab.RankTimeout) as caught:
        lab.run(main, 3, return_exceptions=True, timeout_s=2)
    assert caught.value.ranks == [1, 2]


def test_all_ranks_raise_alike_is_told_once():
    with pytest.raises(lab.RankError) as caught:
        lab.run(lambda: 1 / 0, 3)
    assert str(caught.value).startswith("rank 0 of 3 raised ZeroDivisionError: division by zero")
    assert str(caught.value).endswith("ranks 1 and 2 too")


def test_a_rank_exits_with_a_code():
    def main():
        if dist.get_rank() == 1:
            os._exit(3)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(lab.RankError, match=r"^rank 1 of 3 exited with code 3 before it returned a result"):
        lab.run(main, 3)


@pytest.mark.parametrize("code", [0, 3, "words"])
def test_sys_exit_is_no_result(code):
    with pytest.raises(lab.RankError, match=rf"^rank 0 of 1 called sys.exit\({code!r}\) before it returned a result"):
        lab.run(lambda: sys.exit(code), 1)


@pytest.mark.parametrize(
    ("number", "advice"), [(signal.SIGKILL, "ran out of memory"), (signal.SIGSEGV, "in main\n|os.kill")]
)
def test_a_rank_is_killed_by_a_signal(number, advice):
    def main():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(lab.RankError, match=rf"^rank 0 of 2 was killed by signal {number} \({number.name}\)") as caught:
        lab.run(main, 2)
    assert any(words in str(caught.value) for words in advice.split("|"))


def test_ranks_that_send_different_sizes_are_shown_where_they_did(capfd):
    def main():
        total = torch.ones(4 + 4 * dist.get_rank())
        dist.all_reduce(total)  # gloo gives up in a thread of its own

    with pytest.raises(lab.RankError, match=r"killed by signal 6 \(SIGABRT\): a library gave up") as caught:
        lab.run(main, 2)
    assert "It got a tensor of another size than it asked for: shapes or dtypes differ" in str(caught.value)
    assert "With TORCH_DISTRIBUTED_DEBUG=DETAIL" in str(caught.value)
    assert "dist.all_reduce(total)  # gloo gives up in a thread of its own" in str(caught.value)
    assert "Received data size doesn't match expected size" in capfd.readouterr().out


@pytest.mark.parametrize("call", [dist.all_reduce, dist.broadcast])
def test_as_that_error_says_ranks_that_compare_tell_whose_size_differs(call, monkeypatch):
    """Also those of a fork server that torch was imported into before."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    arguments = (0,) if call is dist.broadcast else ()
    with pytest.raises(lab.RankError) as caught:
        lab.run(lambda: call(torch.ones(4 + 2 * dist.get_rank()), *arguments), 2)
    assert re.search(r"Detected mismatch .* Rank [01] is running .*TensorShape=\[[46]\]", str(caught.value))
    monkeypatch.undo()
    assert lab.run(dist.get_debug_level, 1) == [dist.DebugLevel.OFF]


def test_one_rank_skips_the_collective_and_the_stacks_tell_who_waits_where():
    def main():
        total = torch.ones(3)
        if dist.get_rank() != 2:
            dist.all_reduce(total)  # rank 2 never comes

    with pytest.raises(lab.RankTimeout) as caught:
        lab.run(main, 3, timeout_s=1)
    message = str(caught.value)
    assert message.startswith("after 1 s ranks 0 and 1 had not returned, while rank 2 had.")
    assert caught.value.ranks == [0, 1]
    for rank in (0, 1):
        assert "in main\n    dist.all_reduce(total)  # rank 2 never comes" in caught.value.stacks[rank]
    assert "worker.py" not in message


def test_an_endless_loop_ends_at_the_time_limit():
    def main():
        if dist.get_rank() == 1:
            while True:
                sum(range(1000))

    start = time.monotonic()
    with pytest.raises(lab.RankTimeout, match=r"sum\(range\(1000\)\)") as caught:
        lab.run(main, 2, timeout_s=1)
    assert caught.value.ranks == [1]
    assert time.monotonic() - start < 30, "it ends near its limit; the margin is for a busy machine"


def test_a_loop_that_swallows_every_exception_ends_too():
    def main():
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue

    with pytest.raises(lab.RankTimeout):
        lab.run(main, 2, timeout_s=0.5)


def test_a_stopped_rank_is_named():
    with pytest.raises(lab.RankTimeout, match="it did not answer"):
        lab.run(lambda: os.kill(os.getpid(), signal.SIGSTOP), 1, timeout_s=0.5)


def test_a_result_that_cannot_be_sent():
    with pytest.raises(
        lab.RankError, match=r"^rank 0 of 1 returned a generator that cannot be sent back: .*Return plain"
    ):
        lab.run(lambda: (number for number in range(3)), 1)


def test_a_result_that_cannot_be_rebuilt():
    class Hostile:
        def __reduce__(self):
            return int, ("not a number",)

    with pytest.raises(lab.RankError, match="result of rank 0 arrived but cannot be rebuilt here: ValueError"):
        lab.run(lambda: Hostile(), 1)


def test_a_function_or_an_argument_that_cannot_travel():
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"^fn cannot be sent to the ranks: .*lock.*inside the function"):
        lab.run(lambda: lock, 2)
    with pytest.raises(ValueError, match=r"^args cannot be sent to the ranks: "):
        lab.run(lambda x: x, 2, args=(lock,))


def test_an_exception_whose_text_raises():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def main():
        raise Mute

    with pytest.raises(lab.RankError, match="raised Mute: "):
        lab.run(main, 1)


def test_prints_before_the_error_are_shown(capsys):
    def main():
        print("so far so good")
        raise ValueError

    with pytest.raises(lab.RankError):
        lab.run(main, 1)
    assert capsys.readouterr().out == "[rank 0] so far so good\n"


def test_lab_run_inside_lab_run_is_refused():
    with pytest.raises(lab.RankError, match=r"lab\.run inside lab\.run: this function is a rank already"):
        lab.run(lambda: lab.run(lambda: 1, 2), 2)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, 100_000, True, "4", None, float("nan")])
def test_a_bad_world_size_is_refused_before_anything_starts(world_size):
    with pytest.raises(ValueError, match="world_size must be a whole number from 1 to 128, not ") as caught:
        lab.run(lambda: 1, world_size)
    assert repr(world_size) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"timeout_s": 0}, ValueError, "timeout_s must be a positive number of seconds, not 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be"),
        ({"timeout_s": "5"}, ValueError, "timeout_s must be"),
        ({"threads_per_rank": 0}, ValueError, "threads_per_rank must be"),
        ({"network": "public"}, ValueError, "network must be one of private, host, not 'public'"),
        ({"args": 5}, TypeError, "args must be a tuple of the arguments of fn, not 5"),
        ({"args": "ab"}, TypeError, "args must be a tuple"),
    ],
)
def test_other_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        lab.run(lambda: 1, 1, **arguments)


def test_what_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="fn must be callable, not 5"):
        lab.run(5)


def test_instruments_outside_of_a_rank_say_where_they_belong():
    with pytest.raises(RuntimeError, match=r"lab.barrier\(\) works inside a rank"):
        lab.barrier()
    with pytest.raises(RuntimeError, match=r"lab.wire\(\) works inside a rank"), lab.wire():
        pass


def test_the_next_run_works_after_each_failure():
    for broken in (lambda: 1 / 0, lambda: os._exit(1)):
        with pytest.raises(lab.RankError):
            lab.run(broken, 2)
        assert lab.run(lambda: "fine", 2) == ["fine", "fine"]


def test_the_next_run_works_after_the_fork_server_was_killed():
    """And the new one imports what the reader has by then: no rank has to."""
    import dtlib.ranks  # noqa: F401
    from dtlib.processes import starter

    for _ in range(2):
        lab.run(lambda: 1, 1)
        starter._server.process.kill()  # it may be dying, not dead, when the next request comes
        assert lab.run(lambda: "dtlib.ranks" in sys.modules, 2) == [True, True]


def test_comparing_before_each_call_finds_another_dtype_and_is_no_default_because_it_sends(monkeypatch):
    """As the docstring of `lab.run` says."""

    def sent():
        x = torch.ones(1000)
        dist.all_reduce(x)
        with lab.wire() as wire:
            dist.all_reduce(x)
        return wire.sent_bytes

    def unlike():
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32))

    quiet = lab.run(sent, 2)
    lab.run(unlike, 2)  # without a word
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    told = lab.run(sent, 2)
    assert all(100 < more - less < 2000 for more, less in zip(told, quiet, strict=True))
    with pytest.raises(lab.RankError, match="mismatch between collectives"):
        lab.run(unlike, 2)


def test_a_rank_that_waits_for_what_it_began_is_told_with_the_line_and_who_began_it():
    def averaged():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()

    def step():
        lab.step(3)
        averaged()

    with pytest.raises(lab.RankError, match=r"ranks 0 and 2 were at work\.wait\(\), in averaged at step 3"):
        lab.run(step, 3, faults=[lab.kill(rank=1, step=3)])
