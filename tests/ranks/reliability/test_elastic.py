"""A run that is killed in the middle of a step goes on from what was saved, with the losses of one that nobody stopped:
under torchrun, which starts all ranks again, and under `lab.run`; with other ranks but for the order of sums."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

from dtlib import lab

from .runs import Run, trained

STEPS = 6
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64, and sums in another order; AdamW divides by small gradients
TWO = ["dp", "zero 1", "zero 2", "zero 3", "fsdp2", "dp 2 zero 1", "pp 2 zero 0"]
FOUR = ["dp", "zero 1", "zero 3", "fsdp2", "dp 2, pp 2 zero 1", "dp 2, tp 2 zero 3", "pp 2, tp 2 zero 0"]
PLAIN = ["dp", "zero 1", "zero 2", "zero 3", "fsdp2"]
SOME = ["dp", "zero 3", "dp 2 zero 1"]  # `make soak` takes all of `TWO`


@functools.cache
def straight(n, *kinds):
    """The curves of runs that nobody stops: each kind has its own, whichever run beside it."""
    return lab.run(trained, n, args=(kinds, STEPS))[0]


def torchrun(folder, n, kinds, kills, dropout=0.0, restarts=None):
    """The process that has run, and of each rank the life in which it ended and its curves."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command += ["--max-restarts", str(len(kills) if restarts is None else restarts), "-m", "ranks.reliability.elastic"]
    command += [str(folder), str(STEPS), str(dropout), json.dumps(kills), *kinds]
    environment = dict(os.environ, TMPDIR=str(folder))  # torchrun leaves a folder of logs
    tests = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=250)
    return done, [json.loads(each.read_text()) for each in sorted(folder.glob("curves of *"))]


def places(seed, n, lives):
    """Where a run of `n` ranks is killed in each of these lives: later in each, so that it gets somewhere."""
    rng = random.Random(seed)
    return [[rng.randrange(n), 2 + 2 * life, rng.random()] for life in range(lives)]


def killed_under_torchrun(folder, n, kinds, kills, dropout):
    done, found = torchrun(folder, n, kinds, kills, dropout)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exitcode: -9") >= len(kills)
    assert found == [[str(len(kills)), lab.run(trained, n, args=(kinds, STEPS, None, dropout))[0]]] * n
    return found[0][1]


def test_torchrun_starts_again_and_the_losses_are_the_same_to_the_bit(tmp_path):
    curves = killed_under_torchrun(tmp_path, 2, SOME, places(1, 2, 1), dropout=0.2)
    assert curves["dp"] != curves["dp 2 zero 1"]  # it casts dice, which the mesh does not
    assert all(len(set(curve)) == len(curve) == STEPS for curve in curves.values())


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "kinds"), [(2, TWO), (4, FOUR), (3, PLAIN)])
def test_torchrun_starts_again_wherever_it_is_killed(n, kinds, seed, tmp_path):
    killed_under_torchrun(tmp_path, n, kinds, places(seed, n, 2), dropout=0.2 * (seed % 2))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (4, 2), (3, 4)])
def test_torchrun_goes_on_with_other_ranks(before, after, tmp_path):
    (kill,) = places(before, before, 1)
    done, found = torchrun(tmp_path, before, PLAIN, [kill], restarts=0)
    assert done.returncode != 0
    assert not found
    done, found = torchrun(tmp_path, after, PLAIN, [])
    assert done.returncode == 0, done.stderr
    for _, curves in found:
        for kind in PLAIN:
            assert_close(curves[kind], straight(1, "dp")["dp"], **CLOSE, msg=kind)


def resumed(folder, n, kinds, forget=lambda run: None):
    """The curves that `n` ranks come to from what is in `folder`, which stays; `forget` undoes a part of that."""

    def job():
        resume = Run.resume

        def and_forget(run, folder):
            resume(run, folder)
            forget(run)

        Run.resume = and_forget
        return trained(kinds, STEPS, folder, saves=False)

    return lab.run(job, n)[0]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Four ranks, one of which is killed when it begins a step."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(lab.RankError, match=r"rank 2 of 4 was killed by signal 9 \(SIGKILL\) at step 3") as caught:
        lab.run(trained, 4, args=(FOUR, STEPS, folder), faults=[lab.kill(rank=2, step=3)])
    assert caught.value.step == 3
    return folder


def test_a_run_of_lab_goes_on_too_also_on_meshes(killed):
    assert resumed(killed, 4, FOUR) == straight(4, *FOUR)


@pytest.mark.parametrize(("n", "kinds"), [(3, ["dp", "zero 3", "fsdp2"]), (2, ["zero 1", "dp", "tp 2 zero 0"])])
def test_a_run_of_lab_goes_on_with_fewer_ranks_and_a_mesh_as_another(killed, n, kinds, tmp_path):
    for kind in kinds:
        (tmp_path / kind).symlink_to(killed / {"tp 2 zero 0": "dp 2, pp 2 zero 1"}.get(kind, kind))
    curves = resumed(tmp_path, n, kinds)
    for kind in kinds:
        assert_close(curves[kind], straight(1, "dp")["dp"], **CLOSE)


def without_sampler(run):
    """The samples begin anew."""
    run.sampler.position = 0


def without_moments(run):
    for optimizer in run.optimizers:
        optimizer.state.clear()


@pytest.mark.parametrize("forget", [without_sampler, without_moments])
def test_what_forgets_a_part_is_another_run(killed, forget):
    kinds = ["dp", "dp 2, pp 2 zero 1"]
    curves, wanted = resumed(killed, 4, kinds, forget), straight(4, *FOUR)
    for kind in kinds:
        assert curves[kind][:3] == wanted[kind][:3]
        assert abs(curves[kind][-1] - wanted[kind][-1]) > 1e-4
