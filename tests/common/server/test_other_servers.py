"""A Sentinel is refused at connect, before anything is written; other forms of a URL work."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from chaos.cluster import low_port
from penstock_common.errors import PenstockError, ServerUnavailable, ServerUnsuitable
from penstock_common.server.connection import open_channel
from penstock_common.settings import Settings
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from penstock_common.waiting import Wait

Fresh = Callable[..., EmbeddedServer]
EVERY_SERVER = pytest.mark.parametrize("executable", find_servers(), ids=server_label)


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
