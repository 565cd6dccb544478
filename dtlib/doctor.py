"""What this machine can measure: each fact is probed by doing the thing, not by guessing from versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtlib.theory import units

# The other rooms are imported by the probes: what they need may be what this machine lacks.

EXTRA = "extra lab"
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 11)
_CHILD_SECONDS = 20.0


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    `ok` tells whether the thing works, `value` what was found, `note` why not and what then happens instead.
    Without a thing that is `required` the course does not run; without another one it measures less.
    """

    name: str
    ok: bool
    value: str
    note: str = ""
    required: bool = False


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which a reader wants them."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """True if nothing that the course requires is missing."""
        return all(finding.ok for finding in self.findings if finding.required)

    @property
    def verdict(self) -> str:
        """In a sentence, whether what is installed works here, and what to install for the rest."""
        if not self.healthy:
            return "The course does not run here: see the lines with ✗."
        if any(finding.name == EXTRA for finding in self.findings):
            return f"What is installed works. For the rest, install the {EXTRA}, and ask again: {install()}"
        if not all(finding.ok for finding in self.findings if finding.name == "ranks"):
            return "What is installed works, and so does reading the built book; ranks do not."
        return "The course runs on this machine."

    def __getitem__(self, name: str) -> Finding:
        """The finding called `name`; ``KeyError`` where there is none."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """The examination as plain data for JSON: ``healthy`` and the list of ``findings``."""
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}


def examine() -> Examination:
    """Probe this machine: a few seconds, most of them to import torch. Nothing it probes can make it raise.

    Where packages of the extra ``lab`` are missing, as after a plain ``pip install .``, and on Windows, it tries what
    works without them.
    """
    probes: list[tuple[str, Callable[[], list[Finding]], bool]] = [
        ("python", _python, True),
        ("theory", _theory, True),
    ]
    untried = _untried()
    if not untried:
        probes += [
            ("torch", _torch, True),
            ("machine", _machine, False),
            ("start method", _start_method, False),
            ("ranks", _ranks, True),
            ("private network", _private_network, False),
            ("walls", _walls, False),
            ("TCP counts", _tcp_counts, False),
            ("shaped links", _shaped_links, False),
            ("GPU", _gpu, False),
            ("Chromium", _chromium, False),
        ]
    findings: list[Finding] = []
    for name, probe, required in probes:
        try:
            findings += probe()
        except Exception as error:  # a probe that breaks is a finding, not the end of the examination
            findings.append(Finding(name, False, "unknown", f"{type(error).__name__}: {error}", required))
    return Examination((*findings, *untried))


def _untried() -> list[Finding]:
    """Why ranks and lab are not tried here; nothing where they can be."""
    if sys.platform == "win32":
        return [
            Finding("ranks", False, "not on Windows", "they need Linux (WSL is one), or macOS, where it is untested")
        ]
    if missing := _missing_packages():
        note = f"ranks, lab, exercises and the book need it; without {', '.join(missing)}"
        return [Finding(EXTRA, False, "not installed", note)]
    return []


def install() -> str:
    """The command that adds the extra ``lab``, from where this course was installed."""
    in_its_folder = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    told = None if in_its_folder else importlib.metadata.distribution("dtlib-course").read_text("direct_url.json")
    origin = json.loads(told or "{}")
    if in_its_folder or "dir_info" in origin:
        return "pip install '.[lab]' in the folder of the course"
    scheme = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f"pip install 'dtlib-course[lab]{f' @ {scheme}' + origin['url'] if origin else ''}'"


def _missing_packages() -> list[str]:
    """The packages that the extras ``ranks`` and ``lab`` ask for and that are not installed."""
    try:
        asked = importlib.metadata.requires("dtlib-course") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder: the other probes tell
        return []
    names = [re.split(r"[^\w-]", each)[0] for each in asked if re.search(r"""extra == ['"](ranks|lab)['"]""", each)]
    missing = []
    for name in sorted({*names} - {"dtlib-course"}):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def _python() -> list[Finding]:
    ok = sys.version_info[:2] >= MIN_PYTHON
    note = "" if ok else f"the course needs Python {'.'.join(map(str, MIN_PYTHON))} or later"
    return [Finding("python", ok, platform.python_version(), note, required=True)]


def _theory() -> list[Finding]:
    """Evaluate a formula."""
    import numpy as np

    from dtlib import theory

    if theory.collectives.ring_all_reduce_bytes(8.0, 4) != 12.0:
        return [Finding("theory", False, "wrong", "a ring of 4 ranks sends 12 bytes of 8", required=True)]
    told = f"{len(theory.formulas())} formulas on numpy {np.__version__}; dtlib memory, plan, explain"
    return [Finding("theory", True, told, required=True)]


def _torch() -> list[Finding]:
    version = importlib.metadata.version("torch")
    ok = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= MIN_TORCH
    note = "" if ok else f"the course needs torch {'.'.join(map(str, MIN_TORCH))} or later"
    return [Finding("torch", ok, version, note, required=True)]


def _machine() -> list[Finding]:
    from dtlib.lab import here

    few = "" if here.cores() > 1 else "ranks take turns on one core: overlap cannot show in the clock"
    return [
        Finding("cores", here.cores() > 1, f"{here.cores()} ({platform.system()} {platform.machine()})", few),
        Finding("memory", True, units.format_bytes(_memory_bytes(), digits=3)),
    ]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _start_method() -> list[Finding]:
    from dtlib.processes.starter import start_method

    fork = start_method() == "fork"
    note = (
        ""
        if fork
        else "forking a process that has loaded torch is unsafe here: each run takes seconds, untested outside Linux"
    )
    return [Finding("start method", fork, "fork server" if fork else "spawn", note)]


def _ranks() -> list[Finding]:
    """Do what every chapter does: an all-reduce on two ranks, its bytes counted."""
    from dtlib.lab.launch import run

    full_bytes = 2**20
    start = time.perf_counter()
    try:
        run(_all_reduce, 2, args=(full_bytes,), timeout_s=120)
        cold = time.perf_counter() - start
        start = time.perf_counter()
        total_bytes, method = run(_all_reduce, 2, args=(full_bytes,), timeout_s=120)[0]
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return [Finding("ranks", False, "two ranks could not all-reduce", reason, required=True)]
    warm = time.perf_counter() - start
    cold_words, warm_words = (units.format_seconds(seconds, digits=2) for seconds in (cold, warm))
    ratio = total_bytes / (2 * full_bytes)
    return [
        Finding("ranks", True, f"first run of two ranks {cold_words}, next {warm_words}", required=True),
        Finding(
            "wire",
            abs(ratio - 1) < 0.01,
            f"{method}; a 1 MiB all-reduce reads {ratio:.4f} of theory",
            "" if abs(ratio - 1) < 0.01 else "byte counts on this machine do not see collectives as they are",
        ),
    ]


def _all_reduce(full_bytes: int) -> tuple[int, str]:
    import torch
    import torch.distributed as dist

    from dtlib.lab.wire import wire

    tensor = torch.ones(full_bytes // 4)
    with wire() as counted:
        dist.all_reduce(tensor)
    return counted.total_bytes, counted.method


def _private_network() -> list[Finding]:
    refused = _refused_network()
    note = f"{refused}; ranks stay on the machine's own network" if refused else ""
    return [Finding("private network", not refused, "no" if refused else "yes", note)]


def _walls() -> list[Finding]:
    """Put up the walls that `dtlib grade` runs submissions behind, and tell which stand."""
    from .grading.sandbox.runner import Sandbox

    with Sandbox() as sandbox:
        walls = dict(sandbox.walls)
    missing = [f"{name} ({why})" for name, why in walls.items() if why]
    standing = ", ".join(name for name, why in walls.items() if not why) or "none"
    note = f"missing: {'; '.join(missing)}. dtlib grade goes on without; grade strangers elsewhere" if missing else ""
    return [Finding("walls", not missing, standing, note)]


def _tcp_counts() -> list[Finding]:
    from dtlib.lab.wire.counted import kernel_counts_connections

    counts = kernel_counts_connections()
    note = "" if counts else f"no TCP_INFO with byte counts on {sys.platform}: send calls are counted instead"
    return [Finding("TCP counts", counts, "per connection" if counts else "no", note)]


def _shaped_links() -> list[Finding]:
    """Join two nodes by a slow link, and time a message on it."""
    from dtlib.lab.cluster import cluster
    from dtlib.lab.launch import run

    rate = 20 * units.MB
    try:
        carried, latency_by = run(_send_slowly, cluster=cluster(2, 1, inside=rate, across=rate))[1]
    except RuntimeError as error:
        return [Finding("shaped links", False, "no", f"{str(error).splitlines()[0]}; lab.cluster is refused")]
    seen = f"yes; one of {units.format_rate(rate)} carried {units.format_rate(carried)}"
    return [Finding("shaped links", True, seen), Finding("link latency", True, latency_by)]


def _send_slowly() -> tuple[float, str]:
    """Bytes per second of a message, to whom it comes, and how links are delayed."""
    import torch
    import torch.distributed as dist

    from dtlib.lab.launch import context

    rank, tensor = context.current("doctor"), torch.ones(2**20)
    rank.exchange(b"")
    start = time.perf_counter()
    dist.send(tensor, 1) if rank.rank == 0 else dist.recv(tensor, 0)
    return tensor.nbytes / (time.perf_counter() - start), rank.latency_by or ""


def _gpu() -> list[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    note = "" if count else "every chapter runs on the CPU with gloo"
    return [Finding("GPU", count > 0, names or "none", note)]


def _chromium() -> list[Finding]:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if shutil.which(name):
            return [Finding("Chromium", True, name)]
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as player:
            found = os.path.exists(player.chromium.executable_path)
    except ImportError:
        found = False
    note = "" if found else "the tests that open pages in a browser are skipped"
    return [Finding("Chromium", found, "playwright's own" if found else "none", note)]


# A process of one thread, as a namespace demands. It loads the one file it needs, not torch.
_PROBE = "import runpy, sys; print(runpy.run_path(sys.argv[1])['enter_private_network']())"


def _refused_network() -> str:
    """Enter a private network in a child; "" or why that is refused."""
    from dtlib.processes import namespace

    command = [sys.executable, "-c", _PROBE, namespace.__file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHILD_SECONDS:g} s"
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
