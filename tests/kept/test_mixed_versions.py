"""Processes of an earlier commit together with today's, on one stream: a fleet is never updated at once.

The earlier packages are those of a wheel that is built of commit 0be23fc and unpacked into a folder.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

import penstock
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream
from tests.clusters import until
from tests.kept.write import COMMIT
from tests.torn_slots import partition_slot

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 400

pytestmark = pytest.mark.slow
TOGETHER = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
WRITE = """
import sys, time, numpy, penstock

with penstock.Writer("train", spec={"n": ("int64", ()), "x": ("uint8", (512,))}, block_bytes=4096) as writer:
    print("ready", flush=True)
    sys.stdin.readline()
    with writer.epoch(sizes=[200, 200]) as epoch:
        for number in range(2):
            with epoch.shard(number) as shard:
                for n in range(200 * number, 200 * number + 200):
                    shard.write({"n": n, "x": numpy.full(512, n % 251, numpy.uint8)})
                    time.sleep(0.001)
"""
READ = """
import sys, time, penstock

rank = {"order": "canonical", "rank": int(sys.argv[1]), "world_size": 2} if len(sys.argv) > 1 else {}
with penstock.Loader("train", group="resnet", batch_size=8, lease_s=3, **rank) as loader:
    print("ready", flush=True)
    for batch in loader:
        assert (batch["x"].T == batch["n"] % 251).all()
        print(*batch["n"].tolist(), flush=True)
        time.sleep(0.01)
"""
HALF = """
import sys, numpy, penstock

with penstock.Writer("train", spec={"n": ("int64", ()), "x": ("uint8", (512,))}, block_bytes=4096) as writer:
    with writer.epoch() as epoch:
        for n in range(400):
            if n in (100, 200):
                epoch.flush()
                print("ready", flush=True)
                sys.stdin.readline()
            epoch.write({"n": n, "x": numpy.full(512, n % 251, numpy.uint8)})
"""
DATA = """
import numpy

items = range(400)

def augment(n, rng):
    return {"n": n, "x": numpy.full(512, n % 251, numpy.uint8)}
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of the earlier packages, for PYTHONPATH."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False).returncode:
        pytest.skip(f"this clone has no commit {COMMIT}, of which the earlier wheel is built: fetch the whole history")
    folder = tmp_path_factory.mktemp("old")
    archive = subprocess.run([*git, "archive", COMMIT], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder / "source", filter="data")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(build, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    installed = str(folder / "installed")
    where = [sys.executable, "-c", "import penstock; print(penstock.__file__)"]
    found = subprocess.run(
        where, env=os.environ | {"PYTHONPATH": installed}, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(installed)
    return installed


class Programs:
    """Programs of both versions with one server, which are ended with the test."""

    def __init__(self, folder: Path, url: str, old: str, stack: ExitStack) -> None:
        self.folder = folder
        self._environment = {**os.environ, "PENSTOCK_URL": url, "PENSTOCK_SEGMENTS": str(folder / "segments")}
        self._paths = {"old": old, "new": TOGETHER}
        self._stack = stack

    def start(self, version: str, *words: str) -> subprocess.Popen[str]:
        """Start Python with a version's packages."""
        program = subprocess.Popen(
            [sys.executable, *words], env=self._environment | {"PYTHONPATH": self._paths[version]}, cwd=self.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._stack.enter_context(program)
        self._stack.callback(end, program)
        return program

    def ready(self, version: str, *words: str) -> subprocess.Popen[str]:
        """Start a program, and wait until it says that it is ready."""
        program = self.start(version, *words)
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line == "ready\n", (line, program.stderr and program.stderr.read())
        return program

    def run(self, version: str, *words: str) -> str:
        """Run a program to its end, and return what it printed."""
        return ended(self.start(version, *words))


def end(program: subprocess.Popen[str]) -> None:
    """End a program in order. A worker that is killed leaves a process, which takes a job of the next test."""
    program.terminate()
    try:
        program.wait(20)
    except subprocess.TimeoutExpired:
        program.kill()


def ended(program: subprocess.Popen[str]) -> str:
    """Wait for the end of a program, and return what it printed."""
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    return out


def numbers(text: str) -> list[int]:
    """Return the samples of the lines."""
    return [int(word) for word in text.split()]


@pytest.fixture
def programs(tmp_path: Path, any_url: str, old: str) -> Iterator[Programs]:
    """Yield what starts programs of both versions."""
    with ExitStack() as stack:
        yield Programs(tmp_path, any_url, old, stack)


@pytest.fixture
def beside_auto(
    tmp_path: Path, fresh_server: Callable[..., EmbeddedServer], old: str
) -> Iterator[tuple[Programs, EmbeddedServer]]:
    """Yield a starter of programs for a stream of durability `auto`, and its server, which a replica follows."""
    server = fresh_server()
    fresh_server(extra={"replicaof": f"127.0.0.1 {server.port}", "masterauth": server.password})
    with redis.Redis.from_url(server.url) as client:
        until(lambda: client.info("replication").get("slave0", {}).get("state") == "online")
    spec = {"n": ("int64", ()), "x": ("uint8", (512,))}
    with penstock.Writer("train", url=server.url, spec=spec, tuning=penstock.Tuning(block_bytes=4096)) as writer:
        assert writer.stream.durability == "auto"
    with ExitStack() as stack:
        yield Programs(tmp_path, server.url, old, stack), server


@pytest.mark.parametrize("writer", ["old", "new"])
def test_a_stream_with_the_durability_auto_is_written_and_read_by_both_versions(
    beside_auto: tuple[Programs, EmbeddedServer], writer: str
) -> None:
    """An earlier version takes the level for `memory`, and leaves the stream's setting as it is."""
    programs, server = beside_auto
    assert_shared(programs, writer)
    with connect(server.url) as client:
        assert load_stream(client, "train").durability == "auto"


def test_an_earlier_writer_ends_behind_a_loss_with_the_durability_auto(
    beside_auto: tuple[Programs, EmbeddedServer],
) -> None:
    """It keeps nothing to send again, and must not leave a hole."""
    programs, server = beside_auto
    writing = programs.ready("old", "-c", HALF)
    assert writing.stdin is not None
    assert writing.stdout is not None
    with connect(server.url) as client:
        before = partition_slot(client, load_stream(client, "train"), 0)
        writing.stdin.write("\n")
        writing.stdin.flush()
        assert writing.stdout.readline() == "ready\n"
        before.restore(client)
        client.client_kill_filter(_type="normal", skipme=True)
    _, said = writing.communicate("\n", timeout=60)
    assert writing.returncode == 1
    assert said.splitlines()[-1].startswith("penstock"), said
    assert "ShardMismatch" in said.splitlines()[-1]
    assert "the server lost data" in said


def assert_shared(programs: Programs, writer: str) -> None:
    """Assert that members of both versions give the samples of a writer once, and that each gives some."""
    written = programs.ready(writer, "-c", WRITE)
    members = [programs.ready(version, "-c", READ) for version in ("old", "new")]
    ended(written)
    given = [numbers(ended(member)) for member in members]
    assert all(given)
    assert sorted(given[0] + given[1]) == list(range(SAMPLES))
    is_clean(programs)


def is_clean(programs: Programs) -> None:
    """Assert that the audit finds every sample once."""
    assert "clean: lost 0, duplicate 0" in programs.run("new", "-m", "penstock", "audit", "train", "--deep")


@pytest.mark.parametrize("writer", ["old", "new"])
def test_members_of_both_versions_share_a_group(programs: Programs, writer: str) -> None:
    """A rolling upgrade of trainers gives each sample to one of them, whichever version wrote it."""
    assert_shared(programs, writer)


@pytest.mark.parametrize(("killed", "left"), [("old", "new"), ("new", "old")])
def test_a_member_takes_over_from_a_killed_one_of_the_other_version(programs: Programs, killed: str, left: str) -> None:
    """A host that dies during the upgrade loses nothing."""
    written = programs.ready(killed, "-c", WRITE)
    first, second = programs.ready(killed, "-c", READ), programs.ready(left, "-c", READ)
    assert written.stdin is not None
    written.stdin.write("\n")
    written.stdin.flush()
    assert first.stdout is not None
    given = [number for _ in range(3) for number in numbers(first.stdout.readline())]
    first.send_signal(signal.SIGKILL)
    given += numbers(first.communicate()[0].rpartition("\n")[0])
    ended(written)
    taken_over = numbers(ended(second))
    assert set(given) | set(taken_over) == set(range(SAMPLES))
    assert len(taken_over) == len(set(taken_over))
    is_clean(programs)


@pytest.mark.parametrize("writer", ["old", "new"])
def test_ranks_of_both_versions_read_in_step(programs: Programs, writer: str) -> None:
    """In canonical order each rank knows its batches, so both versions must place them alike."""
    written = programs.ready(writer, "-c", WRITE)
    ranks = [programs.ready(version, "-c", READ, str(rank)) for rank, version in enumerate(("old", "new"))]
    ended(written)
    given = [numbers(ended(rank)) for rank in ranks]
    assert [given[at // 8 % 2][at // 16 * 8 + at % 8] for at in range(SAMPLES)] == list(range(SAMPLES))
    is_clean(programs)


@pytest.mark.parametrize(("producer", "worker"), [("old", "new"), ("new", "old")])
def test_workers_of_the_other_version_make_queued_jobs(programs: Programs, producer: str, worker: str) -> None:
    """Workers on other hosts are upgraded before or after the producer."""
    (programs.folder / "data.py").write_text(DATA)
    programs.start(worker, "-m", "penstock", "worker", "--processes", "1", "--allow", "data")
    source = ("dataset", "data:items", "--transform", "data:augment", "--workers", "0", "--no-shuffle")
    assert f"{SAMPLES} samples, 0 bad" in programs.run(producer, "-m", "penstock", "produce", *source)
    assert numbers(programs.run(producer, "-c", READ).partition("\n")[2]) == list(range(SAMPLES))
    is_clean(programs)
