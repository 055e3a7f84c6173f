"""`penstock demo` as a new user runs it: it ends well, reports what happened, and leaves nothing behind in any case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a demo."""
    command = [sys.executable, "-m", "penstock", "demo", *arguments]
    environment = {**os.environ, "PYTHONPATH": FOLDERS, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def family(pid: int) -> list[int]:
    """Return the processes below one, at any depth."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        children = [child for child, above in parents.items() if above == parent]
        found += children
        todo += children
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["numpy", "keras"])
def test_the_demo_ends_with_nothing_lost(trainer: str, tmp_path: Path) -> None:
    """A new user first runs the whole job, here with fewer samples to save time."""
    if trainer == "keras":
        pytest.importorskip("tensorflow")
    kept = tmp_path / "digits"
    arguments = ("--samples", "300", "--epochs", "2", "--trainer", trainer, "--keep", str(kept), "--json")
    with demo(*arguments) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    told: dict[str, Any] = json.loads(out)
    audit = told["audit"]
    assert audit["produced"] == 2 * 240
    assert list(audit["delivered"].values()) == [480, 480]
    assert [audit[name] for name in ("lost", "duplicate", "pending", "bad")] == [0, 0, 0, 0]
    assert len({*told["worker_pids"], *told["trainer_pids"]}) == 4
    assert told["look_inside"]["output"] is None or "pending" in told["look_inside"]["output"]
    assert {file.suffix for file in kept.rglob("*") if file.is_file()} == {".jpg", ".png", ".webp"}
    assert len(list((kept / "train").iterdir())) == 10
    assert "Traceback" not in err
    assert "\x1b" not in err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_the_demo_outlives_it(how: signal.Signals) -> None:
    """Workers, trainers and a server that stay behind would use up a new user's machine."""
    with demo("--trainer", "numpy") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "now starting" in line:
                break
        below = family(process.pid)
        assert len(below) >= 5  # a server and its watcher, two workers, two trainers
        shown = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
        assert not [pid for pid, line in shown.items() if b"default:" in line]  # the password of the server
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
        code = process.returncode
    assert code == (-signal.SIGKILL if how is signal.SIGKILL else 130)
    assert "Traceback" not in err
    deadline = time.monotonic() + 30
    while (left := [pid for pid in below if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
