"""Two hundred faults at random on replicas, ZeRO and meshes: each is survived, or ends the run with a name, after which
it goes on from what was saved; none gives a wrong loss, and nothing is left behind. `make soak` runs it.

A watched run looks, before each step, whether weights and moments are as the last one left them, and is given a
deadline. What each fault came to is a line of a table in ``_build/soak``.
"""

from __future__ import annotations

import collections
import os
import random
import re
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from dtlib import lab
from dtlib.lab.launch.faults import of_cables
from dtlib.ranks import reliability
from dtlib.ranks.reliability import Altered, AtRest, Background, NotSaved

from .runs import Run

STEPS, SEEDS, FAULTS, PATIENCE_S, MORE_S = 5, 4, 200, 8, 2
MESHES = {
    2: ["dp", "zero 1", "zero 2", "zero 3", "dp 2 zero 1", "tp 2 zero 0", "pp 2 zero 0"],
    3: ["dp", "zero 2", "zero 3", "dp 3 zero 1"],
    4: ["dp", "zero 3", "dp 2, tp 2 zero 1", "dp 2, pp 2 zero 3", "pp 2, tp 2 zero 0", "dp 2, pp 2 zero 1"],
}
KINDS_OF_FAULTS = ("kill", "stop", "slow", "cut", "flip", "fill", "link")
RECOVERED, RESUMED = "recovered, same loss", "stopped, named; resumed, same loss"


def watched(kind, folder, life, behind, told):
    """A run that saves after each step, waiting or `behind` training, and looks at what it keeps before each."""
    Path(told, f"{life} {dist.get_rank()} {os.getpid()}").touch()
    seed = 0 if reliability.last_saved(folder) is None else life
    run, guard, lost = Run(kind, seed), AtRest(), 0
    run.resume(folder)
    background = Background() if behind else None
    while run.number < STEPS:
        lab.step(run.number, run.tensors())
        guard.look(run.tensors())
        run.step()
        guard.leave(run.tensors())
        try:
            run.save(folder, background=background)
            if background and run.number == STEPS:
                background.wait()
        except NotSaved:
            lost += 1
    return run.losses, lost


def drawn(rng, number):
    """A mesh, and a fault on it."""
    n = rng.choice([2, 3, 4])
    kind = KINDS_OF_FAULTS[number % len(KINDS_OF_FAULTS)]
    n = 4 if kind in ("cut", "link") else n
    place = {"rank": rng.randrange(n), "step": rng.randrange(1, STEPS)}
    return rng.choice(MESHES[n]), n, kind, place, rng.random() < 0.5


def made(rng, kind, place, names):
    if kind == "slow":
        return lab.slow(**place, factor=rng.choice([2, 5]))
    if kind == "link":  # of 1 GB/s
        return lab.slow(**place, factor=rng.choice([5, 1000]), of="link")
    if kind == "fill":
        return lab.fill(**place, room_bytes=rng.choice([0, 100, 1000, 3000]))
    if kind == "flip":
        name, size = rng.choice(names)
        return lab.flip(**place, tensor=name, element=rng.randrange(size), bit=rng.randrange(32))
    return getattr(lab, kind)(**place)


def undisturbed(kind):
    """The losses, and the names and sizes of what this rank keeps after a step: 0 where a step is a number."""
    run = Run(kind)
    run.step()
    names = [(name, each.numel()) for name, each in run.tensors().items()]
    return [*run.losses, *(run.step() for _ in range(1, STEPS))], names


def outcome(kind, n, fault, behind, folder, told, wanted):
    """What the fault came to; an assertion where that has no name, or the losses are not `wanted`."""
    cluster = lab.cluster(2, 2, inside=1e9, across=1e9) if of_cables(fault) else None
    patience, error = PATIENCE_S if isinstance(fault, lab.stop | lab.cut) else 100, None
    options = {"faults": [fault], "cluster": cluster}
    try:
        found = lab.run(watched, n, args=(kind, folder, 0, behind, told), timeout_s=patience, **options)
    except (lab.RankTimeout, lab.RankError) as caught:
        error = caught
    if error is None:
        assert isinstance(fault, lab.slow | lab.fill)  # the others must be noticed
        assert [losses for losses, _ in found] == [wanted] * n
        return RECOVERED, f"{max(lost for _, lost in found)} saves lost"
    took = time.time() - min(each.stat().st_mtime for each in told.iterdir())  # since the first rank began
    assert_names(error, fault, n)
    assert took <= patience + MORE_S * max(1.0, os.getloadavg()[0] / os.cpu_count())  # programs wait for a core, too
    found = lab.run(watched, n, args=(kind, folder, 1, behind, told))
    assert [losses for losses, _ in found] == [wanted] * n
    return RESUMED, f"{type(error).__name__} after {took:.2f} s of {patience}"


def assert_names(error, fault, n):
    """Whether the `error` says which rank it was and when, and in which collective another one waited, or where it was
    when a rank died."""
    if n > 1 and not isinstance(fault, lab.flip):  # which is raised
        where = r"(in [a-z_]+|at .+)" if isinstance(fault, lab.kill) else r"in [a-z_]+"
        assert re.search(rf"anks? [\d, and]+ w(as|ere) {where} at step \d", str(error)), str(error)
    if isinstance(error, lab.RankTimeout):
        assert isinstance(fault, lab.stop | lab.cut)
        assert f"ank {fault.rank} {fault.told}" in str(error)
        return
    assert error.step == fault.step
    if isinstance(fault, lab.kill):
        assert error.rank == fault.rank
        assert "SIGKILL" in str(error)
    else:
        assert isinstance(fault, lab.flip)
        assert Altered.__name__ in str(error)
        assert f"of rank {fault.rank} has changed while nobody used it" in str(error)


def left_behind(folder, told):
    """Processes and unfinished files; the checkpoints that were to stay are no rest."""
    pids = {int(each.name.split()[-1]) for each in told.iterdir()}
    return [pid for pid in pids if psutil.pid_exists(pid)] + [
        str(each) for each in folder.iterdir() if not (each.name.isdigit() and (each / ".metadata").exists())
    ]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_hundred_faults_give_no_wrong_loss_and_leave_nothing(seed, tmp_path, monkeypatch):
    counts = faults_at_random(FAULTS // SEEDS, seed, tmp_path, monkeypatch, table=f"faults {seed}")
    assert counts.total() == FAULTS // SEEDS
    assert {result for _, result in counts} == {RECOVERED, RESUMED}
    for kind in ("kill", "stop", "cut", "flip"):
        assert counts[kind, RECOVERED] == 0, kind


def test_a_few_faults(tmp_path, monkeypatch):
    faults_at_random(4, 1, tmp_path, monkeypatch, without=("stop", "cut"))


def faults_at_random(num, seed, tmp_path, monkeypatch, without=(), table=None):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    rng, curves, names, counts, number = random.Random(seed), {}, {}, collections.Counter(), -1
    while counts.total() < num:
        number += 1
        kind, n, what, place, behind = drawn(rng, number)
        if what in without:
            continue
        if (kind, n) not in curves:
            everyone = lab.run(undisturbed, n, args=(kind,))
            curves[kind, n], names[kind, n] = everyone[0][0], [names for _, names in everyone]
        fault = made(rng, what, place, names[kind, n][place["rank"]])
        folder, told = tmp_path / f"{number}", tmp_path / f"told of {number}"
        folder.mkdir(), told.mkdir()
        line = [number, kind, n, repr(fault), "behind" if behind else "waiting"]
        result, more = outcome(kind, n, fault, behind, folder, told, curves[kind, n])
        assert not left_behind(folder, told), line
        assert not list((tmp_path / "temporary").iterdir()), line
        counts[what, result] += 1
        if table:
            note(table, *line, result, more)
    return counts


def note(table, *cells):
    folder = Path(__file__).parents[3] / "_build" / "soak" / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{table}.md").open("a", encoding="utf-8") as file:
        file.write(f"| {' | '.join(map(str, cells))} |\n")
