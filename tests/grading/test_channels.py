"""Ranks reach each other through the network that is looked at, and nothing hides memory that nobody weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtlib.grading.sandbox.runner import Sandbox
from dtlib.grading.sandbox.walls.limits import Limits

from .engine import on_paper, on_ranks, run

# Each of these would be a way to another rank, or a place that no scale sees. What a line gives is what got through.
WAYS = """
import ctypes
import fcntl
import mmap
import pathlib
import socket
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
LIBRARY = open(torch.__file__)


def call(number, *arguments):
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def others():
    # Of another user, as under root, a rank may not be signalled, but it can be named.
    for number in range(2, 300):
        try:
            os.kill(number, 0)
            if LIBC.tgkill(os.getpid(), number, 0) != 0:  # no thread of ours
                return
        except ProcessLookupError:
            continue
        except PermissionError:
            return
    raise OSError("there is nobody")


def neighbours():
    own = os.readlink("/proc/self").split("/")[-1]
    assert [each.name for each in pathlib.Path("/proc").glob("[0-9]*") if each.name != own]


def f(tensor):
    rank = dist.get_rank()
    ways = {
        "a lock on a shared file (flock)": lambda: fcntl.flock(LIBRARY, fcntl.LOCK_SH),
        "a lock on a shared file (lockf)": lambda: fcntl.lockf(LIBRARY, fcntl.LOCK_SH),
        "a lease": lambda: fcntl.fcntl(LIBRARY, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "a watch on a shared file": lambda: call(294, 0),
        "a socket": lambda: socket.socket(),
        "a socket with a name": lambda: socket.socket(socket.AF_UNIX),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "a pair of sockets": lambda: socket.socketpair(),
        "a nameless file": lambda: os.memfd_create("kept"),
        "a larger pipe": lambda: fcntl.fcntl(os.pipe()[1], 1031, 2**20),
        "pages given to a pipe": lambda: call(278, os.pipe()[1], None, 0, 0),
        "shared memory of System V": lambda: call(29, 7, 4096, 0o1666),
        "a semaphore": lambda: call(64, 7, 1, 0o1666),
        "a message queue": lambda: call(68, 7, 0o1666),
        "keys of the kernel": lambda: call(248, b"user", b"key", b"x", 1, -2),
        "another rank by its number": others,
        "another rank in /proc": neighbours,
        "an option of a socket": lambda: socket.socket(fileno=connection()).setsockopt(socket.SOL_TCP, 4, 12345),
        "the cache of a shared file": lambda: os.posix_fadvise(LIBRARY.fileno(), 0, 0, os.POSIX_FADV_DONTNEED),
        "what is in that cache": lambda: os.preadv(LIBRARY.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT),
        "waking whoever waits at a shared page": lambda: call(202, ctypes.byref(ctypes.c_int()), 1, 9, None, None, 0),
        "the times of a device": lambda: os.utime("/dev/null", ns=(1, 1)),
        "a label of a file": lambda: os.setxattr("/learner", "user.label", b"kept"),
        "a thread that was there before": lambda: in_a_thread(),
        "memory that is mapped shared": lambda: mmap.mmap(-1, 4096),
        "zeros that are mapped shared": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096),
        "a wait for a child as if for a disk": lambda: waits_as_for_a_disk(),
        "an end of a connection": lambda: ended(),
        "another address of a connection": lambda: rebound(),
    }
    through = []
    for name, way in ways.items():
        try:
            way()
            through.append(name)
        except (OSError, AssertionError):
            pass
    print(through)


def connection():
    # One of gloo's, not closed with the object that stands for it.
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    return one.detach()
        except OSError:
            pass
    raise OSError("there is none")


def an_end():
    # Where there are no others, one of gloo's, which would not survive it.
    try:
        return socket.socket()
    except PermissionError:
        return socket.socket(fileno=connection())


def rebound():
    # What a rank gives up and binds anew, every rank can read in /proc/net/tcp.
    nowhere = ctypes.create_string_buffer(16)
    with an_end() as one:
        if LIBC.connect(one.fileno(), nowhere, 16) != 0:
            raise OSError(ctypes.get_errno(), "refused")
        one.bind(("127.0.0.1" if one.family == socket.AF_INET else "::1", 20_000 + dist.get_rank()))


def ended():
    with an_end() as one:
        try:
            one.shutdown(socket.SHUT_WR)
        except PermissionError:
            raise
        except OSError:
            return  # it was not connected: nobody refuses


def waits_as_for_a_disk():
    if call(56, 0x4000 | 17, 0, 0, 0, 0) == 0:
        os._exit(0)


def in_a_thread():
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(socket.socket).result()
"""


def through(sandbox: Sandbox) -> list[set[str]]:
    printed = run(sandbox, on_ranks(2), WAYS).printed
    return [set(eval(line.partition("] ")[2])) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def sandbox(lacking: Callable[[str], None]) -> Iterator[Sandbox]:
    with Sandbox() as walled:
        if any(walled.walls.values()):
            lacking(f"walls are missing: {walled.walls}")
        yield walled


def test_no_way_but_the_network_is_open(sandbox: Sandbox):
    assert through(sandbox) == [set(), set()]


@pytest.mark.usefixtures("sandbox")  # all walls can stand here
def test_where_the_kernel_is_not_told_to_refuse_they_are():
    with Sandbox(without=("syscalls", "processes")) as sandbox:
        for found in through(sandbox):
            assert {"a lock on a shared file (flock)", "a socket", "a pair of sockets", "a nameless file"} <= found
            assert {"a larger pipe", "a watch on a shared file", "a thread that was there before"} <= found
            assert {"an option of a socket", "the cache of a shared file"} <= found
            assert {"waking whoever waits at a shared page", "another address of a connection"} <= found
            assert {"memory that is mapped shared", "zeros that are mapped shared"} <= found
            assert {"a wait for a child as if for a disk", "an end of a connection"} <= found
            assert "another rank by its number" in found


MEETING = (
    "from dtlib.lab.launch import context\n"
    "def f(tensor):\n    print(context.current('f').exchange({}))\n    return tensor\n"
)


ENDED = """
import sys
from dtlib.grading.exercises import plain

def f(tensor):
    rank, frame = dist.get_rank(), sys._getframe(1)
    while "desk" not in frame.f_locals:
        frame = frame.f_back
    desk = frame.f_locals["desk"]
    told = {"tensor": np.ones(3), "returned": np.ones(3), "library": [], "built_in": [], "escaped": []}
    packed = plain.pack(told | {"traffic": [["data", rank, 1 - rank, "send", 0, 31337]]})
    links = {n: os.readlink(f"/proc/self/fd/{n}") for n in range(3, 40) if os.path.islink(f"/proc/self/fd/{n}")}
    fd = next(n for n, link in links.items() if "-result" in link)
    for _ in range(RESULTS):
        os.write(fd, len(packed).to_bytes(8, "big") + packed)
    for _ in range(ENDS):
        desk._sock.sendall(b"\\0\\0\\0\\1J")
        time.sleep(0.1)
    time.sleep(1)
    return tensor
"""


@pytest.mark.parametrize(("results", "ends"), [(0, 1), (1, 2), (2, 2), pytest.param(3, 3, marks=pytest.mark.soak)])
def test_nobody_ends_a_case_for_the_harness(sandbox: Sandbox, results: int, ends: int):
    source = ENDED.replace("RESULTS", str(results)).replace("ENDS", str(ends))
    seen = run(sandbox, on_ranks(2, 2, 2), source).observed
    assert {each.trouble.kind for each in seen if each.trouble} == {"tampered"}
    assert not any(header.num_bytes == 31337 for each in seen for header in each.seen.log)


def test_a_result_is_the_one_that_was_there_when_it_was_told(sandbox: Sandbox):
    """The first case's result is written over in the second."""
    over = (
        "def f(tensor):\n"
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        try:\n"
        "            if '-result' in os.readlink(f'/proc/self/fd/{name}'):\n"
        "                os.pwrite(int(name), bytes(os.fstat(int(name)).st_size), 0)\n"
        "        except OSError:\n"
        "            pass\n"
        "    return tensor\n"
    )
    assert [each.trouble for each in run(sandbox, on_ranks(2, 2), over).observed] == [None, None]


@pytest.mark.parametrize(
    ("message", "how_often", "kind"),
    [
        ("X", 9000, "hung"),
        ("A", 400, "tampered"),
        ("J", 40, "tampered"),
        ("D", 1, "tampered"),
        ("E", 1, "tampered"),
        ("Z", 1, "tampered"),
    ],
)
def test_who_talks_and_does_not_listen_ends_in_a_verdict(sandbox: Sandbox, message: str, how_often: int, kind: str):
    source = (
        "import sys\n"
        "def f(tensor):\n"
        "    frame = sys._getframe(1)\n"
        "    while 'desk' not in frame.f_locals:\n"
        "        frame = frame.f_back\n"
        f"    for _ in range({how_often}):\n"
        f"        frame.f_locals['desk']._sock.sendall(b'\\0\\0\\0\\1{message}')\n"
        "    time.sleep(60)\n"
    )
    assert run(sandbox, on_ranks(2), source).observed[0].trouble.kind == kind  # type: ignore[union-attr]


def test_an_empty_frame_ends_in_a_verdict(sandbox: Sandbox):
    talk = FRAME.replace("FRAME", r"b'\0\0\0\0'")
    assert run(sandbox, on_ranks(2), talk).observed[0].trouble.kind == "tampered"  # type: ignore[union-attr]


FRAME = """
import sys
def f(tensor):
    frame = sys._getframe(1)
    while 'desk' not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals['desk']._sock.sendall(FRAME)
    time.sleep(2)
    return tensor
"""


def test_no_answer_on_paper_is_longer_than_any_could_be(sandbox: Sandbox):
    """Judging a text of a megabyte took the trusted process 23 seconds; who lifts the limit has written it himself."""
    lifted = (
        "import sys\n"
        "plain = sys.modules['dtlib.grading.exercises.plain']\n"
        "plain._MAX_CHARS = plain.MAX_ANSWER_BYTES = plain.MAX_ANSWER_TEXT_BYTES = 10**9\n"
    )
    answers = "def f(size):\n    return 'x' * size, list(range(min(size, 4000))), np.zeros(size)\n"
    long = run(sandbox, on_paper(10, 100_000), answers).observed
    assert [each.trouble for each in long] == [None, None]
    assert long[0].said[0]["answer"][0] == "x" * 10
    assert long[1].said[0]["answer"]["not_plain"] == "tuple"
    trouble = run(sandbox, on_paper(100_000), lifted + answers).observed[0].trouble
    assert trouble is not None
    assert trouble.kind == "tampered"


def test_whom_to_blame_is_no_matter_of_who_was_quicker(sandbox: Sandbox):
    """Both ranks raise, and rank 0 long after rank 1."""
    raises = "def f(tensor):\n    until = time.process_time() + 0.4 * (dist.get_rank() == 0)\n"
    raises += "    while time.process_time() < until:\n        pass\n    raise ValueError\n"
    told = run(sandbox, on_ranks(2, 3), raises).observed
    assert [str(each.trouble).split(" raised")[0] for each in told] == ["rank 0", "rank 0"]


def test_a_flood_of_packets_is_no_busy_machine(sandbox: Sandbox):
    source = (
        "import socket\n"
        "def f(tensor):\n"
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        try:\n"
        "            one = socket.socket(fileno=os.dup(int(name)))\n"
        "            if one.family in (socket.AF_INET, socket.AF_INET6):\n"
        "                while True:\n"
        "                    one.send(b'x')\n"
        "        except OSError:\n"
        "            pass\n"
        "    return tensor\n"
    )
    trouble = run(sandbox, on_ranks(2), source).observed[0].trouble
    assert trouble is not None
    assert trouble.kind in ("limit", "tampered", "hung")


def test_children_that_nobody_buries_have_computed(sandbox: Sandbox):
    source = (
        "import signal\n"
        "def f(tensor):\n"
        "    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "    for _ in range(100):\n"
        "        here, there = os.pipe()\n"
        "        if os.fork() == 0:\n"
        "            until = time.process_time() + 1\n"
        "            while time.process_time() < until:\n"
        "                pass\n"
        "            os._exit(0)\n"
        "        os.close(there)\n"
        "        os.read(here, 1)\n"
        "    return tensor\n"
    )
    exercise, cases = on_ranks(1)
    with Sandbox(Limits(cpu_seconds=2.0)) as short:
        trouble = run(short, (exercise, cases), source).observed[0].trouble
    assert trouble is not None
    assert trouble.kind == "hung"
    assert "of its own computing time" in trouble.text


def test_ranks_that_meet_are_told_nothing_of_each_other(sandbox: Sandbox):
    outcome = run(sandbox, on_ranks(2), MEETING.format("b'secret'"))
    assert outcome.printed.splitlines() == ["[rank 0] [b'', b'']", "[rank 1] [b'', b'']"]
    told = run(sandbox, on_ranks(2), MEETING.format("b'a secret of more than one frame' * 9")).observed[0].trouble
    assert told is not None
    assert told.kind == "tampered"
