"""A private network for the ranks of one run, and what keeps their processes together (Linux).

The network is a namespace that holds nothing but a loopback device.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41
_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",  # its neighbour discovery would be counted as traffic
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/tcp_orphan_retries": "1",  # a connection that outlives both its processes keeps the namespace, for minutes
}


def enter_private_network() -> str:
    """Move this process into a network namespace of its own, loopback up; "" on success, else why it is refused.

    The process must have one thread.
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, and this is {sys.platform}"
    try:
        enter_namespaces(CLONE_NEWNET)
        raise_loopback()
    except OSError as error:
        return refusal(error)
    return ""


def refusal(error: OSError) -> str:
    """In words, that the kernel refused a network namespace."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"the kernel refused a private network namespace ({name}: {error.strerror})"


def enter_namespaces(flags: int, *, as_root: bool = False) -> None:
    """Leave the namespaces that `flags` name for new ones. Raises ``OSError`` where the kernel refuses.

    The process must have one thread. Root needs no user namespace; anyone else gets one in which the own user id
    stays what it was, or is root's with `as_root`: then programs that are started in it may set up its network.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        _unshare(flags)
    except PermissionError:
        _unshare(CLONE_NEWUSER | flags)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{0 if as_root else uid} {uid} 1")
        _write("/proc/self/gid_map", f"{0 if as_root else gid} {gid} 1")


def new_network(*, as_root: bool = False) -> int:
    """Enter a network namespace of its own, loopback up, without IPv6 where that can be said: a descriptor of it.

    It is there as long as a process is in it or has the descriptor open. Raises ``OSError`` where the kernel refuses.
    """
    enter_namespaces(CLONE_NEWNET, as_root=as_root)
    raise_loopback()
    for setting, value in _SETTINGS.items():
        with contextlib.suppress(OSError):
            _write(f"/proc/sys/net/{setting}", value)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(namespace_fd: int) -> None:
    """Move this process into the network namespace of a descriptor. Raises ``OSError`` where the kernel refuses."""
    _checked(ctypes.CDLL(None, use_errno=True).setns(namespace_fd, CLONE_NEWNET))


def raise_loopback() -> None:
    """Bring the loopback device of this process's network namespace up. Raises ``OSError``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere nothing happens)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be found (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def family(pid: int) -> list[int]:
    """A process, and all that descend from it and still live."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{each}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
    return found


def _unshare(flags: int) -> None:
    _checked(ctypes.CDLL(None, use_errno=True).unshare(flags))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
