"""Waits that explain themselves. Within 5 s a line gives the reason, a new line follows when the reason changes, and a
timeout ends the wait.

The caller knows the reason, and chooses where lines go.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from penstock_common.errors import ServerLoading, ServerUnavailable, WaitTimeout
from penstock_common.printable import printable
from penstock_common.stall_detector import (
    REPEAT_S,
    STALL_DETECTOR,
    Clock,
    Notify,
    StallDetector,
    no_answer,
)

__all__ = [
    "AT_ONCE_S",
    "FIRST_WORD_S",
    "LEAVE_S",
    "OUTAGE_S",
    "REPEAT_S",
    "WAITING",
    "Clock",
    "Notify",
    "Outage",
    "Wait",
    "to_stderr",
    "told_if_long",
]

FIRST_WORD_S = 3.0
"""The time after which a wait gives its reason. So no wait is silent for more than 5 s."""
LEAVE_S = 2.0
"""The time for which closing waits for a server that is away."""
AT_ONCE_S = 0.3
"""The time for any part of an end without a call of `close`: Ctrl-C, an error, the end of the program."""
BETWEEN_TRIES_S = 0.5
WAITING = "waiting: "
"""The start of what a `Wait` reports."""
OUTAGE_S = 60.0
"""The time for which a request to a lost server is repeated. It outlasts a restart, a failover or a minute of
silence.
"""


def to_stderr(text: str) -> None:
    """Write a notice to stderr as one line, which a notebook and a log both show. This is the default of ``notify``.

    A terminal or a pipe that is gone, or was closed, must not end a training, nor a thread that renews its leases.
    """
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"penstock: {printable(text)}\n")
            sys.stderr.flush()


@contextmanager
def told_if_long(notify: Notify, reason: str) -> Iterator[None]:
    """Give the reason of a wait if the block takes long. The block runs code of the user, so no loop can call `Wait`.

    The thread that does it has ended when the block ends: the caller may fork.
    """
    timer = threading.Timer(FIRST_WORD_S, notify, [f"{WAITING}{reason}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class Wait:
    """One wait of one caller. Call `because` in each turn of the loop, and `over` when the wait ends."""

    def __init__(
        self,
        notify: Notify = to_stderr,
        timeout_s: float | None = None,
        clock: Clock = time.monotonic,
        *,
        server: str = "",
        detector: StallDetector = STALL_DETECTOR,
    ) -> None:
        """Begin a wait. ``server`` is the address of the server that shows whether the wait is over.

        While that server owes an answer, the stall detector names it, and this wait names no other cause.
        """
        self._notify = notify
        self._server, self._detector = server, detector
        self._clock = clock
        self._timeout_s = timeout_s
        self._began = clock()
        self._said_at_s: float | None = None
        self._said = ""

    @property
    def seconds(self) -> float:
        """The time that this wait has lasted."""
        return self._clock() - self._began

    def because(
        self,
        kind: str,
        reason: Callable[[], str],
        timeout_s: float | None = None,
        *,
        first_word_s: float = FIRST_WORD_S,
    ) -> None:
        """Report the reason, if a line is due. Raises WaitTimeout with the same reason.

        ``kind`` identifies the reason. ``reason`` describes it, and is called only when it is needed. ``timeout_s``
        replaces the wait's own. ``first_word_s`` is the time of the first line: 0 if the wait is probably a mistake.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if limit is not None and self.seconds >= limit:
            silent_s = self._detector.silent_s(self._server)
            why = no_answer(self._server, silent_s) if silent_s else reason()
            raise WaitTimeout(f"gave up after {self.seconds:.0f} s: {why}")
        now = self._clock()
        due = first_word_s if self._said_at_s is None else REPEAT_S
        since = self._began if self._said_at_s is None else self._said_at_s
        changed = self._said_at_s is not None and kind != self._said and now - self._said_at_s >= FIRST_WORD_S
        if (now - since >= due or changed) and not self._is_server_late():
            why = reason()  # it may ask the server, and meet its silence
            if not self._is_server_late():
                self._said_at_s, self._said = now, kind
                self._notify(f"{WAITING}{why}")

    def _is_server_late(self) -> bool:
        """Return whether the server owes an answer, or owed one a moment ago. Its facts then explain nothing."""
        return self._detector.clock() - self._detector.late_at(self._server) < FIRST_WORD_S

    def over(self) -> None:
        """Start again: the next wait is another one."""
        self._began, self._said_at_s, self._said = self._clock(), None, ""


class Outage:
    """A server that is away, or takes no writes.

    It is reported, waited for until a limit, and then raised as an error.
    """

    def __init__(
        self,
        notify: Notify,
        patience_s: float | None = None,
        doing: str = "waiting",
        clock: Clock = time.monotonic,
        *,
        what: str = "",
    ) -> None:
        """Begin with no outage.

        Notices say what the process is ``doing``, and ``what`` the server has. The error says ``what``, too.
        """
        self._notify, self._doing, self._clock, self._what = notify, f"{doing} {what}".rstrip(), clock, what
        self.patience_s = OUTAGE_S if patience_s is None else patience_s
        """The limit; see `limit_patience`."""
        self._began: float | None = None
        self._failed_s = 0.0
        """The time of the first failure. `_began` is later while a server loads its data."""
        self._said_at_s, self._said = 0.0, ""
        self._pause_s = 0.0

    def limit_patience(self, patience_s: float) -> None:
        """Set another limit, also during an outage: a process that ends does not wait."""
        self.patience_s = patience_s

    def bear(self, error: ServerUnavailable) -> None:
        """Wait after a failure until it is time to try again. Raises the error once the outage lasts too long.

        A server that reports that it loads its data is alive, so that time does not count. A failure that a lower layer
        has already waited for is raised at once.
        """
        now = self._clock()
        if self._began is None:
            self._failed_s = now
        if self._began is None or isinstance(error, ServerLoading):
            self._began = now
        elif now - self._began > self.patience_s:
            raise error.borne(now - self._began).of(self._what)
        if error.borne_s >= self.patience_s:
            raise error.of(self._what)
        self._tell(error, now, self._began + self.patience_s - now)
        time.sleep(self._pause_s)
        self._pause_s = min(max(0.02, self._pause_s * 2), BETWEEN_TRIES_S)

    def _tell(self, error: ServerUnavailable, now: float, left_s: float) -> None:
        kind = type(error).__name__
        if kind == self._said and now - self._said_at_s < REPEAT_S:
            return
        self._said, self._said_at_s = kind, now
        if isinstance(error, ServerLoading):
            self._notify(f"waiting, to go on {self._doing}: {error}")
            return
        what = "the server refused" if error.is_said else "the connection broke"
        self._notify(f"{what} while {self._doing} ({error}); trying again for {left_s:.0f} s")

    def over(self) -> None:
        """Note that the server answered. An outage that was reported gets a line about its end."""
        if self._said:
            self._notify(f"the server answers again, after {self._clock() - self._failed_s:.0f} s ({self._doing})")
        self.forget()

    def forget(self) -> None:
        """Begin again with no outage, and report nothing."""
        self._began, self._said, self._pause_s = None, "", 0.0


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait until a thread has ended.

    Returns at once in that thread itself, and for a thread that was never started.
    """
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout_s)
