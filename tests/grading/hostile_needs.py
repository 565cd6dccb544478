"""What some control runs of the bank need of a machine: without it they would say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

from .answers import ROOT


def _git() -> str:
    asked = ["git", "-C", str(ROOT), "cat-file", "-e", "HEAD:solutions/collectives.ipynb"]
    with contextlib.suppress(OSError):
        if subprocess.run(asked, capture_output=True).returncode == 0:
            return ""
    return "the project has no history here"


def _route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        try:
            caller.connect(("192.0.2.1", 53))
        except OSError:
            return "this machine has no route to anywhere"
    return ""


def _owner() -> str:
    return "" if os.access(Path(__file__), os.W_OK) else "the project is read-only for whom runs the tests"


def _root() -> str:
    return "" if os.geteuid() == 0 else "the naive grader would have to run as root"


def _unshare() -> str:
    with contextlib.suppress(OSError):
        if subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode == 0:
            return ""
    return "this machine grants no user namespaces"


# What a control run needs of the machine: "" where it is there, else why the run says nothing here.
NEEDS = {"git": _git, "owner": _owner, "route": _route, "root": _root, "unshare": _unshare, "doors": _root}
