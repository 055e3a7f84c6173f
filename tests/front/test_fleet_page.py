"""The pages on fleets and on watched folders: their commands run together, against one server."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis
from PIL import Image
from rq import Queue

from penstock_common.errors import PenstockError
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.explain.snapshot import StreamSnapshot
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import find_stream
from penstock_common.stream.watched_files import load_watched

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / name).read_text() for name in ("fleet.md", "watch-folder.md"))
COMMANDS = re.findall(r"^```sh\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
(TEAM,) = re.findall(r"^```python team\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make a folder with the module of the page, and with pictures."""
    (tmp_path / "team.py").write_text(TEAM)
    (tmp_path / "incoming").mkdir()
    for shade in range(3):
        Image.fromarray(np.full((40, 30, 3), shade, np.uint8)).save(tmp_path / "incoming" / f"{shade}.png")
    return tmp_path


def begin(text: str, url: str, cwd: Path) -> subprocess.Popen[str]:
    """Start one of the page's commands."""
    name, *words = shlex.split(text)
    assert name == "penstock"
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
    environment = {**os.environ, "PENSTOCK_URL": url, "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *words], cwd=cwd, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def view(url: str) -> StreamSnapshot | None:
    """Return the stream, once it exists."""
    with connect(url) as client:
        try:
            return StreamMonitor(client, "train").snapshot()
        except PenstockError:
            return None


def produced(url: str) -> int:
    """Return the complete epochs."""
    found = view(url)
    return sum(epoch.state == "produced" for epoch in found.epochs) if found is not None else 0


def is_made(url: str) -> bool:
    """Return whether the watcher has made an epoch, and noted it."""
    with connect(url) as client:
        stream = find_stream(client, "train")
        watched = stream and load_watched(client, stream)
        return bool(watched and watched.epochs and not watched.due)


def end(*processes: subprocess.Popen[str]) -> list[str]:
    """Send SIGTERM, and return the outputs. Each command must end well."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    said = []
    for process in processes:
        try:
            said.append("".join(process.communicate(timeout=90)))
        finally:
            process.kill()
        assert process.returncode in (0, 130), said[-1]
        assert "Traceback" not in said[-1]
    return said


def test_the_commands_of_the_page_do_what_it_says(any_url: str, place: Path) -> None:
    """The copied commands make a fleet: queued epochs are made, follow their trainers, or follow a folder."""
    queue, worker, auto, follow, watch = COMMANDS
    fleet = [begin(worker, any_url, place), begin(auto, any_url, place)]
    queued = begin(queue, any_url, place)
    out, err = queued.communicate(timeout=180)
    assert queued.returncode == 0, err
    assert out.startswith("produced 3 epochs of 'train': 600 samples, 0 bad")
    assert re.search(r"^epoch 2  100%  200/200 samples", err, re.MULTILINE)
    following = begin(follow, any_url, place)
    try:
        deadline = time.monotonic() + 180
        while "--ahead is 2" not in (line := following.stderr.readline()):  # type: ignore[union-attr]
            assert time.monotonic() < deadline, line
        assert produced(any_url) == 3  # no group reads: three epochs exist already, and it makes no more
    finally:
        end(following, *fleet)
    with connect(any_url) as client:
        client.flushall()
    watching = begin(watch, any_url, place)
    deadline = time.monotonic() + 180
    while not is_made(any_url):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (said,) = end(watching)
    assert "watched incoming/: 3 new files, 1 new epochs of 'train'" in said


def test_rq_info_needs_no_password_on_its_command_line(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """Every user of the host can read command lines, and a user who can write to the queue can write jobs."""
    (told,) = re.findall(r"`([^`]*\brq info)` lists", PAGE)
    bare, url = told.split()[-2:], fresh_server().url
    assert bare == ["rq", "info"]
    assert "@" in url, "the server asks for a password"
    with redis.Redis.from_url(url) as client:
        Queue("penstock.test", connection=client).enqueue("json.loads", "1")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PENSTOCK_QUEUE_URL": url}
    done = subprocess.run(
        ["bash", "-c", told], check=False, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "penstock.test" in done.stdout
