"""Another user of the host gets in by no port, file or process of `penstock run` and `penstock server`."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from PIL import Image

from penstock.__main__ import main
from penstock_common.local_servers import LocalServer, read_private
from penstock_common.settings import Settings
from penstock_producer.jobs.worker import WorkerOptions
from tests.contracts.fork_server import ROOT
from tests.journeys import stranger
from tests.journeys.test_demo import family

NOBODY = 65534
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front", "."))


@dataclass
class Household:
    """The processes of one user, their URLs, and the folders in which they keep files."""

    pids: list[int]
    urls: list[str]
    folders: list[Path]

    @property
    def passwords(self) -> list[str]:
        """Return the passwords, which no other user may see."""
        return [url.split(":")[2].split("@")[0] for url in self.urls]

    @property
    def ports(self) -> list[int]:
        """Those that the processes listen on, whatever for."""
        opened = {name for pid in self.pids for name in _opened(pid)}
        tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        return sorted(
            {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in opened}
        )


def _opened(pid: int) -> Iterator[str]:
    """The files and sockets that a process has open, as /proc names them."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(link.readlink())


@contextmanager
def started(words: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command of the user's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**clean, "PYTHONPATH": PATHS, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=30)


def paint(folder: Path) -> None:
    """A few small pictures."""
    folder.mkdir(exist_ok=True)
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture
def household() -> Iterator[Household]:
    """A server with its file, and `penstock run` with segments, in folders that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as made, ExitStack() as stack:
        base = Path(made)
        base.chmod(0o755)
        places = {name: base / name for name in ("tmp", "session", "aof", "segments", "photos")}
        for name, place in places.items():
            place.mkdir()
            place.chmod({"tmp": 0o1777, "session": 0o700}.get(name, 0o755))
        paint(places["photos"])
        environment = {"TMPDIR": str(places["tmp"]), "XDG_RUNTIME_DIR": str(places["session"])}
        server = stack.enter_context(
            started(["server", "--port", "0", "--aof", str(places["aof"])], base, **environment)
        )
        assert server.stdout is not None
        ready = [server.stdout.readline() for _ in range(2)]
        urls = [read_private(Path(ready[1].split()[-1]))]
        words = ["--payload", f"segments:{places['segments']}", "--epochs", "50", "--budget", "1mb", "--workers", "1"]
        command = ["sh", "-c", 'echo "$PENSTOCK_URL"; exec sleep 120']
        run = stack.enter_context(started(["run", "images", "photos", *words, "--", *command], base, **environment))
        assert run.stdout is not None
        urls.append(run.stdout.readline().strip())
        with redis.Redis.from_url(urls[1]) as client:
            deadline = time.monotonic() + 60
            while not list(client.scan_iter("penstock:*:entries")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        pids = [pid for process in (server, run) for pid in (process.pid, *family(process.pid))]
        yield Household(pids, urls, [places[name] for name in ("tmp", "session", "aof", "segments")])


def found_by(household: Household, user: int | None) -> Any:
    """Return what a program of that user finds."""
    tasks = {
        "user": user,
        "pids": household.pids,
        "ports": household.ports,
        "folders": [str(one) for one in household.folders],
    }
    script = str(Path(stranger.__file__))
    done = subprocess.run(
        [sys.executable, "-I", script],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_another_user_reads_writes_and_runs_nothing(household: Household) -> None:
    """Hosts are shared, and a user who can write to the queue can run code as the workers' user."""
    assert len(household.ports) == 2
    # 1. what the owner finds shows that the search works; the rest of it needs no root
    own = found_by(household, None)
    assert all(any(password in text for text in own["processes"]["environ"]) for password in household.passwords[1:])
    assert not [text for text in own["processes"]["cmdline"] if any(word in text for word in household.passwords)]
    assert any("penstock-password" in line for line in own["files"])
    for answers in own["answers"].values():
        assert [answer.split()[0] for answer in answers] == [
            "-WRONGPASS" if words.startswith("AUTH") else "-NOAUTH" for words in stranger.ASKED
        ]
    # 2. what all of them could find
    made = {path: path.lstat().st_mode for folder in household.folders for path in folder.iterdir()}
    assert {path.parent for path in made} == set(household.folders)
    assert {str(path): stat.filemode(mode) for path, mode in made.items() if mode & 0o077} == {}
    # 3. what one of them does find
    if os.geteuid() == 0:
        other = found_by(household, NOBODY)
        assert other["user"] == NOBODY
        assert other["files"] == []
        assert other["answers"] == own["answers"]
        assert set(other["processes"]) <= {"cmdline", "environ"}
        shown = [text for texts in other["processes"].values() for text in texts]
        assert not [text for text in shown if any(word in text for word in household.passwords)]


SAYING: list[list[str]] = [
    ["doctor", "train", "--json", "--all", "--no-probe"],
    ["inspect", "--json"],
    ["inspect", "train"],
    ["inspect", "missing"],
    ["monitor", "train", "--once", "--json"],
    ["audit", "train"],
    ["groups", "list", "train"],
    ["bad", "list", "train"],
]


def test_no_command_says_the_password(
    fresh_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output of a command ends up in logs and public issues, most of all when the server is away."""
    server = fresh_server()
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    paint(tmp_path / "photos")
    said = []
    making = ["produce", "images", str(tmp_path / "photos"), "--workers", "1"]
    with started(making, tmp_path, PENSTOCK_URL=server.url) as process:
        said.append("".join(process.communicate(timeout=60)))
        assert process.returncode == 0, said
    for is_up in (True, False):
        if not is_up:
            server.kill()
        for words in SAYING if is_up else [*SAYING, making]:
            main(words)
            said.append("".join(capfd.readouterr()))
            assert said[-1], words
    assert [text for text in said if server.password[:16] in text] == []
    assert sum(server.address in text for text in said) >= len(SAYING)


@pytest.mark.parametrize(
    "shown",
    [
        WorkerOptions("redis://default:hidden@a", "redis://default:hidden@b"),
        Settings(named_url="redis://default:hidden@a", named_queue_url="redis://default:hidden@b"),
        LocalServer("redis://default:hidden@a", 1, Path("file")),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_holds_a_url_does_not_show_it_in_a_traceback(shown: object) -> None:
    """Debuggers and error reporters print the repr of every local variable."""
    assert "hidden" not in repr(shown) + str(shown)
