"""Other processes for the tests: a function of a test module runs in a Python of its own, to be watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RUN = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Interrupts what is waited for inside, by a TimeoutError in the main thread, once so long has passed."""

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
    """A process that runs ``function(*arguments)``; what it prints is read line by line."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        command = [sys.executable, "-c", _RUN, function.__module__, function.__name__, *map(str, arguments)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT, env=environment
        )

    def line(self) -> str:
        """The next line, without its end; '' at the end of all."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def rest(self, timeout_s: float = 30) -> list[str]:
        """Waits for the end; all lines that were not read yet. The process must have ended well."""
        lines = self.finish(timeout_s)
        assert self.process.returncode == 0, self.errors()
        return lines

    def finish(self, timeout_s: float = 30) -> list[str]:
        """Waits for the end, good or bad, at most so long; all lines that were not read yet."""
        assert self.process.stdout is not None
        guard = threading.Timer(timeout_s, self.process.kill)
        guard.start()
        try:
            lines = self.process.stdout.read().splitlines()
            self.process.wait()
        finally:
            guard.cancel()
        return lines

    def kill(self) -> list[str]:
        """Kill -9; returns what it had printed and nobody read yet."""
        self.process.kill()
        return self.finish()

    def errors(self) -> str:
        """All it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Ends the process if it runs, and gives its files back."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[Child]:
    """A process that does not outlive the block."""
    one = Child(function, *arguments)
    try:
        yield one
    finally:
        one.close()
