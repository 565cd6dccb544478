"""Ranks that stay: what they know stays too; errors, hangs and ends are those of `lab.run`."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from dtlib import lab


@pytest.fixture(scope="module")
def session():
    with lab.session(3) as session:
        yield session


def test_names_stay_from_cell_to_cell(session, capsys):
    assert session.cell("x = torch.ones(2) * rank\nprint('I am', rank)") == [None] * 3
    assert capsys.readouterr().out == "[rank 0] I am 0\n[rank 1] I am 1\n[rank 2] I am 2\n"
    assert session.cell("dist.all_reduce(x)\nx") == ["tensor([3., 3.])"] * 3
    assert session.cell("x;") == [None] * 3
    assert capsys.readouterr().out == ""
    assert [each.tolist() for each in session["x * (rank + 1)"]] == [[3, 3], [6, 6], [9, 9]]


def test_a_function_runs_there_as_in_a_run(session):
    factor = 7

    def main(offset):
        total = torch.ones(1) * dist.get_rank()
        dist.all_reduce(total)
        with lab.wire() as wire:
            dist.all_reduce(total)
        return total.item() * factor + offset, wire.total_bytes > 0

    assert session.run(main, args=(1,)) == [(64.0, True)] * 3


def test_other_runs_do_not_meet_it(session):
    session.cell("y = rank")
    assert lab.run(dist.get_rank, 2) == [0, 1]
    with lab.session(2) as other:
        other.cell("y = -1")
        assert session["y"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time\ntime.sleep(rank / 5)\nmispelt + 1", "raised NameError: name 'mispelt' is not defined"),
        ("x = 1\nmispelt + 1", "raised NameError: name 'mispelt' is not defined"),
        ("x = = 1", "raised SyntaxError"),
        ("raise ValueError('as all do')", "raised ValueError: as all do"),
    ],
)
def test_where_all_ranks_raise_alike_they_stay(session, source, said):
    session.cell("kept = rank")
    with pytest.raises(lab.RankError) as caught:
        session.cell(source)
    assert str(caught.value).startswith("rank 0 of 3 " + said)
    assert str(caught.value).endswith("ranks 1 and 2 too")
    assert "lasting.py" not in str(caught.value)
    assert source.splitlines()[-1] in str(caught.value)
    assert session["kept"] == [0, 1, 2]


def test_a_result_that_cannot_travel_is_named(session):
    with pytest.raises(lab.RankError, match="generator"):
        session["(i for i in range(3))"]
    session.cell("class Hostile:\n    def __reduce__(self):\n        return int, ('not a number',)")
    with pytest.raises(lab.RankError, match="the result of rank 0 arrived but cannot be rebuilt here: ValueError"):
        session["Hostile()"]
    assert session["rank"] == [0, 1, 2]


def test_a_value_may_be_larger_than_a_message_and_a_task_may_not(session):
    assert [each.numel() for each in session["torch.zeros(8_000_000)"]] == [8_000_000] * 3
    with pytest.raises(ValueError, match=r"^what is sent to the ranks may have 67108864 bytes, not 8\d+: make it on"):
        session.run(len, args=(bytes(80_000_000),))
    assert session["rank"] == [0, 1, 2]


def test_a_line_that_does_not_end_is_shown_with_its_cell(session, capsys):
    session.cell("print('no end', end='')")
    assert capsys.readouterr().out == "[rank 0] no end\n[rank 1] no end\n[rank 2] no end\n"


def test_a_cell_is_code_of_a_program(session):
    session.cell("class Own:\n    size: int = 3\nheld = [None] * world_size\ndist.all_gather_object(held, Own())")
    assert session["[type(each) is Own for each in held]"] == [[True] * 3] * 3
    assert session["Own.__annotations__['size'] is int, __name__"] == [(True, "__main__")] * 3


def ended(session):
    assert not session.is_open
    with pytest.raises(RuntimeError, match=r"^this session has ended"):
        session["rank"]


def test_a_rank_that_raises_alone_ends_the_session():
    session = lab.session(2)
    session.cell("print('of before')")
    with pytest.raises(lab.RankError, match=r"^rank 1 of 2 raised ValueError: alone") as caught:
        session.cell("if rank == 1:\n    raise ValueError('alone')  # here\ndist.all_reduce(torch.ones(1))")
    assert "raise ValueError('alone')  # here" in str(caught.value)
    assert caught.value.rank == 1
    ended(session)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()", "rank 1 of 2 was killed by signal 9"),
        ("import sys\nif rank: sys.exit(3)\ndist.barrier()", r"rank 1 of 2 called sys.exit\(3\)"),
    ],
)  # fmt: skip
def test_a_rank_that_dies_ends_the_session(source, said, capsys):
    session = lab.session(2)
    session.cell("print('of before')")
    capsys.readouterr()
    with pytest.raises(lab.RankError, match=said):
        session.cell("print('last words')\n" + source)
    assert capsys.readouterr().out == "[rank 0] last words\n[rank 1] last words\n"
    ended(session)


def test_a_hang_ends_the_session_and_says_where():
    session = lab.session(2, timeout_s=1)
    with pytest.raises(lab.RankTimeout) as caught:
        session.cell("if rank:\n    dist.recv(torch.ones(1), 0)  # nobody sends")
    assert caught.value.ranks == [1]
    assert "dist.recv(torch.ones(1), 0)  # nobody sends" in str(caught.value)
    assert "lasting.py" not in str(caught.value)
    ended(session)


def test_a_rank_that_died_between_two_cells_is_named():
    session = lab.session(2)
    os.kill(session.run(os.getpid)[1], signal.SIGKILL)
    with pytest.raises(lab.RankError, match=r"^rank 1 of 2 was killed by signal 9"):
        session.cell("rank")
    ended(session)


def test_a_session_whose_supervisor_was_killed_has_ended():
    session = lab.session(2)
    supervisor = psutil.Process(session.run(os.getppid)[0])
    supervisor.kill()
    psutil.wait_procs([supervisor], timeout=10)
    with pytest.raises(RuntimeError, match="the process that watches the ranks ended without a report"):
        session.cell("rank")
    ended(session)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world_size": 0}, "world_size must be a whole number from 1 to 128, not 0"),
        ({"world_size": "4"}, "world_size must be a whole number from 1 to 128, not '4'"),
        ({"timeout_s": -1}, "timeout_s must be a positive number of seconds, not -1"),
        ({"network": "none"}, "network must be one of private, host, not 'none'"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        lab.session(**arguments)


def test_a_bad_task_is_named_before_it_is_sent(session):
    with pytest.raises(ValueError, match=r"^source must be a string of code, not 5$"):
        session.cell(5)
    with pytest.raises(ValueError, match=r"^expression must be a string of code, not 5$"):
        session[5]
    with pytest.raises(TypeError, match=r"^fn must be callable, not 5$"):
        session.run(5)
    with pytest.raises(TypeError, match=r"^args must be a tuple of the arguments of fn, not 'ab'$"):
        session.run(len, args="ab")


def test_torchrun_and_a_session_exclude_each_other(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match="works outside of ranks, and not under torchrun"):
        lab.session(2)


def test_a_rank_begins_no_session():
    with pytest.raises(lab.RankError, match="works outside of ranks"):
        lab.run(lambda: lab.session(2), 1)


def test_what_ranks_keep_in_temporary_folders_goes_with_them(tmp_path):
    with lab.session(2) as session:
        session.cell(f"import tempfile\nfolder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})")
        session.cell(f"file = tempfile.NamedTemporaryFile(dir={str(tmp_path)!r})")
        assert len(list(tmp_path.iterdir())) == 4
    assert list(tmp_path.iterdir()) == []


LEFT_OPEN = "from dtlib import lab; s = lab.session(2); print(*s.run(__import__('os').getpid), flush=True); input()"


@pytest.mark.parametrize("how", ["closed", "its end", signal.SIGKILL])
def test_nothing_is_left(how):
    if how == "closed":
        with lab.session(2) as session:
            pids = session.run(os.getpid)
    else:
        program = subprocess.Popen([sys.executable, "-c", LEFT_OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        pids = [int(each) for each in program.stdout.readline().split()]
        assert all(map(psutil.pid_exists, pids))
        if how == "its end":
            program.communicate(b"\n")
        else:
            program.send_signal(how)
            program.communicate()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
