"""Run tests in forks of one process, which has imported what most tests need except the code that is changed.

It reads a line for each run from standard input, ``[arguments of pytest, limit in seconds]``, and answers with a line,
``[exit code or null, lines that pytest printed]``. Null stands for a run that took longer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress

import hypothesis
import numpy
import pydantic
import pytest
import redis

IMPORTED = (hypothesis, numpy, pydantic, redis)
LOOK_S = 0.02
# pytest warns of plugins that are imported before it, and the project makes errors of warnings.
NO_WARNING = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def main() -> None:
    """Run tests for each line of standard input."""
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)


def _run(arguments: list[str], limit_s: float) -> tuple[int | None, list[str]]:
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            outcome = 3  # pytest's own code for an error inside of it
            try:
                outcome = int(pytest.main([*NO_WARNING, *arguments]))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(outcome)
        code = _code(pid, time.monotonic() + limit_s)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if code is None:
            os.waitpid(pid, 0)
        output.seek(0)
        return code, output.read().splitlines()


def _code(pid: int, end: float) -> int | None:
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(LOOK_S)
    return None


if __name__ == "__main__":
    main()
