"""A Sentinel or a node of a cluster is refused at connect, before anything is written; other forms of a URL work."""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from penstock_common.errors import PenstockError, ServerUnavailable, ServerUnsuitable
from penstock_common.server.connection import open_channel
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from penstock_common.waiting import Wait
from penstock_producer.write.writer import Writer

Fresh = Callable[..., EmbeddedServer]
EVERY_SERVER = pytest.mark.parametrize("executable", find_servers(), ids=server_label)
SLOTS = range(16_384)


def low_port() -> int:
    """A free port with a free port 10,000 above it, which a node of a cluster takes for its bus."""
    for port in random.sample(range(20_000, 30_000), 100):  # other test runs look for ports, too
        try:
            for taken in (port, port + 10_000):
                socket.create_server(("127.0.0.1", taken)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")


@pytest.fixture
def cluster(fresh_server: Fresh) -> Callable[[Path], EmbeddedServer]:
    """Make a cluster of one node, which has all slots."""

    def make(executable: Path) -> EmbeddedServer:
        server = fresh_server(executable, port=low_port(), extra={"cluster-enabled": "yes"})
        with redis.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER", "ADDSLOTS", *SLOTS)
        return server

    return make


@pytest.fixture
def sentinel(tmp_path: Path, any_server: EmbeddedServer) -> Iterator[Callable[[Path], int]]:
    """Start a Sentinel that watches ``any_server``, and return its port."""
    running: list[subprocess.Popen[bytes]] = []

    def make(executable: Path) -> int:
        port = low_port()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor feed 127.0.0.1 {any_server.port} 1\n"
            f"sentinel auth-pass feed {any_server.password}\n"
        )
        running.append(
            subprocess.Popen([executable, config, "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        wait = Wait()
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return port
            except OSError:
                wait.because("start", lambda: f"a Sentinel at port {port}, to answer")

    yield make
    for process in running:
        process.kill()
        process.wait()


@EVERY_SERVER
@pytest.mark.parametrize("database", ["", "/0", "/3"])
def test_a_cluster_is_refused_and_nothing_is_written(
    cluster: Callable[[Path], EmbeddedServer], executable: Path, database: str
) -> None:
    """Without the check, a stream with partitions on other nodes was left half made."""
    server = cluster(executable)
    with pytest.raises(ServerUnsuitable, match=r"is a node of a cluster.*write the URL of a server without"):
        Writer("train", url=server.url + database, spec={"x": ("uint8", (1,))})
    with redis.Redis.from_url(server.url) as node:
        assert node.dbsize() == 0


@EVERY_SERVER
@pytest.mark.parametrize("login", ["", ":secret@", "me:secret@"])
@pytest.mark.parametrize("database", ["", "/3"])
def test_a_port_of_a_sentinel_says_which_port_to_write(
    sentinel: Callable[[Path], int], executable: Path, login: str, database: str
) -> None:
    """A Sentinel has no databases and often no password, so the login and the database fail first."""
    port = sentinel(executable)
    with pytest.raises(
        ServerUnsuitable, match=r"a Sentinel answers at .*write redis\+sentinel://host:port/service"
    ) as caught:
        connect(f"redis://{login}127.0.0.1:{port}{database}")
    assert "secret" not in str(caught.value)


def test_the_schemes_of_valkey_mean_the_same(any_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services for Valkey show such addresses."""
    url = any_server.url.replace("redis://", "valkey://")
    monkeypatch.setenv("PENSTOCK_URL", url)
    with connect(Settings.from_environment().url) as client, closing(open_channel(client)) as channel:
        channel.send([[b"PING"]])
        assert channel.read() == b"PONG"
    monkeypatch.setenv("PENSTOCK_URL", "valkeys://127.0.0.1:1")
    with pytest.raises(ServerUnavailable, match=r"valkeys://127\.0\.0\.1:1"):
        connect(Settings.from_environment().url)


@pytest.mark.parametrize(
    ("option", "what"), [("ssl_ca_certs", "CA file"), ("ssl_certfile", "client certificate"), ("ssl_keyfile", "key")]
)
def test_a_missing_file_of_tls_is_named(option: str, what: str, tmp_path: Path) -> None:
    """It was reported as a server that does not answer."""
    file = tmp_path / "absent.pem"
    with pytest.raises(PenstockError, match=rf"{what} .*absent\.pem.*write \?{option}=FILE"):
        connect(f"rediss://localhost:1?{option}={file}")
