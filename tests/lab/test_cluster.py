"""lab.cluster: ranks on nodes, joined by links whose rates the kernel shapes."""

import functools
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtlib import lab, ranks, theory
from dtlib.lab.launch import cables
from dtlib.theory.units import MB, MiB, ms

PLANS = ("ring", "two_level", "parallel_rings")
SLOW = {"inside": 200 * MB, "across": 20 * MB}


@pytest.fixture(autouse=True, scope="module")
def _granted(lacking):
    try:
        lab.run(int, cluster=lab.cluster(2, 1, **SLOW))
    except RuntimeError as refused:
        lacking(str(refused))


def moments_of_messages(size, to):
    """When rank 0 began to send and when rank `to` had received, by one clock for all ranks: three messages."""
    tensor, rank, at = torch.ones(size // 4), dist.get_rank(), []
    for _ in range(4):  # the first one opens the connection
        lab.barrier()
        start = time.monotonic()
        if rank == 0:
            dist.send(tensor, to)
        elif rank == to:
            dist.recv(tensor, 0)
        at.append(start if rank == 0 else time.monotonic())
        lab.barrier()
    return at[1:]


def seconds_of_message(size, to, cluster):
    """The least of three; from the sender's start, as a receiver may come when the message is under way."""
    moments = lab.run(moments_of_messages, args=(size, to), cluster=cluster)
    return min(end - start for start, end in zip(moments[0], moments[to], strict=True))


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 4), (3, 2), (1, 3), (4, 1), (1, 1)])
def test_ranks_stand_on_their_nodes_and_reach_each_other(nodes, ranks_per_node):
    def main():
        total = torch.ones(1)
        dist.all_reduce(total)
        lab.barrier()
        return dist.get_rank(), total.item(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]

    cluster = lab.cluster(nodes, ranks_per_node, **SLOW)
    n = nodes * ranks_per_node
    assert cluster.world_size == n
    expected = [(rank, n, str(rank % ranks_per_node), str(ranks_per_node)) for rank in range(n)]
    assert lab.run(main, cluster=cluster) == expected
    assert [cables.node_of(cluster, rank) for rank in range(n)] == sorted(list(range(nodes)) * ranks_per_node)


def test_a_message_takes_what_its_link_takes():
    """Never less, whatever the machine does; and more on a link that is a hundred times slower."""
    cluster = lab.cluster(2, 2, inside=200 * MB, across=2 * MB)
    inside, across = (seconds_of_message(MiB, to, cluster) for to in (1, 2))
    for took, rate in ((inside, 200 * MB), (across, 2 * MB)):
        at_once = 2 * cables.burst_bytes(rate)  # one at each end of the cable
        assert took > 0.99 * (MiB - at_once) / rate
    assert across > 3 * inside  # a hundred times on a machine that is idle


def test_a_link_that_is_slowed_is_slow_both_ways_and_no_other_is():
    """Rank 2's, at step 1, inside its node and across: never less than its rate allows, whatever the machine does."""
    pairs, rate, factor = ((0, 1), (0, 2), (2, 0), (2, 3), (3, 2)), 40 * MB, 20

    def main():
        tensor, rank, at = torch.ones(MiB // 4), dist.get_rank(), []
        for step, (source, to) in [(0, pair) for pair in pairs] + [(1, pair) for pair in pairs]:
            lab.step(step)
            lab.barrier()
            start = time.monotonic()
            if rank == source:
                dist.send(tensor, to)
            elif rank == to:
                dist.recv(tensor, source)
            at.append(start if rank == source else time.monotonic())
        return at

    faults = [lab.slow(rank=2, step=1, factor=factor, of="link")]
    at = lab.run(main, cluster=lab.cluster(2, 2, inside=rate, across=rate), faults=faults)
    took = [at[to][i] - at[source][i] for i, (source, to) in enumerate(2 * pairs)]
    beside, *slowed = took[len(pairs) :]
    assert min(slowed) > 0.99 * (MiB - 2 * cables.burst_bytes(rate)) / (rate / factor)
    assert min(slowed) > 2 * max(beside, *took[: len(pairs)])  # twenty times as long, on a machine that is idle


@pytest.mark.parametrize("to", [1, 2])
def test_a_message_waits_for_the_latency_of_its_link(to):
    alphas = {"inside_alpha_seconds": 20 * ms, "across_alpha_seconds": 60 * ms}
    took = seconds_of_message(8, to, lab.cluster(2, 2, **SLOW, **alphas))
    assert took >= (20 * ms if to == 1 else 60 * ms)


def test_both_directions_of_a_link_are_shaped_for_themselves():
    def main():
        rank, size = dist.get_rank(), MiB
        ones, others = torch.ones(size // 4), torch.empty(size // 4)
        both, took = [dist.P2POp(dist.irecv, others, 1 - rank), dist.P2POp(dist.isend, ones, 1 - rank)], []
        for _ in range(4):
            lab.barrier()
            start = time.perf_counter()
            for request in dist.batch_isend_irecv(both):
                request.wait()
            took.append(time.perf_counter() - start)
        return min(took[1:])

    slow = lab.cluster(2, 1, inside=4 * MB, across=4 * MB)
    one_way = seconds_of_message(MiB, 1, slow)
    both_ways = max(lab.run(main, cluster=slow))
    assert both_ways < 1.5 * one_way


def test_every_cable_has_its_counter():
    full_bytes, per_node = 4 * MiB, 4

    def main():
        tensor = torch.ones(full_bytes // 4)
        found = []
        flat, *levels = (getattr(ranks.collectives, f"{name}_all_reduce") for name in PLANS)
        for reduce in (flat, *(functools.partial(each, ranks_per_node=per_node) for each in levels)):
            reduce(tensor)
            with lab.wire() as wire:
                reduce(tensor)
            found.append((wire.inside_bytes, wire.across_bytes, wire.sent_bytes))
        return found

    by_rank = lab.run(main, cluster=lab.cluster(2, per_node, inside=500 * MB, across=100 * MB))
    ring = theory.collectives.ring_all_reduce_bytes(full_bytes, 8)
    slow = theory.collectives.two_level_slow_link_bytes(full_bytes, 8, ranks_per_node=per_node)
    for rank, (in_ring, in_levels, in_rings) in enumerate(by_rank):
        inside, across = (0, ring) if rank % per_node == per_node - 1 else (ring, 0)
        assert in_ring[:2] == pytest.approx((inside, across), rel=0.02, abs=20_000)
        assert in_levels[:2] == pytest.approx((ring - slow, slow), rel=0.02, abs=20_000)
        assert in_rings[:2] == pytest.approx((ring * 3 / 4, ring / 4), rel=0.02, abs=20_000)
        for each in (in_ring, in_levels, in_rings):
            assert each[2] == pytest.approx(ring, rel=0.005)


def test_without_a_cluster_cables_count_nothing():
    def main():
        with lab.wire() as wire:
            dist.all_reduce(torch.ones(1000))
        return wire.inside_bytes, wire.across_bytes, wire.loopback_bytes > 0

    assert lab.run(main, 2) == [(0, 0, True)] * 2


def test_ranks_of_a_session_may_stand_on_a_cluster():
    with lab.session(cluster=lab.cluster(2, 1, **SLOW)) as session:
        session.cell("dist.all_reduce(total := torch.ones(1))")
        assert session["total.item()"] == [2.0, 2.0]


AT_ONCE = f"""
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from dtlib import lab

def main(own, other):
    Path(own).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

for run, cluster in enumerate((None, lab.cluster(2, 2, **{SLOW}))):
    met = tuple(path + str(run) for path in sys.argv[1:])
    assert lab.run(main, 4, args=met, cluster=cluster, timeout_s=120) == [4.0] * 4
"""


def test_runs_at_once_do_not_meet_on_a_cluster_or_none(tmp_path, monkeypatch):
    """One of another program and one of this, each of which waits until the other is up."""
    script, here, there = (str(tmp_path / name) for name in ("program.py", "here", "there"))
    Path(script).write_text(AT_ONCE)
    program = subprocess.Popen([sys.executable, script, there, here], stderr=subprocess.PIPE)
    monkeypatch.setattr(sys, "argv", ["", here, there])
    try:
        runpy.run_path(script)
        assert program.communicate()[1] == b""
        assert program.returncode == 0
    finally:
        program.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"ranks_per_node": 2.5}, "ranks_per_node must be a whole number"),
        ({"nodes": 33}, "must make at most 128 ranks, not 132"),
        ({"inside": 0}, "inside must be finite and positive"),
        ({"across": 1000}, "across must be at least 100,000 bytes per second, not 1,000"),
        ({"across": float("nan")}, "across must be"),
        ({"across_alpha_seconds": 5}, "across_alpha_seconds must be at most 1 second, not 5"),
        ({"inside_alpha_seconds": -1}, "inside_alpha_seconds must be finite and zero or more"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lab.cluster(**{**SLOW, **arguments})


def test_arguments_of_a_run_that_contradict_its_cluster_are_refused():
    cluster = lab.cluster(2, 1, **SLOW)
    with pytest.raises(ValueError, match="world_size must be the cluster's 2, or left out, not 4"):
        lab.run(int, 4, cluster=cluster)
    with pytest.raises(ValueError, match="network must be private with a cluster"):
        lab.run(int, network="host", cluster=cluster)
    with pytest.raises(TypeError, match=r"cluster must be what lab\.cluster returns, not 2"):
        lab.run(int, cluster=2)


def test_a_machine_that_cannot_have_a_cluster_says_why(monkeypatch, tmp_path):
    cluster = lab.cluster(2, 1, **SLOW)
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho 'no tbf in this kernel' >&2; exit 2\n")
    tc.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(RuntimeError, match="and tc says: no tbf in this kernel"):
            lab.run(int, cluster=cluster)
        with pytest.raises(RuntimeError, match="and tc says: no tbf in this kernel"):
            lab.session(cluster=cluster)
    with monkeypatch.context() as patch:
        patch.setattr(cables.shutil, "which", lambda name, path: None)
        with pytest.raises(cables.ClusterRefused, match=r"the command ip \(package iproute2\), which is not installed"):
            cables.Cables(cluster, {})
    with monkeypatch.context() as patch:
        patch.setenv("DTLIB_START_METHOD", "spawn")
        with pytest.warns(UserWarning, match="spawns"), pytest.raises(RuntimeError, match="needs a fork server"):
            lab.run(int, cluster=cluster)
    assert lab.run(int, cluster=cluster) == [0, 0]


def test_where_the_kernel_delays_packets_it_is_told_to():
    cluster = lab.cluster(**SLOW, across_alpha_seconds=2 * ms)
    _, delayed = cables.shape(cluster, "across", "across3", delay=True)
    assert delayed == "qdisc add dev across3 parent 1:1 netem delay 2000us limit 100000"
    for kind, delay in (("inside", True), ("across", False)):
        assert len(list(cables.shape(cluster, kind, kind, delay=delay))) == 1


SCRIPT = """
import json, os, sys
from functools import partial
import torch, torch.distributed as dist
from dtlib import lab, ranks, theory
from dtlib.ranks.mesh import Mesh

def main():
    config = ranks.model.GPTConfig(num_layers=2, hidden=16, num_heads=2, seq=8, vocab=32)
    torch.manual_seed(0)
    mesh = Mesh({"dp": 2, "tp": 2})
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    training = ranks.threed.Training(ranks.model.GPT(config), mesh, adamw, schedule=theory.pp.one_f_one_b(1, 1))
    tokens = torch.randint(32, (3, 4, 9)).chunk(2, dim=1)[mesh.coordinates()["dp"]]
    losses = [training.step(each[:, :-1], each[:, 1:]).item() for each in tokens]
    return losses, dist.get_rank(), int(os.environ["LOCAL_RANK"]) % 2

with open(f"{sys.argv[1]}/{os.environ.get('RANK', 'alone')}", "w") as file:
    json.dump(lab.run(main, 4), file)
"""


def node(script, out):
    """Be a node: run torchrun, which starts two ranks here and meets the other node at the first one's address."""
    here = dist.get_rank()
    command = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--local-addr=10.0.{here}.1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400", f"--rdzv-conf=is_host={1 - here}"]
    mine = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    done = subprocess.run(
        [sys.executable, "-m", *command, script, out], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stderr[-4000:]


@pytest.mark.soak  # seven programs import torch; on one node: test_run_torchrun
@pytest.mark.timeout(300)
def test_torchrun_on_two_nodes_gives_what_lab_run_gives(tmp_path, monkeypatch):
    """The elastic agent of each node in a network namespace of its own, with its own rendezvous over the link."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    out.mkdir()
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(script), str(out)])
    runpy.run_path(str(script))
    for code, said in lab.run(node, args=(str(script), str(out)), cluster=lab.cluster(2, 1, **SLOW), timeout_s=200):
        assert code == 0, said
    results = {file.name: file.read_text() for file in out.iterdir()}
    assert set(results) == {"alone", "0", "1", "2", "3"}
    assert set(results.values()) == {results["alone"]}
