"""A Python that has imported Penstock, and forks one process for each function that a test wants to run in one.

A new Python needs half a second of CPU for these imports, and the tests start more than 300 such processes.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_FORK = """
import faulthandler, importlib, sys
import pytest, hypothesis, penstock, penstock.__main__, penstock_producer.jobs.worker
from tests.contracts.fork_server import serve

faulthandler.enable()
for name in penstock.__all__:
    getattr(penstock, name)
module, function, *arguments = serve(int(sys.argv[1]))
getattr(importlib.import_module(module), function)(*arguments)
"""
"""The function runs on the top level, so that the process ends as every Python does: by a traceback, by the signal of
Ctrl-C, or after the functions of ``atexit``.
"""


class Forked:
    """A process of the server. Of ``subprocess.Popen`` it has what the tests use."""

    def __init__(self, answer: socket.socket, stdout: IO[str]) -> None:
        self._answer = answer.makefile()
        self._reading = threading.Lock()  # several threads may wait
        self.stdout = stdout
        self.pid = int(self._answer.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None as long as it runs."""
        return self.returncode if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        if not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        assert self.returncode is not None
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self._answer], [], [], timeout)[0]:
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(self._answer.readline())
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended. It may end before its exit code is here."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def forked(call: list[str], errors: IO[str]) -> Forked:
    """Start a process that runs ``call``, a module with a function and its arguments, in this process's environment."""
    mine, its = socket.socketpair()
    reading, writing = os.pipe()
    with its, mine:
        socket.send_fds(_server(), [b"."], [its.fileno(), writing, errors.fileno()])
        os.close(writing)
        mine.sendall(json.dumps([call, dict(os.environ)]).encode() + b"\n")
        return Forked(mine, os.fdopen(reading))


@cache
def _server() -> socket.socket:
    """Start the server of this process. It ends when the socket is closed."""
    mine, its = socket.socketpair()
    with its:
        command = [sys.executable, "-c", _FORK, str(its.fileno())]
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=unbuffered, pass_fds=[its.fileno()])
    atexit.register(process.wait)
    atexit.register(mine.close)  # this is done first
    return mine


def serve(fd: int) -> list[str]:
    """Fork for each order, and return in the new process, with the call that it asks for.

    Each process has a second one beside it, which waits for its end and tells its exit code.
    """
    orders = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        message, (*fds,), *_ = socket.recv_fds(orders, 1, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            return _ordered(*fds)
        for each in fds:
            os.close(each)


def _ordered(answer_fd: int, stdout: int, stderr: int) -> list[str]:
    """Return in a new process of an order. This process tells its number and its exit code, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=answer_fd) as answer, answer.makefile() as told:
        call, environment = json.loads(told.readline())
        pid = os.fork()
        if pid:
            os.close(stdout)
            answer.sendall(f"{pid}\n".encode())
            _, status = os.waitpid(pid, 0)
            answer.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
    for new, old in ((stdout, 1), (stderr, 2)):
        os.dup2(new, old)
        os.close(new)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = call
    return sys.argv[1:]
