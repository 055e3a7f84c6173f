"""The stall detector: a thread that asks no server, and reports within 5 s that a server does not answer.

A thread that waits for a server blocks in a socket and cannot report anything. So each request is marked while its
answer is awaited, and one daemon thread of the process checks the marks. It starts with a request and ends when none is
left. A forked process begins without it. A mark costs under a microsecond: no lock, no system call.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from penstock_common.printable import readable_server

__all__ = [
    "REPEAT_S",
    "SILENCE_S",
    "STALL_DETECTOR",
    "SUSPECT_S",
    "PendingRequest",
    "StallDetector",
    "no_answer",
]

Notify = Callable[[str], None]
Clock = Callable[[], float]
Answer = TypeVar("Answer")

SILENCE_S = 2.5
"""A server that owes an answer for this long is reported. A client that asks every 2 s reports it within 5 s; see
docs/internals/trouble.md."""
REPEAT_S = 30.0
SUSPECT_S = 1.5
"""An answer that takes longer is late, because no request waits at the server for more than 1 s."""
TICK_S = 0.25
"""The time between two checks of the open requests."""
PAUSE_S = 0.5
"""A sleep that lasts longer than planned by this much was a pause of the whole process."""
LONGEST_S = SILENCE_S - SUSPECT_S
"""The longest sleep of the thread, so that a pause is seen before a request in it counts as a silence."""
FORGET_S = 5.0
"""A silence is over when no request was sent for this long."""
SHORTEST_S = 0.02


class PendingRequest:
    """One connection's wait for an answer of its server. `begin` and `end` may be repeated, by one thread at a time."""

    __slots__ = ("_clock", "_dog", "_heard", "_is_answered", "began_s", "marks", "notify", "ran_from_s", "where")

    def __init__(
        self,
        where: str,
        notify: Notify,
        *,
        heard: Callable[[], float] = lambda: 0.0,
        dog: StallDetector | None = None,
    ) -> None:
        """Make a request to the server at ``where``, an address without a password.

        ``heard`` returns the time at which bytes of an answer came last.
        """
        self.where, self.notify = where, notify
        self._heard, self._dog = heard, dog or STALL_DETECTOR
        self._clock, self.marks = self._dog.clock, self._dog.asked
        self.began_s, self.ran_from_s, self._is_answered = 0.0, 0.0, False

    def begin(self) -> None:
        """Mark that an answer is awaited. Call it inside the ``try`` whose ``finally`` calls `end`.

        Before `end` the ``finally`` calls ``marks.discard`` itself: Ctrl-C may come as `end` begins, and a mark that
        stays reports a silence until the process ends. It never comes between ``finally`` and a method of a set.
        """
        self.began_s = self.ran_from_s = self._clock()
        self.marks.add(self)
        if self._dog.thread is None:
            self._dog.start()

    def answered(self) -> None:
        """Note that the answer came."""
        self._is_answered = True

    def end(self) -> None:
        """Remove the mark, whether an answer came or not."""
        self.marks.discard(self)
        is_answered, self._is_answered = self._is_answered, False
        if self._dog.silences or self._clock() - self.ran_from_s > SILENCE_S:
            self._dog.note_end(self, is_answered=is_answered)

    def of(self, ask: Callable[[], Answer]) -> Answer:
        """Return what ``ask`` returns, with the mark set during the call."""
        try:
            self.begin()
            answer = ask()
            self.answered()
            return answer
        finally:
            self.marks.discard(self)
            self.end()

    def silent_s(self, now: float) -> float:
        """Return for how many seconds no byte has come while this process ran."""
        return now - max(self.ran_from_s, self._heard())

    def pause(self, seconds: float) -> None:
        """Note that this process did not run for so long, and could not take an answer."""
        self.ran_from_s = max(self.ran_from_s, self._heard()) + seconds


@dataclass(slots=True)
class _Stall:
    """A server that was reported not to answer."""

    where: str
    notify: Notify
    began_s: float
    reported_s: float
    seen_s: float
    """The time when a late request was last seen."""
    asked_s: float
    """The time when any request was last seen."""

    def see(self, now: float, *, is_late: bool) -> None:
        """Note that a request to the server is under way."""
        self.asked_s = now
        if is_late:
            self.seen_s = now

    def report_at(self, now: float) -> None:
        """Note that the silence was reported."""
        self.reported_s = now


class StallDetector:
    """The requests that a process has under way. It reports those that get no answer."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._speaker: Notify | None = None
        """Called for every silence, if it is set, instead of the function of the request."""
        self.asked: set[PendingRequest] = set()
        """The requests under way. Each adds and removes itself."""
        self.forget()

    def speak_through(self, speaker: Notify) -> None:
        """Report every silence to ``speaker`` from now on, instead of to the function of the request."""
        self._speaker = speaker

    def forget(self) -> None:
        """Start again, as a forked process must, because the threads that asked do not exist in it."""
        self.asked.clear()
        self.silences: list[_Stall] = []
        """The servers that are reported not to answer."""
        self._heard: dict[str, float] = {}
        self._late: dict[str, float] = {}
        """Server -> the time when its last reported silence ended for a request, with or without an answer."""
        self._lock = threading.RLock()
        self.thread: threading.Thread | None = None
        """The thread, while it runs."""

    # --- called by requests ---

    def note_end(self, request: PendingRequest, *, is_answered: bool) -> None:
        """Note the end of a request that was late, or that ended while a silence is reported."""
        now = self.clock()
        if now - request.ran_from_s > SILENCE_S:
            self._late[request.where] = now
        if is_answered and self.silences:
            self._heard[request.where] = now

    # --- called by waits ---

    def silent_s(self, where: str) -> float:
        """Return for how long the server has owed an answer by now, or 0 if it owes none, or not for long."""
        now = self.clock()
        longest = max((one.silent_s(now) for one in self.asked.copy() if one.where == where), default=0.0)
        return longest if longest > SUSPECT_S else 0.0

    def late_at(self, where: str) -> float:
        """Return when the server was last known not to answer: now, or an earlier time, or -inf for never."""
        return self.clock() if self.silent_s(where) else self._late.get(where, float("-inf"))

    # --- the thread ---

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self.thread is not None:
                return
            self.thread = threading.Thread(target=self._run, name="penstock-stall-detector", daemon=True)
            try:
                self.thread.start()
            except RuntimeError:  # the interpreter ends, or no more threads may start: no silence is reported then
                self.thread = None

    def _run(self) -> None:
        me = threading.current_thread()
        self._sleep(SILENCE_S)  # nothing can be late before, and most requests that began by now have ended
        while True:
            while (pause_s := self.look()) is not None:
                self._sleep(pause_s)
            self.thread = None
            if not self.asked:  # a request that begins from here on starts another thread
                return
            with self._lock:
                if self.thread is not None:
                    return
                self.thread = me

    def _sleep(self, seconds: float) -> None:
        while seconds > 0:
            began_s, step_s = self.clock(), min(seconds, LONGEST_S)
            time.sleep(step_s)
            self.note_pause(self.clock() - began_s - step_s)
            seconds -= step_s

    def note_pause(self, seconds: float) -> None:
        """Note that the thread slept so much longer than it meant to: the process was stopped, or held up."""
        if seconds > PAUSE_S:
            for request in self.asked.copy():
                if request.began_s < self.clock() - seconds:
                    request.pause(seconds)

    def look(self) -> float | None:
        """Report what is due. Returns the seconds until the next check, or None if no request is under way."""
        now = self.clock()
        asked = list(self.asked.copy())
        for request in asked:
            self._note(request, now)
        for silence in list(self.silences):
            self._tell(silence, now)
        if self.silences:
            return TICK_S
        if not asked:
            return None
        return max(SHORTEST_S, SILENCE_S - max(request.silent_s(now) for request in asked))

    def _note(self, request: PendingRequest, now: float) -> None:
        """Add a request to the silence that it belongs to. If it is late enough and there is none, begin one."""
        silent_s, notify = request.silent_s(now), self._speaker or request.notify
        found = [one for one in self.silences if one.where == request.where and one.notify == notify]
        for silence in found:
            silence.see(now, is_late=silent_s >= SUSPECT_S)
        if not found and silent_s >= SILENCE_S:
            began_s = now - silent_s
            self.silences.append(_Stall(request.where, notify, began_s, float("-inf"), now, now))

    def _tell(self, silence: _Stall, now: float) -> None:
        lasted_s = now - silence.began_s
        if silence.seen_s < now and self._heard.get(silence.where, 0.0) >= silence.seen_s:
            self.silences.remove(silence)
            _say(silence.notify, f"{readable_server(silence.where)} answers again, after {lasted_s:.0f} s")
        elif now - silence.asked_s > FORGET_S:
            self.silences.remove(silence)
        elif silence.seen_s == now and now - silence.reported_s >= REPEAT_S:
            silence.report_at(now)
            _say(silence.notify, f"waiting: {no_answer(silence.where, lasted_s)}")


def no_answer(where: str, silent_s: float) -> str:
    """Return the sentence for a silent server."""
    seconds = f"{silent_s:.0f}" if silent_s >= 10 else f"{silent_s:.1f}"
    return f"no answer from {readable_server(where)} for {seconds} s: is it stopped, overloaded or cut off?"


def _say(notify: Notify, text: str) -> None:
    with suppress(Exception):  # a failing listener must not prevent the other reports
        notify(text)


STALL_DETECTOR = StallDetector()
"""The stall detector of this process."""
os.register_at_fork(after_in_child=STALL_DETECTOR.forget)
