"""Three prepared situations with real processes: the cause that one screen names, and that its typed remedy helps."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.stream.groups import presence
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.contracts.fork_server import ROOT
from tests.contracts.processes import child
from tests.tuned import tuned

PATIENCE_S = 90.0
SPEC = {"x": ("uint8", (1000,)), "y": ("int64", ())}
LARGE = {"x": ("uint8", (50_000,))}
_PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))

SOURCE = """
import time
import numpy as np

data = [(np.full(1000, i % 251, np.uint8), i) for i in range(100_000)]

def slow(sample, rng):
    time.sleep(0.05)
    return sample
"""


def train(url: str, stream: str, batch_size: str, step_s: str) -> None:
    """Trains on and on; a step takes so long."""
    with penstock.Loader(stream, group="resnet", batch_size=int(batch_size), url=url) as loader:
        while True:
            for _ in loader:
                time.sleep(float(step_s))


def member(url: str, stream: str, name: str, rank: str, way: str) -> None:
    """Join a group with a long lease, as on a separate host. It ``holds`` a batch for ever, or reads an epoch."""
    presence._PROC = Path("/proc/none")
    ranks: dict[str, Any] = (
        {"order": "canonical", "rank": int(rank), "world_size": 2} if rank != "-" else {"member": name}
    )
    with penstock.Loader(
        stream,
        group="resnet",
        batch_size=5,
        url=url,
        **tuned("Loader", ranks, penstock.Tuning(lease_s=300, prefetch_bytes=5000)),
    ) as loader:
        for _ in loader:
            if way == "holds":
                print("has", flush=True)
                time.sleep(PATIENCE_S)
    print("read", flush=True)


def write(url: str, stream: str, payload: str, limit: str) -> None:
    """Write without an end. If no file system could be mounted, ``limit`` refuses files like a full one."""
    root, real = Path(payload.partition(":")[2]), os.posix_fallocate

    def fallocate(fd: int, offset: int, length: int) -> None:
        if sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) + length > int(limit):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    if int(limit):
        os.posix_fallocate = fallocate
    with penstock.Writer(stream, url=url, spec=LARGE, budget_bytes=16 << 20, payload=payload) as writer:
        for number in range(100_000):
            writer.write({"x": np.full(50_000, number % 251, np.uint8)})


@contextmanager
def command(cwd: Path, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a penstock command during the test."""
    environment = {**os.environ, "PYTHONPATH": _PATHS}
    ran = subprocess.Popen(
        [sys.executable, "-m", "penstock", *argv], cwd=cwd, env=environment, stderr=subprocess.DEVNULL
    )
    try:
        yield ran
    finally:
        ran.terminate()
        ran.wait(timeout=60)


Look = Callable[..., dict[str, Any]]


@pytest.fixture
def until(capsys: pytest.CaptureFixture[str]) -> Look:
    """Read a stream's screen until it names one of these causes, in these words, and this number of workers."""

    def look(url: str, stream: str, *causes: str, words: tuple[str, ...] = (), workers: int = 0) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        found: dict[str, Any] = {}
        while time.monotonic() < end:
            capsys.readouterr()
            if main(["monitor", stream, "--once", "--every", "0.5", "--json", "--url", url]) == 0:
                (found,) = json.loads(capsys.readouterr().out)
                told = found["bottleneck"]
                is_named = told["cause"] in causes and all(word in told["text"] for word in words)
                if is_named and found["staffing"]["workers"] >= workers:
                    return found
            time.sleep(0.3)
        raise AssertionError(f"{causes} was never named, but {found.get('bottleneck')}")

    return look


def typed(remedy: str) -> list[str]:
    """Return the words of a remedy, after a shell has inserted the URL."""
    (line,) = [part for part in remedy.split("; ") if not part.startswith("df ")]
    return shlex.split(os.path.expandvars(line))


def committed(found: dict[str, Any]) -> int:
    """Return the samples of all epochs that a screen counts."""
    return sum(epoch["committed"] for epoch in found["epochs"])


def test_slow_producers_are_named_with_the_workers_that_would_do(
    any_url: str, tmp_path: Path, until: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the most frequent question: why does my GPU idle, and what do I type?"""
    monkeypatch.setenv("PENSTOCK_URL", any_url)  # a remedy names no URL that holds a password
    (tmp_path / "photos.py").write_text(SOURCE)
    making = ["dataset", "photos:data", "--transform", "photos:slow", "--workers", "1", "--url", any_url]
    with command(tmp_path, "produce", *making, "--queue-url", any_url), child(train, any_url, "train", 10, 0.15):
        found = until(any_url, "train", "producers", words=("more worker",))
        assert "trainers of resnet wait" in found["bottleneck"]["text"]
        remedy = typed(found["bottleneck"]["remedy"])
        assert remedy[:2] == ["penstock", "worker"]
        assert remedy[-4:] == ["--allow", "MODULE", "--root", "DIR"]
        # only the process that queued the jobs knows these
        remedy[-4:] = ["--allow", "photos", "--root", str(tmp_path)]
        with command(tmp_path, *remedy[1:], "--queue-url", any_url):
            rates = list[float]()
            while max(rates, default=0.0) <= 25:  # one worker makes less than 20 in a second
                assert len(rates) < 10, rates
                before, began = committed(until(any_url, "train", "producers", "balanced", workers=2)), time.monotonic()
                time.sleep(4.0)  # a machine that does much else may be late in one of these times
                after = committed(until(any_url, "train", "producers", "balanced", workers=2))
                rates.append((after - before) / (time.monotonic() - began))


def test_dead_members_are_named_and_started_again_they_go_on(any_url: str, until: Look) -> None:
    """With a lease of five minutes no other member takes over what a killed trainer held, so the user must be told."""
    for stream in ("pair", "only", "ranks"):
        with (
            penstock.Writer(stream, url=any_url, spec=SPEC, tuning=penstock.Tuning(block_bytes=1)) as writer,
            writer.epoch(sizes=[60]) as epoch,
            epoch.shard(0) as part,
        ):
            for number in range(60):
                part.write({"x": np.full(1000, number, np.uint8), "y": number})
    dead = [("pair", "gpu-1", "-"), ("only", "gpu-0", "-"), ("ranks", "rank-1", "1")]
    with ExitStack() as stack:
        for stream, name, rank in dead:
            victim = stack.enter_context(child(member, any_url, stream, name, rank, "holds"))
            assert victim.line() == "has"
            victim.kill()
        others = [("pair", "gpu-0", "-"), ("ranks", "rank-0", "0")]
        alive = [stack.enter_context(child(member, any_url, *other, "reads")) for other in others]
        sayings = {
            "pair": "when its lease has lapsed (30 s, or what Tuning(lease_s=) says); started again "
            "with Tuning(member='gpu-1') it has",
            "only": "start a trainer of that group (started again with Tuning(member='gpu-0') it has them at once), "
            "or drop",
            "ranks": "the other ranks cannot go past it: start that rank again",
        }
        for stream, name, _ in dead:
            named = f"member {name} of group resnet was not heard of for "  # but not one that has yet to begin
            until(any_url, stream, "dead member", words=(named, sayings[stream]))
        again = [stack.enter_context(child(member, any_url, *each, "reads")) for each in dead]
        assert [one.line() for one in (*again, *alive)] == ["read"] * 5
    for stream, _, _ in dead:
        (group,) = until(any_url, stream, "no trainers", "done", "unknown", "balanced")["groups"]
        assert (group["lag_samples"], group["pending_entries"]) == (0, 0)


def act(url: str, name: str) -> None:
    """Write a feed without an end, in epochs of 200 kB."""
    tuning = penstock.Tuning(block_bytes=10_000)
    with penstock.Writer("feed", url=url, spec=SPEC, budget_bytes=1_600_000, tuning=tuning) as writer:
        for number in range(1_000_000):
            writer.write({"x": np.full(1000, number % 251, np.uint8), "y": number})
            time.sleep(0.005)
            if number == 20:
                print(name, flush=True)


def test_a_killed_writer_of_a_feed_is_named_and_closing_its_epoch_helps(any_url: str, until: Look) -> None:
    """The learner stood still, and the screen advised to start workers, which a feed does not have."""
    with child(act, any_url, "one") as one, child(act, any_url, "two") as two, child(train, any_url, "feed", "20", "0"):
        assert {one.line(), two.line()} == {"one", "two"}
        one.kill()
        told = until(any_url, "feed", "open epoch")["bottleneck"]
        assert told["remedy"].startswith("penstock epochs close feed ")
        assert main([*shlex.split(told["remedy"])[1:], "--url", any_url]) == 0
        before = until(any_url, "feed", *UNHINDERED)
        after = until(any_url, "feed", *UNHINDERED)
        assert committed(after) > committed(before)


def leave(url: str) -> None:
    """Open an epoch, and give it no sample."""
    writer = penstock.Writer("left", url=url, spec=SPEC)
    epoch = writer.epoch()
    print("open", flush=True)
    time.sleep(PATIENCE_S)
    epoch.close()


def test_a_killed_writer_of_an_empty_epoch_is_named_and_closing_it_helps(any_url: str, until: Look) -> None:
    """Samples of later epochs counted as ready, so the screen found the trainers' host too slow."""
    with child(leave, any_url) as writer:
        assert writer.line() == "open"
        writer.kill()
    with penstock.Writer("left", url=any_url) as later, later.epoch() as epoch:
        epoch.write_batch({"x": np.zeros((3000, 1000), np.uint8), "y": np.arange(3000)})
    until(any_url, "left", "open epoch", words=("nobody reads, and a trainer would wait",))
    with child(train, any_url, "left", "20", "0"):
        told = until(any_url, "left", "open epoch", words=("while 3000 samples of later epochs lie ready",))
        assert told["bottleneck"]["remedy"] == "penstock epochs close left 0"
        assert main(["epochs", "close", "left", "0", "--url", any_url]) == 0
        assert until(any_url, "left", "done", "jobs")["groups"][0]["lag_samples"] == 0


UNHINDERED = ("balanced", "no workers", "trainers", "reading")
"""The causes of a stream whose writer has space. Which one it is depends on how busy the machine is."""


def test_a_full_server_is_told_from_a_full_budget_and_a_full_folder(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path, until: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three stop the same writer, but each is fixed in another place."""
    server = fresh_server(maxmemory_bytes=128 << 20)
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    with (
        redis.Redis.from_url(server.url) as raw,
        child(write, server.url, "train", "inline", 0),
        child(train, server.url, "train", 2, 0.01),
    ):
        until(server.url, "train", *UNHINDERED)
        with suppress(redis.exceptions.OutOfMemoryError):
            for number in range(100):
                raw.set(f"cache:{number}", bytes(1 << 20))
        found = until(server.url, "train", "memory")
        assert "the server's memory is full" in found["bottleneck"]["text"]
        words = typed(found["bottleneck"]["remedy"])
        assert words[:3] == ["redis-cli", "-u", server.url]
        raw.execute_command(*words[3:])
        until(server.url, "train", *UNHINDERED)
        assert main(["groups", "declare", "train", "vit"]) == 0
        found = until(server.url, "train", "absent group")
        assert "group vit, which nobody reads now, holds" in found["bottleneck"]["text"]
        assert main(typed(found["bottleneck"]["remedy"])[1:]) == 0
        until(server.url, "train", *UNHINDERED)

    with small_disk(tmp_path, 32 << 20) as (root, limit):
        (root / "other.bin").write_bytes(bytes((32 << 20) - 300_000))
        with (
            child(write, server.url, "files", f"segments:{root}", limit),
            child(train, server.url, "files", 2, 0.5),
        ):
            found = until(server.url, "files", "folder")
            assert f"the file system of the segments in {root} is full" in found["bottleneck"]["text"]
            assert main(typed(found["bottleneck"]["remedy"])[1:]) == 0
            (root / "other.bin").unlink()
            until(server.url, "files", "balanced", "trainers")


@contextmanager
def small_disk(root: Path, nbytes: int) -> Iterator[tuple[Path, int]]:
    """Return a small file system and 0, or a folder and the bytes after which the writer must be refused."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "penstock-test", str(root)]
    is_real = False
    with suppress(OSError):
        is_real = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield root, 0 if is_real else nbytes
    finally:
        if is_real:
            subprocess.run(["umount", "--lazy", str(root)], capture_output=True, check=False)
