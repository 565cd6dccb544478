"""A kill at any moment of a save leaves a whole checkpoint; what was damaged since is named and not loaded."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtlib import lab
from dtlib.ranks import zero
from dtlib.ranks.reliability import Background

OLD, NEW, NEXT = 1.0, 2.0, 3.0
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


def wrap():
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    return zero.Zero(nn.Linear(4, 3, bias=False), make_optimizer, stage=2)


def filled(value):
    """A model whose weights and momenta all are `value`."""
    wrapped = wrap()
    for shard in wrapped.shards:
        shard.chunk.fill_(value)
        for weight in shard.weights.values():
            wrapped.optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, value)
    wrapped.publish()
    return wrapped


def values(wrapped):
    """All weights and momenta that there are, each once."""
    kept = [each["momentum_buffer"] for each in wrapped.optimizer.state.values()]
    everything = torch.cat([each.detach().flatten() for each in (*wrapped.state_dict().values(), *kept)])
    return everything.unique().tolist()


def saved(folder, *numbers, keep=9):
    def job():
        for number in numbers:
            zero.save(filled(number), folder, extra=number, keep=keep)

    lab.run(job, 2)


def save_and_die(folder, behind, victim=None, place=None):
    """The second save, `behind` training or not; rank `victim` is killed before its `place`-th change of the disk."""
    seen, counter = [], itertools.count(1)

    def step(event, what):
        seen.append((event, what))
        if next(counter) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(event, args):
        if event == "open" and isinstance(args[1], str) and "w" in args[1] and str(args[0]).startswith(str(folder)):
            step("open", Path(args[0]).name)
        elif event in CHANGES and isinstance(args[0], str | Path):
            step(event, Path(args[0]).name)

    from dtlib.ranks.shared import planners

    wrapped, look_up = filled(NEW), planners.Save.lookup_object
    if victim is None or dist.get_rank() == victim:
        sys.addaudithook(on_event)
        planners.Save.lookup_object = lambda self, index: step("write", index.fqn) or look_up(self, index)
    with Background() if behind else contextlib.nullcontext() as background:
        zero.save(wrapped, folder, extra=NEW, background=background)
        for shard in wrapped.shards if behind else ():
            shard.chunk.fill_(NEXT)  # what is trained meanwhile is not in it
    return seen


def after_the_kill(folders):
    """Of each folder: what is loaded, and what stands there after the next save."""
    found = []
    for folder in folders:
        wrapped = filled(0.0)
        extra = zero.load(wrapped, folder)
        loaded = values(wrapped)
        zero.save(filled(NEXT), folder, extra=NEXT)
        wrapped = filled(0.0)
        found.append((extra, loaded, zero.load(wrapped, folder), values(wrapped)))
    return found


def killed_at(places, behind, tmp_path):
    """What is loaded after a kill at each of these (rank, place): the old or the new one."""
    folders = []
    for victim, place in places:
        folder = tmp_path / f"{victim} at {place}"
        shutil.copytree(tmp_path / "old", folder)
        with pytest.raises(lab.RankError, match="SIGKILL") as caught:
            lab.run(save_and_die, 2, args=(folder, behind, victim, place))
        assert caught.value.rank == victim
        folders.append(folder)
    everyone = lab.run(after_the_kill, 2, args=(folders,), timeout_s=300)
    for results in everyone:
        for folder, (extra, loaded, after, reloaded) in zip(folders, results, strict=True):
            assert loaded == [extra], folder
            assert (after, reloaded) == (NEXT, [NEXT]), folder
            assert [each.suffix for each in folder.iterdir()] == [""], folder  # nothing unfinished is left
    assert everyone[0] == everyone[1]
    return [extra for extra, *_ in everyone[0]]


@pytest.mark.parametrize("behind", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all"])
def test_a_kill_at_any_place_of_a_save_leaves_a_whole_checkpoint(every, behind, tmp_path):
    saved(tmp_path / "old", OLD)
    shutil.copytree(tmp_path / "old", tmp_path / "undisturbed")
    first, second = lab.run(save_and_die, 2, args=(tmp_path / "undisturbed", behind))
    commit = first.index(("os.rename", "000001.part"))
    assert {event for event, _ in first} == {"open", "write", *CHANGES}
    # The last write, the commit and what follows it, and some of all others.
    some = [0, commit // 2, *range(commit - 3, commit + 3), len(first) - 1]
    places = [(0, place + 1) for place in (range(len(first)) if every else some)]
    others = range(len(second)) if every else (0, len(second) // 2, len(second) - 1)
    places += [(1, place + 1) for place in others]
    found = killed_at(places, behind, tmp_path)
    assert found == [NEW if (rank, place) > (0, commit + 1) and rank == 0 else OLD for rank, place in places]
    assert {OLD, NEW} == set(found)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def tear(file):
    file.write_bytes(file.read_bytes()[:-7])


DAMAGES = {"flipped": (flip, "is damaged"), "torn": (tear, "is damaged"), "lost": (Path.unlink, "is missing")}
FILES = {"__0_0.distcp": 0, "__1_0.distcp": 1, ".metadata": 0, "settings.pt": 0}


def refusals(folders):
    """What each of them is refused with, if nothing is changed."""
    found, wrapped = [], filled(5.0)
    for folder in folders:
        with pytest.raises(ValueError) as caught:
            zero.load(wrapped, folder)
        assert values(wrapped) == [5.0]
        found.append(str(caught.value))
    return found


def test_what_is_damaged_torn_or_missing_is_named_with_its_rank_and_the_older_one_that_is_whole(tmp_path):
    saved(tmp_path / "good", OLD, NEW)
    cases = list(itertools.product(DAMAGES, FILES))
    folders = [tmp_path / f"{how} {name}" for how, name in cases]
    for (how, name), folder in zip(cases, folders, strict=True):
        shutil.copytree(tmp_path / "good", folder)
        DAMAGES[how][0](folder / "000001" / name)
    hopeless, bare = tmp_path / "hopeless", tmp_path / "bare"
    for folder in (hopeless, bare):
        shutil.copytree(tmp_path / "good", folder)
    for number in ("000000", "000001"):
        flip(hopeless / number / "__1_0.distcp")
    (bare / "000001" / "__1_0.distcp.sha256").unlink()
    first, second = lab.run(refusals, 2, args=([*folders, hopeless, bare],))
    assert first == second
    *named, of_hopeless, of_bare = first
    for (how, name), folder, said in zip(cases, folders, named, strict=True):
        assert f"{folder / '000001' / name}, which rank {FILES[name]} wrote, {DAMAGES[how][1]}" in said
        assert said.endswith(f"{folder / '000000'} is whole: remove what is newer to go on from there")
        with pytest.raises(ValueError, match=f"which rank {FILES[name]} wrote, {DAMAGES[how][1]}"):
            zero.merge(folder)
    assert of_hopeless.endswith("no older one is whole")
    assert "which rank 1 wrote, has lost its sum __1_0.distcp.sha256" in of_bare
    for folder in folders[:2]:
        shutil.rmtree(folder / "000001")  # as it was told
    assert lab.run(after_the_kill, 2, args=(folders[:2],)) == [[(OLD, [OLD], NEXT, [NEXT])] * 2] * 2


def test_sha256sum_reads_the_sums(tmp_path):
    saved(tmp_path, OLD)
    (folder,) = tmp_path.iterdir()
    sums = sorted(each.name for each in folder.glob("*.sha256"))
    assert sums == sorted(f"{name}.sha256" for name in FILES)
    subprocess.run(["sha256sum", "--check", "--strict", *sums], cwd=folder, check=True, capture_output=True)


def test_the_newest_stay(tmp_path):
    def names():
        return sorted(each.name for each in tmp_path.iterdir())

    saved(tmp_path, OLD, NEW, NEXT, keep=2)
    assert names() == ["000001", "000002"]
    saved(tmp_path, OLD, keep=7)
    assert names() == ["000001", "000002", "000003"]
    saved(tmp_path, OLD, keep=1)
    assert names() == ["000004"]


def test_what_could_not_be_read_again_is_refused_before_anything_is_written(tmp_path):
    def job():
        for options, words in (
            ({"keep": 0}, "keep must be at least 1, not 0"),
            ({"extra": {1, Path("a")}}, "what is saved must be tensors, numbers, strings, lists and dictionaries"),
        ):
            with pytest.raises(ValueError, match=words):
                zero.save(filled(OLD), tmp_path, **options)

    lab.run(job, 2)
    assert not list(tmp_path.iterdir())
