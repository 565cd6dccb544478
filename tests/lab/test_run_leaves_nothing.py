"""After any run: no process, semaphore, socket or file that was not there before."""

import concurrent.futures
import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from dtlib import lab

MANY = """
import torch, torch.distributed as dist
from dtlib import lab

def main(number):
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    return total.item()

for number in range(200):
    assert lab.run(main, 3, args=(number,)) == [3 * float(number)] * 3
print("all right")
"""


def traces():
    """What a run could leave behind: children of this process, its descriptors, shared memory, temporary files."""
    children = {f"process {child.pid}" for child in psutil.Process().children(recursive=True)}
    descriptors = {f"descriptor {fd}" for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}
    temporary = {f"temporary {name}" for name in os.listdir(tempfile.gettempdir())}
    return children | descriptors | temporary | set(glob.glob("/dev/shm/*"))


@pytest.fixture
def nothing_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other programs use the machine's own folder
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    lab.run(lambda: 1, 1)  # the fork server stays, by design
    before = traces()
    yield
    deadline = time.monotonic() + 60
    while traces() - before and time.monotonic() < deadline:
        time.sleep(0.05)  # shared memory of other programs comes and goes; what a run leaves behind stays
    assert traces() - before == set()


def endings():
    def daemon():
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return 1

    def fail():
        subprocess.Popen(["sleep", "1000"])
        if dist.get_rank() == 1:
            raise ValueError
        dist.barrier()

    def hang():
        if dist.get_rank() == 0:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            dist.all_reduce(torch.ones(1))

    def scatter_files():
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        file.write(b"still open at the end")

    return {"good": lambda: dist.barrier(), "daemon": daemon, "fail": fail, "hang": hang, "files": scatter_files}


CLUSTER = "lab.cluster(3, 1, inside=1e8, across=1e8)"


@pytest.mark.parametrize("cluster", ["None", CLUSTER])
@pytest.mark.parametrize("ending", sorted(endings()))
def test_nothing_is_left_behind(ending, cluster, nothing_left, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        lab.run(endings()[ending], 3, timeout_s=1, cluster=eval(cluster))
    except (lab.RankError, lab.RankTimeout):
        assert ending in ("fail", "hang")


def test_every_rank_is_gone_within_a_second_of_the_first_error(tmp_path):
    def main():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError
        time.sleep(60)

    with pytest.raises(lab.RankError):
        lab.run(main, 3)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_runs", [10, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_runs_in_a_row(nothing_left, num_runs):
    def main(number):
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        return total.item()

    for number in range(num_runs):
        assert lab.run(main, 2, args=(number,)) == [2.0 * number] * 2


@pytest.mark.soak  # one run at a time: test_cluster
@pytest.mark.timeout(600)
def test_many_runs_from_two_processes_at_once(nothing_left):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(lambda _: subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True), "ab")
        )
    assert [done.stdout for done in both] == ["all right\n"] * 2, both[0].stderr + both[1].stderr


def test_runs_from_several_threads_do_not_meet():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: lab.run(lambda: number, 2), range(12))) == [[n, n] for n in range(12)]


@pytest.mark.parametrize(
    ("how", "cluster"),
    [
        pytest.param(signal.SIGTERM, "None", marks=pytest.mark.soak),  # ends the program as SIGKILL does: unheard
        pytest.param(signal.SIGKILL, "None", marks=pytest.mark.soak),  # as on a cluster, with less to leave
        (signal.SIGINT, "None"),
        (signal.SIGKILL, CLUSTER),
    ],
)
def test_when_the_readers_program_dies_everything_dies(how, cluster, tmp_path):
    code = textwrap.dedent(f"""
        import os, time, pathlib
        import torch.distributed as dist
        from dtlib import lab
        def main():
            pathlib.Path({str(tmp_path)!r}, str(dist.get_rank())).write_text(str(os.getpid()))
            time.sleep(600)
        lab.run(main, 3, timeout_s=600, cluster={cluster})
    """)
    program = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    while len(list(tmp_path.iterdir())) < 3 or not all(file.read_text() for file in tmp_path.iterdir()):
        time.sleep(0.05)
    family = psutil.Process(program.pid).children(recursive=True)
    assert len(family) == 5, "a fork server, a supervisor and three ranks"
    os.killpg(program.pid, how)
    program.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_a_forked_child_of_the_reader_has_a_fork_server_of_its_own():
    lab.run(lambda: 1, 1)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if lab.run(lambda: "child", 2) == ["child"] * 2 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lab.run(lambda: "parent", 2) == ["parent"] * 2
