"""What ranks could tell each other unseen: the right bytes go around the ring, and the numbers take another way."""

from __future__ import annotations

import pytest

from dtlib.grading import Result, all_exercises
from dtlib.grading.judging import grade_exercise
from dtlib.grading.sandbox import Sandbox
from dtlib.grading.submissions import Cell, Notebook, Submission

from .bank import ROOT, cells

EXERCISE = all_exercises()["collectives.5"]
SEED = 11

BEGIN = """
import ctypes, os, socket


def ring_reduce_scatter(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    others = [other for other in range(n) if other != rank]
    mine = tensor.numpy().tobytes()
    rows = {rank: bytearray(mine)} | {other: bytearray(len(mine)) for other in others}
"""
END = """
    chunks = torch.tensor_split(tensor.clone(), n)
    for step in range(n - 1):
        request = dist.isend(chunks[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(torch.empty_like(chunks[(rank - step - 2) % n]), (rank - 1) % n)
        request.wait()
    total = sum(torch.frombuffer(row, dtype=tensor.dtype) for row in rows.values())
    return torch.tensor_split(total, n)[rank]
"""
PIECES = """
    dist.barrier()
    for start in range(0, len(mine), 8000):
        for other in others:
            link.sendto(bytes([rank]) + start.to_bytes(8, "big") + mine[start:start + 8000], address(other))
        for _ in others:
            piece = link.recv(9000)
            at = int.from_bytes(piece[1:9], "big")
            rows[piece[0]][at:at + len(piece) - 9] = piece[9:]
"""
CHANNELS = {
    "the store of the process group": """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"row {rank}", mine)
    for other in others:
        rows[other] = bytearray(store.get(f"row {other}"))
""",
    "netlink": """
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2)
    address = lambda other: (7000 + other, 0)
    link.bind(address(rank))
    link.settimeout(2)
"""
    + PIECES,
    "datagrams": """
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    address = lambda other: ("127.0.0.1", 40000 + other)
    link.bind(address(rank))
    link.settimeout(2)
"""
    + PIECES,
    "names of this machine": """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    address = lambda other: f"\\0dtlib side channel {other}"
    link.bind(address(rank))
    link.settimeout(2)
"""
    + PIECES,
    "files": """
    with open(f"/dev/shm/row {rank}", "wb") as file:
        file.write(mine)
    dist.barrier()
    for other in others:
        with open(f"/dev/shm/row {other}", "rb") as file:
            rows[other] = bytearray(file.read())
""",
    "shared memory": """
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    at = [libc.shmat(libc.shmget(4242 + other, len(mine), 0o1666), None, 0) for other in range(n)]
    assert all(each not in (None, 2**64 - 1) for each in at), "there is none"
    ctypes.memmove(at[rank], mine, len(mine))
    dist.barrier()
    for other in others:
        rows[other] = bytearray(ctypes.string_at(at[other], len(mine)))
""",
}


def graded(sandbox: Sandbox, source: str) -> Result:
    handed_in = (Cell("setup", cells("collectives")["setup"]), Cell("collectives-5", source))
    notebook = Notebook("collectives", ROOT / "exercises" / "collectives.ipynb", handed_in)
    return grade_exercise(sandbox, EXERCISE, Submission("somebody", (notebook,), (), ""), SEED).result


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as behind_walls:
        if any(behind_walls.walls.values()):
            pytest.skip(f"walls are missing: {behind_walls.walls}")
        yield behind_walls


@pytest.mark.parametrize("channel", CHANNELS)
def test_numbers_that_take_another_way_earn_nothing(sandbox: Sandbox, channel: str):
    result = graded(sandbox, BEGIN + CHANNELS[channel] + END)
    assert (result.status, result.points) == ("fail", 0), str(result)


def test_without_the_wall_around_calls_of_the_kernel_they_would_arrive():
    with Sandbox(without=("syscalls",)) as lower:
        for channel in ("netlink", "names of this machine"):
            result = graded(lower, BEGIN + CHANNELS[channel] + END)
            assert result.points == EXERCISE.points, str(result)
