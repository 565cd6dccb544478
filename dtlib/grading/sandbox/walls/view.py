"""What an inmate sees of the disk: the system and the libraries to read, and a home that goes with it."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from . import kernel

HOME = "/learner"
TEMPORARY = f"{HOME}/.tmp"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PACKAGE = Path(__file__).resolve().parents[3]
_PASSWD = f"learner:x:{{user}}:{{user}}::{HOME}:/bin/false\n"
_SWITCHES = ("sys", "sysrq-trigger", "irq", "bus", "fs")  # parts of /proc through which a machine is configured


def hidden_paths(more: Iterable[Path] = ()) -> list[Path]:
    """What nobody may see even where a folder around it is in sight: checks, banks, solutions, tests, and `more`."""
    project = _PACKAGE.parent
    names = ("solutions", "tests", "exercises", "chapters", "benchmarks", ".git", "_build")
    found = [*_PACKAGE.glob("grading/exercises/[!_]*/"), *(project / name for name in names)]
    return [path for path in (*found, *(Path(each).resolve() for each in more)) if path.is_dir()]


def see_own_processes() -> None:
    """Have /proc show the processes of this process namespace, in a mount namespace of its own. Raises ``OSError``."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def enter_view(hidden: Iterable[Path], users: Iterable[int], *, own_processes: bool) -> None:
    """Make a new root of read-only views for this process and those that it will start. Raises ``OSError``.

    What is `hidden` shows as empty folders; `users` get a name, since some libraries ask for it.
    The process must have a mount namespace of its own; with `own_processes` it is the first process of its namespace.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in _visible()}  # opened before anything is covered
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    root = tempfile.gettempdir()  # any folder does: the new root covers it in this namespace alone
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
    for path, fd in sources.items():
        _bind(fd, root + path)
        kernel.make_read_only(root + path)
    for link, target in links.items():
        os.symlink(target, root + link)
    for folder in (f"{root}/proc", f"{root}/dev/shm", f"{root}/tmp", root + HOME):
        os.makedirs(folder, exist_ok=True)
    if own_processes:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", f"{root}/proc", "proc", flags, "hidepid=2")
    else:
        kernel.mount("/proc", f"{root}/proc", flags=kernel.MS_BIND | kernel.MS_REC)
    for switch in (f"{root}/proc/{name}" for name in _SWITCHES if os.path.exists(f"{root}/proc/{name}")):
        kernel.mount(switch, switch, flags=kernel.MS_BIND)
        kernel.make_read_only(switch)
    for name, fd in devices.items():
        _bind(fd, f"{root}/dev/{name}")
        kernel.make_read_only(f"{root}/dev/{name}")  # what is written to a device goes there; its times are the disk's
    os.makedirs(f"{root}/etc", exist_ok=True)
    Path(f"{root}/etc/passwd").write_text("".join(_PASSWD.format(user=user) for user in users))
    for fd in (*sources.values(), *devices.values()):
        os.close(fd)
    for folder in map(str, hidden):
        if os.path.isdir(root + folder):
            kernel.mount("tmpfs", root + folder, "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID, "mode=555,size=4k")
    kernel.mount("none", root, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    kernel.pivot_root(root)


def make_scratch(size_bytes: int) -> None:
    """Give this process an empty home, /tmp and /dev/shm of its own, of `size_bytes` together. Raises ``OSError``.

    What the view shows below /tmp, a course that was put there for example, stays in sight.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", HOME, "tmpfs", flags, f"mode=1777,size={size_bytes},nr_inodes=4096")
    for folder, target in ((TEMPORARY, "/tmp"), (f"{HOME}/.shm", "/dev/shm")):
        os.mkdir(folder)
        os.chmod(folder, 0o1777)
        in_sight = {name: os.open(f"{target}/{name}", os.O_PATH) for name in os.listdir(target)}
        kernel.mount(folder, target, flags=kernel.MS_BIND)
        for name, fd in in_sight.items():  # what the mount has covered; it stays as read-only as it was
            _bind(fd, f"{target}/{name}")
            os.close(fd)


def _visible() -> list[str]:
    """The folders and files to show: no two of them one inside the other, and no link."""
    prefixes = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    libraries = {os.path.realpath(path) for path in sys.path if path and "-packages" in path and os.path.isdir(path)}
    system = {path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)}
    wanted = {*prefixes, *libraries, *system, *(path for path in _FILES if os.path.exists(path)), str(_PACKAGE)}
    wanted |= {path for path in (sys.prefix, sys.base_prefix) if not os.path.islink(path)}
    return sorted(path for path in wanted if not any(path.startswith(other + "/") for other in wanted))


def _bind(fd: int, target: str) -> None:
    """Show what `fd` stands for at `target`, and what is mounted below it."""
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(f"/proc/self/fd/{fd}", target, flags=kernel.MS_BIND | kernel.MS_REC)
