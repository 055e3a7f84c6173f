"""Other processes for the tests: a function of a test module runs in a separate Python, to be watched and killed."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from tests.contracts.fork_server import Forked, forked


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Interrupt a wait inside the block by a TimeoutError in the main thread after ``seconds``."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Child:
    """A process that runs ``function(*arguments)``. Its output is read line by line."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        call = [function.__module__, function.__name__, *map(str, arguments)]
        self.process = self._started(call, self._errors)
        assert self.process.stdout is not None
        self._stdout = self.process.stdout

    def _started(self, call: list[str], errors: IO[str]) -> Forked | subprocess.Popen[str]:
        return forked(call, errors)

    def line(self) -> str:
        """Return the next line, without its end, or '' at the end of the output."""
        return self._stdout.readline().rstrip("\n")

    def rest(self, timeout_s: float = 30) -> list[str]:
        """Wait for the end, and return all unread lines. The process must succeed."""
        lines = self.finish(timeout_s)
        assert self.process.returncode == 0, self.errors()
        return lines

    def finish(self, timeout_s: float = 30) -> list[str]:
        """Wait for the end, good or bad, for at most ``timeout_s``, and return all unread lines. A process that hangs
        writes the stacks of its threads to stderr as it ends.
        """
        guard = threading.Timer(timeout_s, self._abort)
        guard.start()
        try:
            lines = self._stdout.read().splitlines()
            self.process.wait()
        finally:
            guard.cancel()
        return lines

    def _abort(self) -> None:
        self.process.send_signal(signal.SIGABRT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()  # a process that stands still does not answer a signal

    def kill(self) -> list[str]:
        """Kill it with SIGKILL, and return its unread output."""
        self.process.kill()
        return self.finish()

    def errors(self) -> str:
        """Return all of its stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """End the process if it runs, and remove its files."""
        self.process.kill()
        self.process.wait()
        self._stdout.close()
        self._errors.close()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[Child]:
    """Start a process that does not outlive the block."""
    one = Child(function, *arguments)
    try:
        yield one
    finally:
        one.close()
