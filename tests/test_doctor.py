import contextlib
import importlib.metadata
import json
import os
import sys
from typing import ClassVar

import pytest

from dtlib import doctor, theory


@pytest.fixture(scope="module")
def examination():
    return doctor.examine()


def test_this_machine_is_examined(examination):
    names = [finding.name for finding in examination.findings]
    assert len(set(names)) == len(names)
    for name in ("python", "torch", "cores", "memory", "start method", "ranks", "wire", "walls", "GPU", "Chromium"):
        assert examination[name].value
    assert examination.healthy  # the tests run, so the course does
    with pytest.raises(KeyError):
        examination["crystal ball"]


def test_what_is_missing_says_why(examination):
    for finding in examination.findings:
        assert finding.ok or finding.note


def test_findings_are_plain_data(examination):
    data = json.loads(json.dumps(examination.as_dict()))
    assert data["healthy"] is True
    assert {"name", "ok", "value", "note", "required"} == set(data["findings"][0])


@pytest.fixture
def _quick(monkeypatch):
    for name in ("_ranks", "_private_network", "_walls", "_shaped_links", "_gpu", "_chromium"):
        monkeypatch.setattr(doctor, name, list)


def _no_torch(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.usefixtures("_quick")
def test_an_extra_that_is_missing_is_named_and_is_not_the_machines_fault(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", _no_torch)
    found = doctor.examine()
    assert found.healthy
    assert [finding.name for finding in found.findings] == ["python", "theory", "extra lab"]
    assert found["theory"].value.startswith(f"{len(theory.formulas())} formulas on numpy ")
    assert found["extra lab"].note.endswith(
        "without cloudpickle, jinja2, markdown-it-py, matplotlib, platformdirs, torch"
    )
    assert found.verdict.startswith("What is installed works.")
    assert "install the extra lab" in found.verdict
    assert found.verdict.endswith(doctor.install())


@pytest.mark.usefixtures("_quick")
def test_a_theory_that_is_broken_is_the_machines_fault(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", _no_torch)
    monkeypatch.setattr(theory.collectives, "ring_all_reduce_bytes", lambda full_bytes, n: 0.0)
    found = doctor.examine()
    assert not found.healthy
    assert found.verdict == "The course does not run here: see the lines with ✗."


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///x", "dir_info": {"editable": True}}, "pip install '.[lab]' in the folder of the course"),
        ({"url": "file:///x.whl", "archive_info": {}}, "pip install 'dtlib-course[lab] @ file:///x.whl'"),
        ({"url": "https://h/r", "vcs_info": {"vcs": "git"}}, "pip install 'dtlib-course[lab] @ git+https://h/r'"),
        (None, "pip install 'dtlib-course[lab]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_rest_came(tmp_path, monkeypatch, origin, command):
    class Installed:
        def read_text(self, name):
            return json.dumps(origin) if origin and name == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert doctor.install() == "pip install '.[lab]' in the folder of the course", "the tests run in the folder"
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "dtlib" / "doctor.py"))
    assert doctor.install() == command


@pytest.mark.usefixtures("_quick")
def test_windows_reads_and_computes_and_starts_no_ranks(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    found = doctor.examine()
    assert [(each.name, each.ok) for each in found.findings] == [("python", True), ("theory", True), ("ranks", False)]
    assert found.healthy
    assert found.verdict.endswith("ranks do not.")


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("version", "ok"), [("2.10.1", False), ("2.11.0+cu128", True), ("3.0.0", True)])
def test_old_torch_is_named(monkeypatch, version, ok):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = doctor.examine()["torch"]
    assert found.ok is ok
    assert found.ok or "2.11" in found.note


@pytest.mark.usefixtures("_quick")
def test_a_probe_that_breaks_is_a_finding(monkeypatch):
    def broken():
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_gpu", broken)
    monkeypatch.setattr(doctor, "_ranks", broken)
    found = doctor.examine()
    assert found["GPU"].note == "OSError: no such thing"
    assert not found["GPU"].required
    assert not found.healthy  # without ranks there is no course


@pytest.mark.usefixtures("_quick")
def test_spawn_is_told(monkeypatch):
    monkeypatch.setenv("DTLIB_START_METHOD", "spawn")
    found = doctor.examine()
    assert not found["start method"].ok
    assert found["start method"].value == "spawn"
    assert found.healthy


def test_ranks_that_fail_are_a_finding(monkeypatch):
    def all_reduce(full_bytes):
        raise ValueError("wires cut")

    monkeypatch.setattr(doctor, "_all_reduce", all_reduce)
    (finding,) = doctor._ranks()
    assert not finding.ok
    assert finding.required
    assert "wires cut" in finding.note


def test_bytes_that_are_off_are_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "_all_reduce", lambda full_bytes: (3 * full_bytes, "guessing"))
    ranks, wire = doctor._ranks()
    assert ranks.ok
    assert not wire.ok
    assert "1.5000 of theory" in wire.value


def test_links_that_were_shaped_say_at_what_rate_and_how_they_are_delayed(lacking):
    links, *latency = doctor._shaped_links()
    if not links.ok:
        lacking(links.note)
    assert links.value.startswith("yes; one of 20 MB/s carried ")
    assert [(found.name, found.ok) for found in latency] == [("link latency", True)]
    assert latency[0].value.startswith("by ")


def test_tc_that_fails_is_quoted(tmp_path, monkeypatch, lacking):
    if doctor._refused_network():
        lacking("this machine refuses network namespaces")
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho 'no tbf in this kernel' >&2; exit 2\n")
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = doctor._shaped_links()
    assert not finding.ok
    assert "tc says: no tbf in this kernel" in finding.note


def test_probes_leave_no_namespace_behind():
    before = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else None
    doctor._private_network()
    after = os.stat("/proc/self/ns/net").st_ino if before else None
    assert before == after


def test_walls_that_do_not_stand_are_named(monkeypatch):
    from dtlib.grading.sandbox import runner as sandbox

    class Hut(contextlib.nullcontext):
        walls: ClassVar = {"processes": "", "network": "unshare: Operation not permitted", "limits": ""}

        def __enter__(self):
            return self

    monkeypatch.setattr(sandbox, "Sandbox", Hut)
    (found,) = doctor._walls()
    assert (found.name, found.ok, found.value, found.required) == ("walls", False, "processes, limits", False)
    assert "missing: network (unshare: Operation not permitted)" in found.note
    Hut.walls = dict.fromkeys(Hut.walls, "")
    (found,) = doctor._walls()
    assert (found.ok, found.value, found.note) == (True, "processes, network, limits", "")
