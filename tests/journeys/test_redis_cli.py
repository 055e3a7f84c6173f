"""The commands of docs/redis-keys.md, run as a user would: with the real redis-cli, on entries of 150 kB."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis.exceptions import ResponseError

import penstock
from penstock_common.stream.servers.embedded import EmbeddedServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis-keys.md"
BLOCKS: list[str] = re.findall(r"^```sh\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SETUP, *COMMANDS = BLOCKS
MOST_LINES = 40


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """One server with a stream in use: two epochs, a bad sample, a group at rest and one in the middle."""
    with EmbeddedServer() as running:
        with penstock.Writer(
            "train", url=running.url, tuning=penstock.Tuning(block_bytes=150_000), partitions=2
        ) as writer:
            for _ in range(2):
                with writer.epoch() as epoch:
                    for number in range(30):
                        epoch.write({"x": np.full((224, 224, 3), number, dtype=np.uint8), "y": np.int64(number)})
                    epoch.quarantine("truncated image")
        with penstock.Loader("train", group="vit", batch_size=8, url=running.url) as done:
            assert sum(batch.size for batch in done) == 30
        with penstock.Loader(
            "train", group="resnet", batch_size=8, url=running.url, tuning=penstock.Tuning(prefetch_bytes=1)
        ) as loader:
            next(iter(loader))
            yield running


def redis_cli(server: EmbeddedServer) -> Path:
    """The one next to the server, else on PATH."""
    found = shutil.which("redis-cli", path=os.pathsep.join([str(server.executable.parent), os.environ["PATH"]]))
    assert found, "no redis-cli next to the redis-server nor on PATH"
    return Path(found)


def _first_words(command: str) -> str:
    return re.sub(r"redis-cli -u \S+ ", "", command)[:40].strip()


@pytest.mark.parametrize("command", COMMANDS, ids=_first_words)
def test_each_command_of_the_keys_page_prints_something_readable(server: EmbeddedServer, command: str) -> None:
    """A user who looks inside must get neither 150 kB of pixels on the terminal nor an error."""
    cli = redis_cli(server)
    environment = {**os.environ, "PENSTOCK_URL": server.url, "PATH": f"{cli.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-euc", SETUP + command], capture_output=True, env=environment, timeout=20, check=False
    )
    told = done.stdout.decode("ascii")  # headers are JSON; a payload would not be
    said = [line for line in done.stderr.splitlines() if not line.startswith(b"Warning: Using a password with")]
    assert (done.returncode, said) == (0, [])
    lines = told.splitlines()
    assert 0 < len(lines) < MOST_LINES
    assert max(map(len, lines)) < 1000
    assert any(line.strip() for line in lines)
    assert not re.search(r"\bERR\b|NOGROUP|WRONGTYPE|syntax error", told)


def test_the_keys_page_has_a_command_for_each_kind_of_key() -> None:
    """An operator understands only the keys that redis-cli can show."""
    text = "\n".join(COMMANDS)
    for key in (":meta", ":epochs", ":events", ":manifest", ":roster", ":entries", ":index", ":state", ":quarantine",
                ":ledger:", ":dead:", ":paces", ":watched", ":segments", ":names"):  # fmt: skip
        assert key in text, key


def test_the_keys_page_names_every_key_that_is_there(server: EmbeddedServer) -> None:
    """A key the page does not know cannot be read, kept or deleted by anyone else."""
    with penstock.Writer("train", url=server.url) as writer:
        found = {key.decode() for key in writer.client.scan_iter(match="*")}
    patterns = re.findall(r"^(penstock:\{[<~]stream\S+)  ", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(patterns) == 17
    known = [
        re.compile(re.sub(r"<\w+>", "[A-Za-z0-9._-]+", re.escape(p).replace(r"\<", "<").replace(r"\>", ">")))
        for p in patterns
    ]
    assert [key for key in sorted(found) if not any(pattern.fullmatch(key) for pattern in known)] == []


def test_the_keys_page_tells_that_a_group_in_canonical_order_has_no_consumer_group(server: EmbeddedServer) -> None:
    """An operator who asks Redis for its pending entries gets an error."""
    with penstock.Loader(
        "train", group="ranks", batch_size=8, url=server.url, order=penstock.Canonical(0, 1)
    ) as loader:
        next(iter(loader))
        with penstock.Writer("train", url=server.url) as writer:
            (entries, *_) = sorted(writer.client.scan_iter(match="*:0:entries"))
            with pytest.raises(ResponseError, match="NOGROUP"):
                writer.client.xpending(entries, "ranks")
    page = DOCUMENT.read_text(encoding="utf-8")
    assert "A group in canonical order has no consumer group." in page
    assert "For a group in canonical order both answer `NOGROUP`." in page
