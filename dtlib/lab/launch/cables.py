"""The cables of a cluster on one machine: a network namespace for each rank, with two devices whose rates are shaped.

::

        node 0              node 1
    rank 0   rank 1     rank 2   rank 3
      ║│       ║│         ║│       ║│
      ║└───┬───╫┘         ║└───┬───╫┘      │ inside: to the switch of the node
      ║ switch ║          ║ switch ║
      ╚════════╩═ switch ═╩════════╝       ║ across: to the switch between nodes

Each cable is a pair of virtual Ethernet devices with a token bucket at both ends, each switch a bridge. They belong to
namespaces without a name, which end with the last process in them: nothing is left behind, whatever happens. Linux
with iproute2; no privilege where the kernel grants user namespaces.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dtlib.processes.namespace import enter_network, new_network, refusal
from dtlib.theory.cluster import Cluster

INSIDE, ACROSS = "inside", "across"
_PACKET_SECONDS = 1e-3  # long packets leave the processor idle, short ones let small messages by
_MIN_PACKET, _MAX_PACKET = 1_500, 16_000
_HEADERS = 14, 52  # bytes of a packet of Ethernet, and of IP and TCP
_QUEUE_BYTES = 64 * 2**20  # as good as endless: nothing is dropped
_LEAST_BYTES_PER_S = 1_000
NETEM, PACING = "by the kernel (netem)", "by pacing: sends wait, collectives of gloo do not"


class ClusterRefused(RuntimeError):
    """This machine cannot have a cluster; the message says why."""


class Cables:
    """The network of `cluster`, made by the process that is to start its ranks, which must have one thread.

    The process is then where the switches are. `environment` says where programs are. Raises `ClusterRefused`.
    """

    def __init__(self, cluster: Cluster, environment: Mapping[str, str]) -> None:
        self.cluster = cluster
        self._namespaces: list[int] = []
        self._ip, self._tc = (_command(name, environment.get("PATH", os.defpath)) for name in ("ip", "tc"))
        try:
            self._switches = new_network(as_root=True)
            self.latency_by = NETEM if self._can_delay() else PACING
            for _ in range(cluster.world_size):
                self._namespaces.append(new_network())
            enter_network(self._switches)
            self._lay()
            for rank, namespace in enumerate(self._namespaces):
                enter_network(namespace)
                self._plug_in(rank)
            enter_network(self._switches)
        except OSError as error:
            raise ClusterRefused(f"a cluster needs network namespaces, and {refusal(error)}") from None

    def enter(self, rank: int) -> None:
        """Be in the namespace of `rank` from now on; what the rank sends is delayed where the kernel cannot."""
        enter_network(self._namespaces[rank])
        if self.latency_by == PACING:
            _pace_sends(self.cluster, rank)

    def cut(self, rank: int, factor: float) -> None:
        """Leave both cables of `rank` one part in `factor` of their rate, or pull them: this process is where the
        switches are, and goes to the rank's namespace and back."""
        if math.isinf(factor):
            _batch(self._ip, [f"link set {kind}{rank} down" for kind in (INSIDE, ACROSS)])
            return
        for namespace, number in ((self._namespaces[rank], ""), (self._switches, rank)):
            enter_network(namespace)
            _batch(self._tc, [bucket(self.cluster, kind, f"{kind}{number}", factor) for kind in (INSIDE, ACROSS)])

    def _can_delay(self) -> bool:
        with suppress(ClusterRefused):
            _batch(self._tc, ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
            return True
        return False

    def _lay(self) -> None:
        """Switches, and the cables from them to the ranks' namespaces."""
        nodes = [f"node{node}" for node in range(self.cluster.num_nodes)]
        lines = [f"link add {name} mtu {_MAX_PACKET} type bridge\nlink set {name} up" for name in (*nodes, "between")]
        ports = []
        for rank, namespace in enumerate(self._namespaces):
            for kind, switch in ((INSIDE, nodes[node_of(self.cluster, rank)]), (ACROSS, "between")):
                mtu = f"mtu {packet_bytes(_link(self.cluster, kind)[0])}"
                other = f"peer name {kind} {mtu} address {_ethernet(rank)} netns /proc/self/fd/{namespace}"
                lines.append(f"link add {kind}{rank} {mtu} type veth {other}")
                lines.append(f"link set {kind}{rank} master {switch} up")
                ports.append((kind, f"{kind}{rank}"))
        _batch(self._ip, lines, self._namespaces)
        late = self.latency_by == NETEM
        _batch(self._tc, [line for kind, device in ports for line in shape(self.cluster, kind, device, delay=late)])

    def _plug_in(self, rank: int) -> None:
        """Addresses and routes of the rank in whose namespace this process is."""
        here = address(self.cluster, rank)
        node = here.rpartition(".")[0]
        lines = [f"address add {here}/32 dev {ACROSS}", *(f"link set {kind} up" for kind in (INSIDE, ACROSS))]
        lines += [f"route add 10.0.0.0/16 dev {ACROSS} src {here}", f"route add {node}.0/24 dev {INSIDE} src {here}"]
        for other in range(self.cluster.world_size):  # or all would ask all at once where the others are
            kind = INSIDE if node_of(self.cluster, other) == node_of(self.cluster, rank) else ACROSS
            there = f"{address(self.cluster, other)} lladdr {_ethernet(other)} dev {kind}"
            lines.append(f"neighbour add {there} nud permanent")
        _batch(self._ip, lines)
        _batch(self._tc, [line for kind in (INSIDE, ACROSS) for line in shape(self.cluster, kind, kind, delay=False)])


def shape(cluster: Cluster, kind: str, device: str, *, delay: bool) -> Iterable[str]:
    """What tc is told so that packets leave `device` at the rate of its kind of cable, and late with `delay`."""
    yield bucket(cluster, kind, device)
    if delay and (alpha := _link(cluster, kind)[1]):
        yield f"qdisc add dev {device} parent 1:1 netem delay {round(alpha * 1e6)}us limit 100000"


def bucket(cluster: Cluster, kind: str, device: str, factor: float = 1) -> str:
    """What tc is told so that packets leave `device` at the rate of its kind of cable, or at a part of what it was."""
    rate = _link(cluster, kind)[0]
    packet, (outer, inner) = packet_bytes(rate), _HEADERS
    with_headers = max(_LEAST_BYTES_PER_S, rate / factor) * (packet + outer) / (packet - inner)
    tokens = f"rate {round(8 * with_headers)}bit burst {burst_bytes(rate)} limit {_QUEUE_BYTES}"
    return f"qdisc {'add' if factor == 1 else 'change'} dev {device} root handle 1: tbf {tokens}"


def _link(cluster: Cluster, kind: str) -> tuple[float, float]:
    """Bytes per second and latency of a kind of cable."""
    if kind == INSIDE:
        return cluster.inside_bytes_per_s, cluster.inside_alpha_seconds
    return cluster.across_bytes_per_s, cluster.across_alpha_seconds


def burst_bytes(bytes_per_s: float) -> int:
    """What a cable of this rate may send at once, after it was idle: at least a packet and a half."""
    return round(max(1.5 * packet_bytes(bytes_per_s), 0.5 * bytes_per_s * _PACKET_SECONDS))


def packet_bytes(bytes_per_s: float) -> int:
    """The longest packet on a cable of this rate: a millisecond's, within what a device takes."""
    return min(_MAX_PACKET, max(_MIN_PACKET, round(bytes_per_s * _PACKET_SECONDS)))


def node_of(cluster: Cluster, rank: int) -> int:
    """The node on which a rank stands: the first ranks are node 0."""
    return rank // cluster.ranks_per_node


def address(cluster: Cluster, rank: int) -> str:
    """The address of a rank, the same on both of its cables."""
    return f"10.0.{node_of(cluster, rank)}.{rank % cluster.ranks_per_node + 1}"


def _ethernet(rank: int) -> str:
    """The address of a rank's devices, in the range that is free for everyone's use."""
    return f"02:00:00:00:00:{rank:02x}"


def _pace_sends(cluster: Cluster, rank: int) -> None:
    """Let each message of this process wait for the latency of its cable before it is sent."""
    alphas = [
        cluster.inside_alpha_seconds
        if node_of(cluster, other) == node_of(cluster, rank)
        else cluster.across_alpha_seconds
        for other in range(cluster.world_size)
    ]
    if not any(alphas):
        return
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from dtlib.lab.messages import stand_ins

    def wait(name: str, tensor: Any, peer: int | None, group: Any, call: Callable[[], Any]) -> Any:
        if name == "send" and peer is not None:
            time.sleep(alphas[peer])
        return call()

    for name, function in stand_ins(wait).items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)


def _command(name: str, path: str) -> str:
    found = shutil.which(name, path=f"{path}:/usr/sbin:/sbin")
    if found is None:
        raise ClusterRefused(f"a cluster needs the command {name} (package iproute2), which is not installed")
    return found


def _batch(command: str, lines: Sequence[str], descriptors: Sequence[int] = ()) -> None:
    """Have `ip` or `tc` carry out `lines`, in this process's network namespace."""
    done = subprocess.run(
        [command, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, pass_fds=descriptors
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise ClusterRefused(
            f"a cluster needs links that this kernel shapes, and {os.path.basename(command)} says: {said}"
        )
