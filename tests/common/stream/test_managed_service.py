"""A user without CONFIG and a server that limits its commands stand for a managed service."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

import penstock
from penstock_common.errors import BudgetRefused, PenstockError, ServerUnavailable, ServerUnsuitable
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.servers.suitability import read_memory

SPEC = {"x": ("uint8", (100_000,))}
MB = 1 << 20


@pytest.fixture(scope="module")
def service() -> Iterator[EmbeddedServer]:
    """A server that takes values of at most 1 MiB and names no maxmemory."""
    with EmbeddedServer(extra={"proto-max-bulk-len": "1mb"}) as server:
        yield server


@pytest.fixture
def url(service: EmbeddedServer) -> str:
    """The address of a user who may not use CONFIG, on the empty server."""
    with redis.Redis.from_url(service.url) as admin:
        admin.flushall()
        admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+@all", "-@dangerous", "+info")
    return f"redis://app:pw@127.0.0.1:{service.port}"


def kept_keys(service: EmbeddedServer) -> list[bytes]:
    """All keys of the server."""
    with redis.Redis.from_url(service.url) as admin:
        return sorted(admin.keys("*"))


def test_a_block_that_the_server_refuses_is_told_with_the_size_to_set(service: EmbeddedServer, url: str) -> None:
    """Otherwise the first full block would end the writer, with half an epoch written."""
    tuning = penstock.Tuning(block_bytes=4_000_000)
    with pytest.raises(ServerUnsuitable) as caught:
        penstock.Writer("train", url=url, spec=SPEC, tuning=tuning)
    text = str(caught.value)
    assert "refuses a command of 3.9 MiB" in text
    assert "a block of stream 'train' has 4000000 bytes: set block_bytes=1000000" in text
    assert "\n" not in text
    assert kept_keys(service) == [], "nothing is written before, and the probe is removed"


def test_the_usual_block_fits_and_the_limit_is_told(url: str) -> None:
    """A later sample may be larger than the server takes."""
    said: list[str] = []
    tuning = penstock.Tuning(notify=said.append)
    with (
        penstock.Writer("train", url=url, spec=SPEC, tuning=tuning) as writer,
        writer.epoch(sizes=[50]) as epoch,
        epoch.shard(0) as shard,
    ):
        for number in range(50):
            shard.write({"x": np.full(100_000, number, np.uint8)})
    assert [line for line in said if "blocks of 1000000 bytes fit" in line], said
    with penstock.Loader("train", group="g", batch_size=10, url=url) as loader:
        assert sum(len(batch["x"]) for batch in loader) == 50


def test_a_server_whose_settings_can_be_read_gets_no_probe(service: EmbeddedServer, url: str) -> None:
    """It costs 2 MB for each writer."""
    said: list[str] = []
    with penstock.Writer("train", url=service.url, spec=SPEC, tuning=penstock.Tuning(notify=said.append)):
        pass
    assert said == []


def test_budgets_are_checked_against_the_memory_that_the_address_names(
    url: str, fresh_server: Callable[..., EmbeddedServer]
) -> None:
    """Some services tell no maxmemory, and a full server refuses every write."""
    with pytest.raises(BudgetRefused, match=r"maxmemory 128 MiB leaves space for"):
        penstock.Writer("train", url=f"{url}?server_memory=128mb", spec=SPEC, budget_bytes=500 * MB)
    with penstock.Writer("train", url=f"{url}?server_memory=128mb", spec=SPEC) as writer:
        assert writer.stream.budget_bytes < 64 * MB
    for text, size in (("8gb", 8 << 30), ("1000000000", 1_000_000_000), ("64MB", 64 * MB)):
        with connect(f"{url}/0?server_memory={text}&socket_keepalive=1") as client:
            assert read_memory(client).limit_bytes == size
            assert read_memory(client.impatient()).limit_bytes == size
    with connect(f"{fresh_server(maxmemory_bytes=100 * MB).url}?server_memory=8gb") as client:
        assert read_memory(client).limit_bytes == 100 * MB, "a server that tells its memory is believed"
    with pytest.raises(ServerUnavailable, match="server_memory is a number of bytes as 8gb, found 'much'"):
        connect(f"{url}?server_memory=much")


def test_a_password_may_have_what_separates_options(service: EmbeddedServer) -> None:
    """The option is taken out of the address, and what is left must be the user's address."""
    with redis.Redis.from_url(service.url) as admin:
        admin.execute_command("ACL", "SETUSER", "odd", "on", ">a&b", "+@all", "~*", "&*")
    address = service.url.rpartition("@")[2]
    with connect(f"redis://odd:a&b@{address}?server_memory=1gb&socket_keepalive=1") as client:
        assert read_memory(client).limit_bytes == 1 << 30


def test_a_command_takes_the_memory_of_the_server(url: str, tmp_path: Path) -> None:
    """A production asks for its budget at the start."""
    (tmp_path / "rows.py").write_text("data = range(100)\n")
    command = [sys.executable, "-m", "penstock", "produce", "dataset", "rows:data", "--workers", "1"]
    options = ["--url", url, "--server-memory", "128mb", "--budget", "500mb"]
    done = subprocess.run([*command, *options], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "maxmemory 128 MiB leaves space for" in done.stderr


def test_a_named_limit_is_shown_by_whoever_looks(url: str) -> None:
    """The monitor would say that a full server has no limit."""
    limited = f"{url}?server_memory=200mb"
    with penstock.Writer("train", url=limited, spec=SPEC, budget_bytes=20 * MB), connect(limited) as client:
        seen = StreamMonitor(client, "train").snapshot()
    assert seen.memory.limit_bytes == seen.servers[0].memory.limit_bytes == read_memory_of(limited)


def read_memory_of(url: str) -> int:
    """The limit that a writer finds."""
    with connect(url) as client:
        return read_memory(client).limit_bytes


def test_a_server_that_ends_the_connection_at_a_large_command_is_told_with_its_size(
    fresh_server: Callable[..., EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message sent users after TLS, though the server had spoken to them without it."""
    server = fresh_server(extra={"proto-max-bulk-len": "1mb"})
    large = np.zeros(4 * MB, np.uint8)
    monkeypatch.setattr("penstock_common.waiting.OUTAGE_S", 0.5)
    with penstock.Writer("train", url=server.url, spec={"x": ("uint8", large.shape)}) as writer:
        shard = writer.epoch(0, sizes=[1]).shard(0)
        with pytest.raises(PenstockError) as caught:
            shard.write({"x": large})
            shard.commit_all()
        shard.abort()
    text = str(caught.value)
    assert re.search(r"closed the connection \(.*\) after a request of 4\.0 MiB: see its log", text), text
    assert "proto-max-bulk-len" in text
    assert "TLS" not in text
