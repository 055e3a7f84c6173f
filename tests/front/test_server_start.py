"""A server that is slow to start: the command reports it, and does not look hung."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from penstock_common.stream.servers.embedded import find_servers
from tests.front.test_cli_produce import start

PROMISED_S, LATE_S = 5.0, 1.5


def test_a_server_that_stands_still_while_it_starts_is_named(tmp_path: Path) -> None:
    """`penstock run`, `demo` and `server` begin with it, and once printed nothing for twenty seconds."""
    executable = tmp_path / "redis-server"
    pid_file = tmp_path / "pid"
    executable.write_text(
        f'#!/bin/sh\ncase "$1" in -*) ;; *) echo $$ > {pid_file}; kill -STOP $$;; esac\nexec {find_servers()[0]} "$@"\n'
    )
    executable.chmod(0o755)
    server = start("server", "--port", "0", "--executable", str(executable), cwd=tmp_path)
    assert server.stderr is not None
    assert server.stdout is not None
    try:
        while not pid_file.exists() or not pid_file.read_text().strip():
            assert server.poll() is None, server.stderr.read()
            time.sleep(0.01)
        began_s = time.monotonic()
        line = server.stderr.readline()
        assert time.monotonic() - began_s < PROMISED_S + LATE_S
        assert re.match(r"penstock: waiting: redis://127\.0\.0\.1:\d+, which was just started, to answer", line), line
        os.kill(int(pid_file.read_text()), signal.SIGCONT)
        assert " is ready at redis://" in server.stdout.readline()
    finally:
        server.terminate()
        server.communicate(timeout=30)
    assert server.returncode == 0


def test_a_second_server_is_told_that_the_first_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who repeats the start means the running server, and needs neither another port nor another password."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = start("server", "--port", "0", cwd=tmp_path)
    assert first.stdout is not None
    try:
        ready = re.search(r" is ready at redis://127\.0\.0\.1:(\d+)", first.stdout.readline())
        assert ready is not None
        first.stdout.readline()  # where it was announced
        second = start("server", "--port", ready[1], cwd=tmp_path)
        _, said = second.communicate(timeout=30)
        assert (second.returncode, len(said.splitlines())) == (1, 1)
        assert f"runs already at redis://127.0.0.1:{ready[1]}, and your Python programs find it; " in said
        assert f'Node programs: `export PENSTOCK_URL="$(penstock server --print-url --port {ready[1]})"`' in said
    finally:
        first.terminate()
        first.communicate(timeout=30)
