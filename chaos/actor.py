"""One process of a run: kill it, stop it, continue it, and record its life as it happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from chaos.journal import read_journal
from chaos.lives import FAILED, KILLED, LEFT, Life

TRACKER = "resource_tracker"
"""A helper process of multiprocessing that does no jobs."""


class Actor:
    """A child process in a session of its own, with its output in files."""

    def __init__(self, life: Life, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.life = life
        self.name = life.journal.stem
        self._stopped_ns = 0
        self.is_leaving = False
        """Whether it was asked to leave."""
        with life.journal.with_suffix(".out").open("ab") as out, self.errors_file.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    @property
    def errors_file(self) -> Path:
        """Return the file that holds its stderr."""
        return self.life.journal.with_suffix(".err")

    @property
    def is_stopped(self) -> bool:
        """Return whether SIGSTOP stopped it and nothing has continued it yet."""
        return bool(self._stopped_ns)

    @property
    def has_begun(self) -> bool:
        """Return whether it has joined its group, or committed its first samples."""
        return any(line.letter == "B" for line in islice(read_journal(self.life.journal), 9))

    def kill(self) -> None:
        """Kill it with SIGKILL, which is recorded before it happens."""
        now = time.monotonic_ns()
        self._note_stop(now)
        self.life.ended_ns, self.life.ending = now, KILLED
        self.process.kill()

    def stop(self) -> None:
        """Send SIGSTOP."""
        if not self._stopped_ns:
            self._stopped_ns = time.monotonic_ns()
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it with SIGCONT."""
        if self._stopped_ns:
            self.process.send_signal(signal.SIGCONT)
            self._note_stop(time.monotonic_ns())

    def terminate(self) -> None:
        """Ask it to leave."""
        self.is_leaving = True
        self.process.terminate()

    def poll(self) -> int | None:
        """Return its exit code once it has ended, and record an end that no fault caused."""
        code = self.process.poll()
        if code is not None and not self.life.ending:
            # it was signalled before it could react to signals
            left = code == 0 or (self.is_leaving and code == -signal.SIGTERM)
            self.life.ended_ns, self.life.ending = time.monotonic_ns(), LEFT if left else FAILED
        return code

    def workers(self) -> list[int]:
        """Return the process ids of its children that do jobs."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [int(pid) for pid in listed.read_text().split()] if listed.exists() else []
        return [pid for pid in pids if TRACKER not in _command(pid)]

    def show_stacks(self) -> None:
        """Make it and its workers print the stacks of all their threads."""
        for pid in (self.process.pid, *self.workers()):
            signal_if_there(pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill it with all its children, at the very end of a run."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self, lines: int = 3) -> str:
        """Return the end of its stderr on one line."""
        text = self.errors_file.read_text(errors="replace") if self.errors_file.exists() else ""
        return " | ".join(text.strip().splitlines()[-lines:])

    def _note_stop(self, now_ns: int) -> None:
        if self._stopped_ns:
            self.life.stops.append((self._stopped_ns, now_ns))
            self._stopped_ns = 0


def signal_if_there(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return TRACKER  # the process has ended
