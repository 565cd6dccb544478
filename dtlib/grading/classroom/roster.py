"""Who is done and what is left: the standings of a class while it is graded, and the files of each who is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dtlib.grading.exercises.exercise import Exercise
from dtlib.grading.sandbox.walls.limits import Limits

from . import fingerprint, report, shards
from .intake import Submission
from .intake.names import file_name
from .judging import said
from .report.exports import gradescope_results
from .report.folder import GRADESCOPE, LEARNERS, Folder
from .report.record import (
    LEARNER_SCHEMA,
    NO_VERDICT,
    Record,
    class_record,
    entry_of,
    learner_record,
    standing,
    told,
)
from .shards import Shard

_ALIKE = "the two names differ in case or form alone, and count as two learners"
_REFRESHES = 50  # how often results.json is written while a class is graded


class Event(NamedTuple):
    """How far the grader is: `done` of `total` steps, in `words`; `is_line` where these are worth a line of their own.

    `learner` is who is done, "" where nobody is.
    """

    words: str
    done: int = 0
    total: int | None = None
    is_line: bool = False
    learner: str = ""


Progress = Callable[[Event], None]


class Roster:
    """Keeps the standings of the class, and writes the files of each learner who is done."""

    def __init__(
        self,
        folder: Folder,
        exercises: Sequence[Exercise],
        found: Sequence[Submission],
        seed: int,
        limits: Limits,
        progress: Progress,
        shard: Shard | None,
        since: Path | None = None,
        regrade: Collection[str] = (),
    ) -> None:
        self.folder, self.exercises, self.seed, self.limits, self.progress = folder, exercises, seed, limits, progress
        self._again = regrade  # exercises that are graded again, whatever an earlier run has of them
        self._before: dict[str, Record] = {}  # what it has of the others
        self._grader = {"version": fingerprint.version(), "fingerprint": fingerprint.of_grader()}
        self._blank = learner_record("", [entry_of(each) for each in exercises])
        everything = {each.learner: list(exercises) for each in found}
        self._since = {each.learner: record for each in found if since and (record := self._earlier(since, each))}
        changed = [each for each in found if each.learner not in self._since]
        self.share = shards.deal(changed, exercises, shard) if shard else everything
        blank = {each["id"]: each for each in self._blank["exercises"]}
        self._standings = {
            name: standing({**learner_record("", [blank[each.id] for each in mine]), "learner": name}, file_name(name))
            for name, mine in self.share.items()
        }
        self.group = class_record(seed, exercises, list(self._standings.values()), asdict(limits), self._grader)
        if shard:
            kept = {name: record["fingerprint"] for name, record in self._since.items()}
            mark = fingerprint.of_learner(shard.of, [self._fingerprint(each, seed) for each in found], kept)
            self.group["shard"] = {**shard._asdict(), "class": mark, "kept": kept}
        self.group["alike"] = sorted({tuple(each.alike) for each in found if each.alike})
        self._walls: Mapping[str, str] = {}
        self._graded: dict[str, dict[str, Record]] = {}
        self._done = self._num_steps = self._unsaved = 0

    @property
    def again(self) -> int:
        """Of how many learners an earlier run has what is not graded again."""
        return len(self._before)

    def keep(self, submission: Submission, seed: int | None) -> bool:
        """Whether the record of an earlier run holds the learner's verdict; then it is taken as it is.

        It has to be one of this machine's, of these very inputs, free of faults and open questions, and of `seed`,
        unless that is None. Where some exercises are graded again, it is kept for the others.
        """
        path = self.folder.of(LEARNERS, self._standings[submission.learner]["file"])
        record = self.folder.read_sealed(path, LEARNER_SCHEMA)
        if not self._holds(record, submission, self.share[submission.learner], seed):
            record = self._since.get(submission.learner)
        if record is None:
            return False
        self._stand(record["walls"])
        if self._again:
            self._before[submission.learner] = record
            return False
        self._enter(submission.learner, record)
        self.group["measured"]["kept"] += 1
        return True

    def _earlier(self, since: Path, submission: Submission) -> Record | None:
        """What a folder of results has of a learner, whoever wrote it, if it is a verdict on what is handed in now."""
        record = shards.earlier(since, submission.learner)
        return record if self._holds(record, submission, self.exercises, None) else None

    def _holds(
        self, record: Record | None, submission: Submission, exercises: Sequence[Exercise], seed: int | None
    ) -> bool:
        if record is None:
            return False
        if {each["id"] for each in record["exercises"] if each["status"] in NO_VERDICT}.difference(self._again):
            return False
        # An exercise is graded again because its checks were mended: what another version said of the others stands.
        grader = record.get("grader", self._grader)["fingerprint"] if self._again else self._grader["fingerprint"]
        if record["fingerprint"] != self._fingerprint(submission, record["seed"] if seed is None else seed, grader):
            return False
        return [each["id"] for each in record["exercises"]] == [each.id for each in exercises]

    def begin(self, left: Sequence[Submission]) -> None:
        """Write a zero for everybody who is `left`: whatever happens later, there is a result."""
        self.folder.remove_others({each["file"] for each in self._standings.values()})
        self._num_steps = len(self.steps(left))
        if not left and self.group["learners"]:
            self.group["seed"] = self.group["learners"][0]["seed"]
        report.write_results(self.folder, self.group)
        zero = gradescope_results(self._blank)
        for each in () if "shard" in self.group else {each.learner for each in left}.difference(self._before):
            self.folder.write_json(self.folder.of(GRADESCOPE, self._standings[each]["file"]), zero)
        if left and (kept := self.group["measured"]["kept"]):
            self.say(f"{kept} of {len(self._standings)} learners are kept from an earlier run", is_line=True)
        if kept := self.again:
            what = f"{', '.join(self._again)} again; all else of {kept} of {len(self._standings)} learners is kept"
            self.say(what, is_line=True)

    def steps(self, left: Sequence[Submission]) -> list[tuple[Submission, Exercise]]:
        """What there is to grade of those who are `left`."""
        return [(each, one) for each in left for one in self._left_of(each.learner)]

    def seed_of(self, learner: str) -> int:
        """The seed of a learner's cases: the one of what is kept."""
        return self._before[learner]["seed"] if learner in self._before else self.seed

    def _left_of(self, learner: str) -> list[Exercise]:
        whole = self.share[learner]
        return [each for each in whole if each.id in self._again] if learner in self._before else whole

    def behind(self, walls: Mapping[str, str]) -> None:
        """Take note of the walls behind which everybody who is left is graded."""
        self._walls = dict(walls)
        self._stand(walls)
        if walls.get("files", "it is not there"):
            self.folder.key.throw_away("a submission could have read the key, since there was no wall around the files")

    def tell(self, submission: Submission, exercise: Exercise, entry: Record) -> None:
        """Take note of an exercise that is graded; the last one of a learner makes the learner's files."""
        mine = self._graded.setdefault(submission.learner, {})
        mine[exercise.id] = entry
        self._done += 1
        if entry["status"] == "error":
            self.fail(submission.learner, exercise.id, entry["reason"])
        if len(mine) == len(self._left_of(submission.learner)):
            self._finish(submission, self._graded.pop(submission.learner))

    def end(self, jobs: int, seconds: float) -> None:
        """Write the files of the class."""
        if self._walls.get("files"):  # a submission may have laid a key of its own
            self.folder.key.throw_away("")
        self.group["faults"].sort(key=lambda each: list(each.values()))  # not as threads came upon them
        self.group["not_kept"] = self.folder.key.why_not
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"
        self.group["measured"] |= {"time": now, "seconds": round(seconds, 3), "jobs": jobs}
        write = report.write_share if "shard" in self.group else report.write_class
        write(self.folder, self.group, self.exercises)

    def say(self, words: str, **more: Any) -> None:
        """Tell how far the grader is."""
        self.progress(Event(words, self._done, self._num_steps, **more))

    def fail(self, learner: str, exercise: str, text: str) -> None:
        """Take note of a fault of the grader's."""
        self.group["faults"].append(told(learner, exercise, text))

    def _finish(self, submission: Submission, graded: Mapping[str, Record]) -> None:
        mine = self._standings[name := submission.learner]
        others = [each for each in submission.alike[:3] if each != name]
        alike = [f"there is also a learner {each}: {_ALIKE}" for each in others]
        try:
            seed, before = self.seed_of(name), self._before.pop(name, None) or learner_record("", [])
            whole = {**{each["id"]: each for each in before["exercises"]}, **graded}
            more: dict[str, Any] = {"fingerprint": self._fingerprint(submission, seed), "grader": self._grader}
            more |= {"seed": seed, "walls": shards.stood([before["walls"], self._walls])}
            more["handed_in"] = before["measured"]["handed_in"] or submission.handed_in
            entries = [whole[each.id] for each in self.share[name]]
            self._enter(name, learner_record(name, entries, [*alike, *submission.notes], **more))
        except Exception as error:
            mine["status"] = "error"
            self.fail(name, "", f"could not be recorded: {said(error)}")
        self._unsaved += 1
        if self._unsaved * _REFRESHES >= len(self._standings):
            self._unsaved = 0
            report.write_results(self.folder, self.group)
        points = f"{mine['points']} of {mine['max_points']} points"
        odd = {"error": "the grader failed", "not known": f"{points}, and not everything is known"}
        self.say(f"{name}: {odd.get(mine['status'], points)}", is_line=True, learner=name)

    def _enter(self, learner: str, record: Record) -> None:
        mine = self._standings[learner]
        if "shard" in self.group:
            self.folder.write_sealed(self.folder.of(LEARNERS, mine["file"]), record)
        else:
            report.write_learner(self.folder, mine["file"], record)
        mine |= standing(record, mine["file"])

    def _fingerprint(self, submission: Submission, seed: int, grader: str = "") -> str:
        names = [submission.learner, *submission.alike]
        exercises = [each.id for each in self.exercises]
        return fingerprint.of_learner(names, submission.digest, seed, exercises, asdict(self.limits), grader=grader)

    def _stand(self, walls: Mapping[str, str]) -> None:
        """A wall stood for the class if it stood for everybody."""
        before = self.group["walls"]
        self.group["walls"] = before | {name: before.get(name) or why_not for name, why_not in walls.items()}
