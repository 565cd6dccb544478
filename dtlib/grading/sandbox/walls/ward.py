"""The inmates of one start, seen by their warden: what is handed out when, who is stuck, and what every job took."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from dtlib.processes.channel import anonymous_file, join
from dtlib.processes.crew import Crew, Rank, Report
from dtlib.processes.namespace import family
from dtlib.processes.rank import Failure

from . import vitals
from .limits import Limits
from .tap import Tap, ports_of
from .view import HOME

_MAX_FRAME_BYTES, _MAX_FRAMES = 64, 20_000
_QUIET_LOOKS = 3  # in a row
_TICK_SECONDS, _TICK_SHARE = 150e-6, 0.02  # gloo's own thread looks around every ten milliseconds
_BUSY_SECONDS = 0.3  # of computing while nothing crosses and another rank is held back: it waits actively
_LATE_LOOK_SECONDS = 0.2
_STILL_SHARE = 0.1  # of the time: ranks that compute, or wait for a processor, no more than that are stuck
_LONGEST_SETTLE_SECONDS = 2.0  # for threads that never rest
ROOM_BYTES = 4 * 2**20  # what a rank may hold when its first piece is handed out: imports, caches of libraries
_MAX_RESULT_BYTES, _MAX_UNSENT_BYTES = 32 * 2**20, 2**20
_MAX_PACKETS = 300_000  # in a case
_LEAVING_SECONDS = 10.0  # when all is done, for the last word
_SLOW, _QUICK = 0.02, 0.001


class Desks:
    """What was asked and answered in a job: `asks` and `given` count the pieces of each rank."""

    def __init__(self, job: dict[str, Any], world_size: int) -> None:
        self.pieces: Sequence[Sequence[tuple[int, int]]] = job["pieces"]  # of each rank: (offset, bytes) in the file
        self.named: Sequence[dict[str, tuple[int, int]]] = job["named"]
        self.wants = [""] * world_size  # the name of what each rank asked for last, "" for the next in the order
        self.shown = [float("nan")] * world_size  # what it showed when it did
        self.holds: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, piece, other, until in job["holds"]:
            self.holds.setdefault((rank, piece), []).append((other, until))
        self.asks, self.given = [0] * world_size, [0] * world_size
        self.asked_at = [0.0] * world_size

    def ask(self, rank: int, words: str) -> None:
        """A rank asks for the piece that its `words` begin with, or for its next one; behind a bar, what it shows."""
        label, _, shown = words.partition("|")
        try:
            self.shown[rank] = float(shown)
        except ValueError:
            self.shown[rank] = float("nan")
        self.asks[rank] += not label
        self.wants[rank] = label
        self.asked_at[rank] = time.monotonic()

    def is_asking(self, rank: int) -> bool:
        """Whether a rank waits for a piece."""
        return bool(self.wants[rank]) or self.asks[rank] > self.given[rank]

    def answer(self, rank: int) -> tuple[int, str, tuple[int, int]]:
        """What a rank gets now: its number in the order (-1 for one by name), its name, where it stands in the file.

        Raises ``LookupError`` where there is no such piece.
        """
        label, self.wants[rank] = self.wants[rank], ""
        if label:
            return -1, label, self.named[rank][label]
        self.given[rank] += 1
        return self.given[rank] - 1, "", self.pieces[rank][self.given[rank] - 1]

    def is_held(self, rank: int) -> bool:
        """Whether that piece is kept back until other ranks have asked for certain pieces of their own."""
        if self.wants[rank]:
            return False
        waits_for = self.holds.get((rank, self.given[rank]), ())
        return any(other < 0 or self.asks[other] <= until for other, until in waits_for)


class Ward(Crew):
    """The ranks of one start, which do one job after another together."""

    frame_seconds = 1.0

    def __init__(self, task: dict[str, Any], blobs_fd: int, control: socket.socket, *, fork: bool) -> None:
        super().__init__(task["world_size"], control, fork=fork)
        self.task, self.blobs_fd = task, blobs_fd
        self.limits = Limits(**task["limits"])
        self.tap: Tap | None = None
        self._ports: dict[str, int] = {}  # of sockets that were looked up
        self.jobs_done: list[dict[str, Any]] = []
        self.broken_limit = self.late = ""
        self.sees = vitals.can_be_read()
        self._frames = 0
        self._begun_frame: dict[int, float] = {}
        n = task["world_size"]
        self._own = [[0] for _ in range(n)]  # the processes of each rank
        self._pulses = [vitals.Pulse()] * n
        self._quiet = [0] * n  # for how many looks
        self._computed: list[dict[tuple[int, bytes], float]] = [{} for _ in range(n)]  # by each process that was seen
        self._held, self._base, self._peak = [0] * n, [0] * n, [0] * n
        self.kept_fds = [anonymous_file(f"dtlib-{rank}-kept") for rank in range(n)]  # results that nobody can change
        self._kept_bytes = [0] * n
        self._unsent = [bytearray() for _ in range(n)]
        lengths = [length for job in task["jobs"] for each in job["pieces"] for _, length in each]
        self._most_unsent = max(lengths, default=0) + _MAX_UNSENT_BYTES
        self._ran_before = [0.0] * n
        self._next_count, self._looked_at, self._look_seconds, self._position = 0.0, 0.0, 0.0, 0
        self._early: set[int] = set()  # ranks that ask for the first piece of the next job
        self._at_fork = vitals.held_bytes("self")
        self._new_job()

    # one job after the other

    def _new_job(self) -> None:
        self.number = len(self.jobs_done)
        self.plan = self.task["jobs"][self.number] if self.number < len(self.task["jobs"]) else None
        self.has_begun, self.through = False, [False] * self.task["world_size"]
        self.desks = Desks(self.plan or {"pieces": [], "named": [], "holds": []}, self.task["world_size"])
        for rank in self._early:
            self.desks.ask(rank, "")
        self._early = set()
        self._idle_seconds = self._late_seconds = 0.0  # when no rank computed; when nobody looked
        self.log: list[list[Any]] = []
        self._start = time.monotonic()
        self._first_pulses = list(self._pulses) if self.number else [vitals.Pulse()] * self.task["world_size"]
        self._still: tuple[float, int, list[vitals.Pulse]] | None = None

    def _begin(self) -> None:
        """All ranks stand at the desk for the first time: what is counted counts from here on."""
        self.has_begun = True
        if self.tap is not None:
            self.tap.begin()
        self._base = [min(max(held, self._at_fork), self._at_fork + ROOM_BYTES) for held in self._held]
        self._peak = list(self._held)

    def close_job(self, how: str) -> None:
        """Note how the present job ended, and everything that was seen of it."""
        if self.plan is None:
            return
        if self.plan["weigh"]:
            self._weigh()
        done: dict[str, Any] = {
            "how": how,
            "asks": self.log,
            "at_end": [self._grown(rank) for rank in range(len(self.ranks))],
            "seconds": time.monotonic() - self._start,
            "cpu_seconds": [now.cpu_seconds - then.cpu_seconds for now, then in self._pairs()],
            "starved_seconds": [now.starved_seconds - then.starved_seconds for now, then in self._pairs()],
            "whole": self.desks.given == [len(each) for each in self.plan["pieces"]],
        }
        if self.tap is not None and self.has_begun:
            done["traffic"] = vars(self.tap.traffic(ports_of((rank.pid for rank in self.ranks), self._ports)))
        self.jobs_done.append(done)
        self._new_job()

    def _pairs(self) -> list[tuple[vitals.Pulse, vitals.Pulse]]:
        return list(zip(self._pulses, self._first_pulses, strict=True))

    def _grown(self, rank: int) -> list[int]:
        """What a rank holds beyond its beginning, and the most that it held since it was last asked."""
        pair = [self._held[rank] - self._base[rank], self._peak[rank] - self._base[rank]]
        self._peak[rank] = self._held[rank]
        return pair

    # serving

    def watch(self) -> Report:
        """Serve the ranks until all jobs are done, or one of them has failed."""
        report = super().watch()
        if report.timed_out:
            self.close_job(self.late)
        elif report.first is not None:
            self.close_job("limit" if self.broken_limit else self.ranks[report.first].state)
        return report

    def _failed(self, selector: selectors.BaseSelector) -> Report:
        """Wait until the other ranks have failed too, or stand still: whom to blame is no matter of who was quicker."""
        until = time.monotonic() + self.limits.patience_seconds
        while not self.broken_limit and time.monotonic() < until:
            running = [number for number, rank in enumerate(self.ranks) if rank.state == "running"]
            if all(self._quiet[each] >= _QUIET_LOOKS and not self.desks.is_asking(each) for each in running):
                break
            for key, _ in selector.select(self.pause()):
                if key.data is None:
                    raise EOFError("the parent left")
                if not self.serve(key.data):
                    selector.unregister(key.fileobj)
            self._notice_deaths()
            if self.tend():
                break
        return super()._failed(selector)

    def pause(self) -> float:
        """Short where somebody asks, or is weighed."""
        asking = any(map(self.desks.is_asking, range(len(self.ranks))))
        pause = _QUICK if asking or any(self._unsent) or (self.plan is not None and self.plan["weigh"]) else _SLOW
        return max(pause, self._look_seconds)  # on a busy machine looking takes long, and others need the time too

    def serve(self, number: int) -> bool:
        """Read one frame of an inmate, as soon as it is there as a whole: nobody may keep the warden waiting."""
        rank = self.ranks[number]
        try:
            ready = rank.sock.recv(4 + _MAX_FRAME_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        length = int.from_bytes(ready[:4], "big") if len(ready) >= 4 else 0
        late = time.monotonic() - self._begun_frame.setdefault(number, time.monotonic()) > self.frame_seconds
        self._frames += 1
        if length > _MAX_FRAME_BYTES or self._frames > _MAX_FRAMES or (late and ready):
            self.end_all("tampered", "wrote to the grader's own channel")
            return False
        if ready and len(ready) < 4 + length:
            time.sleep(0.01)
            return True
        self._begun_frame.pop(number, None)
        kind = ready[4:5]
        if not ready:
            return super().serve(number)  # it is gone
        if kind in (b"D", b"E") and self._may_leave(number, kind):
            return super().serve(number)
        rank.sock.recv(4 + length)
        if kind not in (b"A", b"J", b"X"):
            self.end_all("tampered", "wrote to the grader's own channel")
            return False
        if kind == b"A" and self.through[number]:
            self._early.add(number)  # for the next job: others are not through with this one
        elif kind == b"A":
            self.desks.ask(number, ready[5 : 4 + length].decode("ascii", "replace"))
        elif kind == b"J":
            if self.through[number] or not self._keep_result(number):
                self.end_all("tampered", "wrote to the grader's own channel")
                return False
            self.through[number] = True
            self._read_output()  # the kernel may have refused to write more before it was seen here
            if all(self.through) and not self.broken_limit:
                self.close_job("done")
        else:  # ranks that meet are told nothing of each other, or it would be a way to exchange data unseen
            rank.waiting = b""
            if all(other.waiting is not None for other in self.ranks):
                for each, other in enumerate(self.ranks):
                    other.waiting = None
                    self._send(each, join([b""] * len(self.ranks)))
        return True

    def _may_leave(self, number: int, kind: bytes) -> bool:
        """Whether a rank may say that it has done all jobs, or that it failed in one of those that it has left."""
        has_done_all = self.plan is None or (self.through[number] and self.number + 1 == len(self.task["jobs"]))
        return has_done_all if kind == b"D" else not has_done_all and self._keep_result(number)

    def _keep_result(self, number: int) -> bool:
        """Copy the next result of a rank to where nothing that it does later can change it; whether there is one."""
        result, at = self.ranks[number].files.result, self._kept_bytes[number]
        end = at + 8 + int.from_bytes(os.pread(result, 8, at), "big")
        if end > min(os.fstat(result).st_size, _MAX_RESULT_BYTES):
            return False
        self._kept_bytes[number] += os.write(self.kept_fds[number], os.pread(result, end - at, at))
        return True

    def read_failure(self, rank: Rank) -> Failure:
        """What an inmate wrote is left for the grader to read, as plain data."""
        return Failure("told")

    # looking after them

    def tend(self) -> bool:
        """Hand out what may be handed out; whether the job must end now, and why (`late`)."""
        if self.tap is not None:
            self.tap.read(at_most=2000)
            if self.tap.num_packets > _MAX_PACKETS:
                self.end_all("packets", f"sent more than {_MAX_PACKETS:,} packets in a case and was ended")
        self._look()
        for rank in range(len(self.ranks)):
            self._flush(rank)
        if self.plan is None:
            if time.monotonic() - self._start > _LEAVING_SECONDS:
                self.end_all("late", "did not end when all was done")
            return False
        busy = [rank for rank in range(len(self.ranks)) if not self.through[rank]]
        asking = [rank for rank in busy if self.desks.is_asking(rank)]
        if not self.has_begun and len(asking) == len(self.ranks):
            self._begin()
        if self.has_begun:
            settled = [rank for rank in asking if self._is_settled(rank)]
            free = [rank for rank in settled if not self.desks.is_held(rank)]
            if not free and asking and all(self._rests(rank) for rank in busy):
                self._answer(asking, "quiet")
            else:
                self._answer(free, "")
        self.late = self._why_late(busy, asking)
        return bool(self.late)

    def _rests(self, rank: int) -> bool:
        """Whether a rank does not move, or asks again and again whether something has come that does not come."""
        ran = self._pulses[rank].running_seconds - self._ran_before[rank]
        return self._quiet[rank] >= _QUIET_LOOKS or ran > _BUSY_SECONDS

    def _why_late(self, busy: list[int], asking: list[int]) -> str:
        now = time.monotonic()
        assert self.plan is not None
        if not self.sees:
            return "hung" if now - self._start > self.plan["cpu_seconds"] else ""
        if any(pulse.cpu_seconds - first.cpu_seconds > self.plan["cpu_seconds"] for pulse, first in self._pairs()):
            return "busy"
        if (asking and self.has_begun) or self._still is None:
            self._still = now, self._position, list(self._pulses)
        elif now - self._still[0] > self.limits.patience_seconds:
            since, position, before = self._still
            most = _STILL_SHARE * (now - since)
            moved = position != self._position or any(
                self._pulses[rank].awake  # who waits for a processor all the time has no run delay yet
                or self._pulses[rank].running_seconds - before[rank].running_seconds > most
                or self._pulses[rank].starved_seconds - before[rank].starved_seconds > most
                for rank in busy
            )
            if not moved:
                return "hung"
            self._still = now, self._position, list(self._pulses)
        if self._idle_seconds > self.limits.idle_seconds:
            return "idle"
        if now - self._start <= self.limits.wall_seconds:
            return ""
        most = _STILL_SHARE * self.limits.wall_seconds
        starved = any(pulse.starved_seconds - first.starved_seconds > most for pulse, first in self._pairs())
        return "stopped" if starved or self._late_seconds > most else "long"

    def _is_settled(self, rank: int) -> bool:
        """Whether a rank that asks has nothing else under way; where order matters, whether nobody has."""
        if not self.sees or (self.task["world_size"] == 1 and not self.plan["weigh"]):  # type: ignore[index]
            return True
        late = time.monotonic() - self.desks.asked_at[rank] > _LONGEST_SETTLE_SECONDS
        if self.desks.holds:
            busy = (other for other, through in enumerate(self.through) if not through)
            return late or all(self._quiet[other] >= 1 for other in busy)
        return self._quiet[rank] >= 1 or late

    def _answer(self, ranks: list[int], why: str) -> None:
        if ranks and self.plan is not None and self.plan["weigh"]:
            self._weigh()
        if ranks:
            self._ran_before = [pulse.running_seconds for pulse in self._pulses]
        if ranks and self.tap is not None:
            self.tap.read(at_most=2000)  # what left while it was looked whether all rest was not waited for
        for rank in ranks:
            try:
                piece, label, (start, length) = self.desks.answer(rank)
            except LookupError:
                self.end_all("tampered", "asked for more than the harness does")
                return
            position = self.tap.position if self.tap is not None else 0
            self.log.append([rank, piece, label, position, why, *self._grown(rank), self.desks.shown[rank]])
            self._quiet[rank] = 0
            self._send(rank, os.pread(self.blobs_fd, length, start))

    def _send(self, rank: int, message: bytes) -> None:
        """Send what an inmate takes at once, and the rest when it takes more: nobody may keep the warden waiting."""
        self._unsent[rank] += len(message).to_bytes(4, "big") + message
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        rest = self._unsent[rank]
        try:
            while rest:
                del rest[: self.ranks[rank].sock.send(rest, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            if len(rest) > self._most_unsent:
                self.end_all("tampered", "asked the grader again and again, and did not read what it said")
        except OSError:
            rest.clear()  # it died meanwhile, which the next look at its process shows

    def _look(self) -> None:
        now = time.monotonic()
        if not self.sees:
            return
        if now >= self._next_count or (self.plan is not None and self.plan["weigh"]):
            self._count(now)
        position = self.tap.position if self.tap is not None else 0
        if position != self._position:
            self._ran_before = [pulse.running_seconds for pulse in self._pulses]
        tick = _TICK_SECONDS + _TICK_SHARE * (now - self._looked_at)
        passed = now - self._looked_at if self._looked_at else 0.0
        stands = True
        for number in range(len(self.ranks)):
            pulse = vitals.pulse(self._own[number], self._computed[number])
            ran = pulse.running_seconds - self._pulses[number].running_seconds
            waited = pulse.starved_seconds - self._pulses[number].starved_seconds
            stands = stands and not pulse.awake and ran + waited < _STILL_SHARE * passed
            rests = not pulse.awake and ran < tick and position == self._position
            self._quiet[number] = self._quiet[number] + 1 if rests else 0
            self._pulses[number] = pulse
        if passed > _LATE_LOOK_SECONDS:  # it was not scheduled itself: nobody knows who waited for whom
            self._late_seconds += passed
        elif stands:
            self._idle_seconds += passed
        self._position, self._looked_at = position, now
        self._look_seconds = min(time.monotonic() - now, _SLOW)

    def _count(self, now: float) -> None:
        """Find the processes of each rank, and hold them to their limits."""
        self._next_count = now + 0.05
        self._own = [family(rank.pid) for rank in self.ranks]
        self._weigh()
        self._read_output()
        if not self.task["bounded"]:
            return
        grown = sum(max(0, held - self._at_fork) for held in self._held)
        if grown > self.limits.memory_bytes:
            self.end_all("memory", f"used more than {self.limits.memory_bytes / 2**20:.0f} MiB of memory and was ended")
        if max(map(len, self._own)) > self.limits.processes + 1:  # the kernel holds all but the root user to it
            self.end_all("processes", f"started more than {self.limits.processes} processes and was ended")

    def _read_output(self) -> None:
        most = self.limits.output_bytes
        if self.task["bounded"] and any(os.fstat(rank.files.output).st_size > most for rank in self.ranks):
            self.end_all("output", f"printed more than {most / 2**20:g} MiB and was ended")

    def _weigh(self) -> None:
        alone = [vitals.held_bytes(own[0]) for own in self._own]  # first, since a look at a child may take long
        for number, rank in enumerate(self.ranks):
            held = alone[number] + sum(map(vitals.apportioned_bytes, self._own[number][1:]))
            held += sum(os.fstat(fd).st_size for fd in (rank.files.result, rank.files.output, rank.files.stack))
            if self.task["bounded"]:
                held += vitals.scratch_bytes(rank.pid, HOME) + vitals.pipe_bytes(self._own[number])
            self._held[number] = held
            self._peak[number] = max(self._peak[number], held)

    def end_all(self, kind: str, text: str) -> None:
        """End the job, because a limit was broken or somebody took the harness's part."""
        self.broken_limit = self.broken_limit or f"{kind}: {text}"
        for rank in self.ranks:
            if rank.state == "running":
                rank.state, rank.failure = "raised", Failure(text)
