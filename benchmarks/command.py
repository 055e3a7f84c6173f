"""The ``penstock`` command, in this process or in another one, for functions without public names."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAVE_S = 30.0


def penstock(*arguments: object, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command in this process, so that no clock includes its start, and return its output.

    Raises RuntimeError if it ends with another exit code than ``codes``.
    """
    (command,) = entry_points(group="console_scripts", name="penstock")
    main = command.load()
    said, noticed = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(noticed):
        code = main([*map(str, arguments)])
    if code not in codes:
        words = noticed.getvalue().strip().splitlines()[-1:]
        raise RuntimeError(f"penstock {' '.join(map(str, arguments))} ended with {code}: {words}")
    return said.getvalue()


class Workers:
    """``penstock worker``: processes that do the jobs on a private server of the benchmark, until they are stopped."""

    def __init__(self, url: str, count: int) -> None:
        command = [sys.executable, "-m", "penstock", "worker", "--processes", str(count), "--allow-any", "--url", url]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ},
            start_new_session=True,
        )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Return the pid of the process that started the workers."""
        return [self._process.pid]

    def stop(self) -> None:
        """Stop the workers."""
        self._process.terminate()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
