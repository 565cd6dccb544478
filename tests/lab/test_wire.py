"""lab.wire: what the kernel counted against what must have been sent."""

import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from dtlib import lab

MiB = 2**20


def traffic(what, full_bytes):
    """Bytes of one collective: (this rank's wire, its sends as called)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = torch.zeros(full_bytes // 4)
    with lab.wire() as wire:
        if what == "all_reduce":
            dist.all_reduce(full)
        elif what == "all_gather":
            dist.all_gather(list(full.chunk(world_size)), torch.ones(full_bytes // 4 // world_size))
        elif what == "send":
            if rank == 0:
                dist.send(full, 1)
            elif rank == 1:
                dist.recv(full, 0)
    return wire


@pytest.mark.parametrize("network", ["private", "host"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "send"])
def test_the_wire_carries_what_theory_says_to_half_a_percent(what, world_size, network):
    for full_bytes in (MiB, 5 * MiB):
        expected = {"all_reduce": 2 * (world_size - 1), "all_gather": world_size - 1, "send": 1}[what] * full_bytes
        wires = lab.run(traffic, world_size, args=(what, full_bytes), network=network)
        assert {wire.total_bytes for wire in wires} == {wires[0].total_bytes}, "every rank is told the same total"
        assert wires[0].total_bytes == pytest.approx(expected, rel=0.005)
        assert sum(wire.sent_bytes for wire in wires) == wires[0].total_bytes
        assert sum(wire.received_bytes for wire in wires) == wires[0].total_bytes
        assert all(sum(wire.sent_to) == wire.sent_bytes for wire in wires)


def test_who_sent_and_who_received():
    wires = lab.run(traffic, 3, args=("send", MiB))
    assert [round(wire.sent_bytes / MiB) for wire in wires] == [1, 0, 0]
    assert [round(wire.received_bytes / MiB) for wire in wires] == [0, 1, 0]
    assert [[round(each / MiB) for each in wire.sent_to] for wire in wires] == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


def from_one_port():
    """Ranks 0 and 1 connect from the same port, each to a listener of its own, and are sent a mebibyte."""
    rank, ports, port = dist.get_rank(), [None] * 4, [None]
    own = socket.create_server(("127.0.0.1", 0)) if rank >= 2 else socket.socket()
    dist.all_gather_object(ports, own.getsockname()[1] if rank >= 2 else None)
    if rank < 2:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for sharer in (0, 1):
        if rank == sharer:
            own.bind(("127.0.0.1", port[0] or 0))
            port = [own.getsockname()[1]]
        dist.broadcast_object_list(port, sharer)
    if rank < 2:
        own.connect(("127.0.0.1", ports[rank + 2]))
    with own if rank < 2 else own.accept()[0] as connection, lab.wire() as wire:
        if rank >= 2:
            connection.sendall(bytes(MiB))
        else:
            left = MiB
            while left:
                left -= len(connection.recv(left))
    own.close()
    return wire.sent_to


def test_two_ranks_may_have_one_port():
    of_ranks = lab.run(from_one_port, 4)
    assert [[round(each / MiB) for each in sent] for sent in of_ranks[2:]] == [[1, 0, 0, 0], [0, 1, 0, 0]]


def test_silence_weighs_nothing():
    assert [wire.total_bytes for wire in lab.run(traffic, 4, args=("nothing", 4))] == [0] * 4


def test_a_late_rank_is_counted_whole():
    def main():
        if dist.get_rank() == 1:
            import time

            time.sleep(0.3)
        return traffic("all_reduce", MiB).total_bytes

    assert lab.run(main, 2)[0] == pytest.approx(2 * MiB, rel=0.005)


@pytest.fixture
def noise():
    """Somebody else's traffic on this machine's loopback, all the time."""
    stop = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def swallow():
        peer, _ = server.accept()
        with peer:
            while peer.recv(MiB):
                pass

    def shout():
        with socket.create_connection(server.getsockname()) as sock:
            while not stop.is_set():
                sock.sendall(bytes(MiB))

    threads = [threading.Thread(target=work) for work in (swallow, shout)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()
    server.close()


def test_traffic_of_other_processes_does_not_enter(noise):
    for network in ("private", "host"):
        wire = lab.run(traffic, 2, args=("all_reduce", MiB), network=network)[0]
        assert wire.total_bytes == pytest.approx(2 * MiB, rel=0.005)
        if "in a private network" in wire.method:
            assert 2 * MiB < wire.loopback_bytes < 2.1 * MiB


def test_ranks_in_a_private_network_reach_nobody():
    if "in a private network" not in lab.run(traffic, 1, args=("nothing", 4))[0].method:
        pytest.fail("this machine grants no network namespace: `dtlib doctor` says why")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def knock():
            try:
                socket.create_connection(address, timeout=2).close()
            except OSError as error:
                return type(error).__name__
            return "connected"

        assert lab.run(knock, 1) == ["ConnectionRefusedError"]
        assert lab.run(knock, 1, network="host") == ["connected"]


REFUSED = """
import torch, torch.distributed as dist
from dtlib import lab
def main():
    with lab.wire() as wire:
        dist.all_reduce(torch.zeros(2**18))
    return wire
wire = lab.run(main, 2)[0]
print(wire.method, "|", round(wire.total_bytes / 2**20, 2), wire.loopback_bytes)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux's unshare to forbid namespaces")
def test_where_a_namespace_is_refused_the_method_says_so():
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, sys.executable, REFUSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    method, _, numbers = done.stdout.partition(" | ")
    assert method == (
        "the kernel's counts of the ranks' own TCP connections, on the machine's network "
        "(the kernel refused a private network namespace (ENOSPC: No space left on device))"
    ), done.stderr
    assert numbers == "2.0 0\n"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root has rights to give up")
def test_without_the_rights_of_root_a_user_namespace_gives_the_private_network():
    code = REFUSED.replace("wire.loopback_bytes", "wire.loopback_bytes > 2**21")
    command = ["setpriv", "--bounding-set", "-sys_admin,-net_admin", "--inh-caps", "-sys_admin,-net_admin"]
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "the kernel's counts of the ranks' own TCP connections, in a private network | 2.0 True\n"


def test_where_the_kernel_does_not_count_the_send_calls_are_counted():
    def main():
        sys.modules["dtlib.lab.wire.counted"].kernel_counts_connections = lambda: False
        return traffic("send", MiB)

    wires = lab.run(main, 2)
    assert [(wire.total_bytes, wire.sent_bytes, wire.received_bytes) for wire in wires] == [
        (MiB, MiB, 0),
        (MiB, 0, MiB),
    ]
    assert "the payload of the ranks' send calls, collectives not seen" in wires[0].method


def test_a_block_that_raises_ends_the_run_with_that_error():
    def main():
        with lab.wire():
            if dist.get_rank() == 1:
                raise ValueError("inside")

    with pytest.raises(lab.RankError, match="rank 1 of 2 raised ValueError: inside"):
        lab.run(main, 2)


def test_the_send_counter_sees_payloads_and_names_collectives():
    def main():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        values = torch.ones(1000, dtype=torch.bfloat16)
        with lab.SendCounter() as counter:
            request = dist.isend(values, (rank + 1) % world_size)
            dist.recv(torch.empty_like(values), (rank - 1) % world_size)
            request.wait()
            dist.all_reduce(values)
        return counter.sent_bytes, counter.received_bytes, counter.num_sends, counter.collectives

    assert lab.run(main, 3) == [(2000, 2000, 1, ["all_reduce"])] * 3
