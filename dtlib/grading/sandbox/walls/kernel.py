"""The system calls that the standard library lacks (Linux): namespaces, mounts, capabilities, and what to forbid."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` name for new ones. Raises ``OSError``, as all functions here do."""
    _check(_libc.unshare(flags))


def enter(namespace_fd: int) -> None:
    """Enter the namespace that `namespace_fd` stands for (setns)."""
    _check(_libc.setns(namespace_fd, 0))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None), target
    )


def make_read_only(target: str) -> None:
    """Make the mount at `target`, and all below it, read-only, without set-user-id programs."""
    attributes = struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, len(attributes))
    if result == 0:
        return
    kept = os.statvfs(target).f_flag & (MS_NODEV | MS_NOEXEC)  # what the mount forbids must stay forbidden
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def pivot_root(new_root: str) -> None:
    """Make the mount point `new_root` the root of this mount namespace and let go of the old one."""
    os.chdir(new_root)
    _check(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."))
    _check(_libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def stay_visible() -> None:
    """Keep /proc/self readable for this process after it has changed its user."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def empty_bounding_set() -> None:
    """Have no program that this process starts get a capability that the process itself lacks."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # beyond the last one that this kernel knows, or not allowed to: then there is none to drop


def drop_capabilities() -> None:
    """Give up every capability for good."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)))
    gain_nothing()


def gain_nothing() -> None:
    """No program that this process starts ever has more rights than the process itself."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


# What no answer to an exercise needs, by the number that each machine gives it: ways around a namespace, into another
# process, to other ranks around the network (names, locks, watches, addresses and options of sockets, what lies in the
# cache of files), into memory that nobody counts, and into parts of the kernel that few look after.
_NEW = {  # these have one number everywhere
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "pidfd_getfd": 438,
    "mount_setattr": 442, "memfd_secret": 447, "cachestat": 451, "futex_wake": 454, "futex_requeue": 456,
    "setxattrat": 463,
}  # fmt: skip
_FORBIDDEN = {
    "x86_64": {
        "mincore": 27, "shmget": 29, "socket": 41, "connect": 42, "accept": 43, "shutdown": 48, "bind": 49,
        "listen": 50, "socketpair": 53, "setsockopt": 54, "vfork": 58, "semget": 64, "msgget": 68, "flock": 73,
        "ptrace": 101, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "setxattr": 188,
        "lsetxattr": 189, "fsetxattr": 190, "fadvise64": 221, "mq_open": 240, "add_key": 248, "request_key": 249,
        "keyctl": 250, "inotify_init": 253, "unshare": 272, "vmsplice": 278, "accept4": 288, "inotify_init1": 294,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
        "preadv2": 327, **_NEW,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "inotify_init1": 26, "flock": 32, "umount2": 39, "mount": 40,
        "pivot_root": 41, "chroot": 51, "vmsplice": 75, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186,
        "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202,
        "connect": 203, "setsockopt": 208, "shutdown": 210, "add_key": 217, "accept4": 242, "request_key": 218,
        "keyctl": 219, "fadvise64": 223, "mincore": 232, "perf_event_open": 241, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "preadv2": 286, **_NEW,
    },
}  # fmt: skip
_CLONE, _FCNTL = {"x86_64": 56, "aarch64": 220}, {"x86_64": 72, "aarch64": 25}
_FUTEX, _MMAP = {"x86_64": 202, "aarch64": 98}, {"x86_64": 9, "aarch64": 222}
_CLONE_VFORK, _MAP_SHARED = 0x4000, 1  # a parent that waits as if for a disk; pages that stay when nobody maps them
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_FORBIDDEN_FCNTL = (6, 7, 37, 38, 1024, 1026, 1031)  # locks of three kinds, leases, watches, larger pipes
_FORBIDDEN_FUTEX = (1, 3, 4, 5, 10, 12)  # waking others, unless it says that they are of the same process
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050000 | 38, 0x80000000
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_CLONE3 = 435
_X32 = 0x40000000


def forbid_syscalls() -> None:
    """Have the kernel refuse (EPERM) the calls of the list above, memory that is mapped shared and new user namespaces,
    in all threads for good.

    Connections that are open stay: a process group must be ready before. Raises ``OSError`` where the kernel has no
    such filter, or for a machine that is not in the list.
    """
    machine = platform.machine()
    if machine not in _FORBIDDEN:
        raise OSError(f"no list of system calls for {machine}")
    load, equal, at_least, bits, done = 0x20, 0x15, 0x35, 0x45, 0x06
    number, arch, argument, second_argument, fourth_argument = 0, 4, 16, 24, 40
    program = [(load, 0, 0, arch), (equal, 1, 0, _AUDIT_ARCH[machine]), (done, 0, 0, _KILL), (load, 0, 0, number)]
    program += [(at_least, 0, 1, _X32), (done, 0, 0, _KILL)]
    for forbidden in _FORBIDDEN[machine].values():
        program += [(equal, 0, 1, forbidden), (done, 0, 0, _REFUSE)]
    program += [(equal, 0, 1, _CLONE3), (done, 0, 0, _ABSENT)]  # its flags lie in memory; glibc then takes clone
    for call, at, flags in (
        (_CLONE[machine], argument, CLONE_NEWUSER | _CLONE_VFORK),
        (_MMAP[machine], fourth_argument, _MAP_SHARED),
    ):
        program += [(equal, 0, 3, call), (load, 0, 0, at), (bits, 0, 1, flags)]
        program += [(done, 0, 0, _REFUSE), (load, 0, 0, number)]
    for call, commands in ((_FCNTL[machine], _FORBIDDEN_FCNTL), (_FUTEX[machine], _FORBIDDEN_FUTEX)):
        most = len(commands)
        program += [(equal, 0, most + 3, call), (load, 0, 0, second_argument)]
        program += [(equal, most - index, 0, command) for index, command in enumerate(commands)]
        program += [(done, 0, 0, _ALLOW), (done, 0, 0, _REFUSE)]
    program += [(done, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    gain_nothing()
    _check(_libc.syscall(_SECCOMP[machine], _SET_MODE_FILTER, _ALL_THREADS, header))


def _check(result: int, what: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what or None)
