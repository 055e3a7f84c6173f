"""`penstock health` with real workers and trainers: alive, stopped, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.__main__ import main

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
TRAINER = (
    "import sys, time, penstock\n"
    "with penstock.Loader('train', group=sys.argv[1], batch_size=2, **eval(sys.argv[2])) as loader:\n"
    "    next(iter(loader))\n"
    "    time.sleep(600)\n"
)
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(any_url: str) -> Iterator[Start]:
    """Start Python with the server's URL, in a separate process group."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": _PATHS, "PENSTOCK_URL": any_url}
        process = subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True)
        running.append(process)
        return process

    yield begin
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(*arguments: str) -> bool:
    """Return the answer of `penstock health`, with a limit that keeps the test short."""
    return main(["health", *arguments, "--within", "4"]) == 0


def becomes(expected: bool, *arguments: str) -> None:
    """Wait until the answer is the wanted one."""
    deadline = time.monotonic() + 60
    while healthy(*arguments) != expected:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_worker_is_healthy_until_it_is_stopped(
    start: Start, any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container engine restarts what its health check reports, and a stopped process looks alive otherwise."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    assert not healthy("worker")
    assert "there is no worker of host" in capsys.readouterr().err
    worker = start("-m", "penstock", "worker", "--processes", "1", "--allow-any")
    becomes(True, "worker")
    assert not healthy("worker", "--queue", "other")
    os.killpg(worker.pid, signal.SIGSTOP)
    becomes(False, "worker")
    os.killpg(worker.pid, signal.SIGCONT)
    becomes(True, "worker")


def test_a_trainer_is_healthy_until_it_is_stopped(
    start: Start, any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long step is no reason for an alarm, because a thread gives heartbeats, but a process that hangs is."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    what = ["trainer", "train", "--group", "resnet"]
    assert not healthy(*what)
    spec: dict[str, tuple[str, tuple[int | None, ...]]] = {"x": ("uint8", (3,))}
    with penstock.Writer("train", spec=spec) as writer, writer.epoch(sizes=[4]) as epoch, epoch.shard(0) as shard:
        for _ in range(4):
            shard.write({"x": np.zeros(3, np.uint8)})
    assert not healthy(*what)
    trainer = start("-c", TRAINER, "resnet", "{}")
    start("-c", TRAINER, "ranks", "{'order': 'canonical'}")
    becomes(True, *what)
    becomes(True, "trainer", "train", "--group", "ranks", "--member", "rank-0")
    assert not healthy("trainer", "train", "--group", "ranks", "--member", "rank-1")
    assert not healthy("trainer", "train", "--group", "other")
    trainer.send_signal(signal.SIGSTOP)
    becomes(False, *what)
    assert "expected one in the last 4 s" in capsys.readouterr().err
    trainer.send_signal(signal.SIGCONT)
    becomes(True, *what)
