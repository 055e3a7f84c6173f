"""The parent of an embedded server: it ends the server when the owner asks, or when the owner is gone for any reason.

It runs as a script in a session of its own, with the standard library alone. The owner holds the only other end of
stdin: any byte, or its end, means stop. Forked children of the owner may keep that end open, so the parent's pid is
watched, too. Unlike PR_SET_PDEATHSIG, that pid does not depend on the thread that started this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

POLL_S = 0.25
"""The time between two reads of the owner's pid. Every other event wakes this process at once."""

_PR_SET_PDEATHSIG = 1


def watch(owner: int, home: str, grace_s: float, command: list[str]) -> int:
    """Run ``command`` until it ends or must end. Then remove ``home``, whose log the owner may read before that."""
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    pid = _start(command)
    with contextlib.suppress(BrokenPipeError):  # the owner is gone already: the loop finds out
        os.write(1, f"{pid}\n".encode())
    os.dup2(2, 1)
    while True:
        ready, _, _ = select.select([0, wake], [], [], POLL_S)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _exit_code(status)
        signals = os.read(wake, 64) if wake in ready else b""
        if 0 in ready or signals.strip(bytes([signal.SIGCHLD])) or os.getppid() != owner:
            break
    _end(pid, grace_s)
    _remove(home)
    return 0


def _wake_on(*signals: signal.Signals) -> int:
    """Return a descriptor that becomes readable with the number of each of these signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


def _start(command: list[str]) -> int:
    # Linux only: ends the server when this process is killed. It is set here, because the only thread runs here.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    pid = os.fork()
    if pid:
        return pid
    try:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.execv(command[0], command)  # noqa: S606 - no shell is what we want
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _end(pid: int, grace_s: float) -> None:
    """Ask the server to end if it has something to write (an append-only file), otherwise kill it."""
    deadline = time.monotonic() + grace_s
    if grace_s:
        os.kill(pid, signal.SIGTERM)
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _remove(home: str) -> None:
    import shutil  # late, because it takes half of this script's start and only this line needs it

    shutil.rmtree(home, ignore_errors=True)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
