"""The channel keeps its contract over TLS, and a wrong certificate or scheme gets its own line."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.server import connection
from penstock_common.server.channel import Channel
from penstock_common.server.client import ControlClient
from penstock_common.server.connection import open_channel
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.channel import ChannelContract, pattern

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


class TlsFront:
    """A TLS front for any server, for builds without TLS: one thread per connection passes bytes both ways."""

    def __init__(self, port: int, certificate: Path, key: Path, clients: str = "no") -> None:
        self._port = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        if clients == "yes":
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting; connections end with their clients."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with (
            plain,
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port)) as back,
            self._context.wrap_socket(plain, server_side=True) as front,
        ):
            while True:
                ready = [front] if front.pending() else select.select([front, back], [], [])[0]
                for source, sink in ((front, back), (back, front)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        sink.sendall(data)


def made_certificate(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
    """A self-signed certificate, by default for localhost, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extension = ["-addext", f"subjectAltName={names}"]
    outputs = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *extension, *outputs], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    return made_certificate(tmp_path_factory.mktemp("tls"))


@contextmanager
def tls_server(certificate: Path, key: Path, clients: str = "no") -> Iterator[int]:
    """Return the TLS port of a server whose build has TLS. Skips if no build has it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    files = {"tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-ca-cert-file": str(certificate)}
    for executable in find_servers():
        try:
            server = EmbeddedServer(
                executable, password="", extra={"tls-port": str(port), "tls-auth-clients": clients, **files}
            )
        except PenstockError:
            continue
        with server:
            yield port
            return
    pytest.skip("no redis-server here is built with TLS")


@contextmanager
def tls_front(certificate: Path, key: Path, clients: str = "no") -> Iterator[int]:
    """Return the port of a TLS front before a server without TLS."""
    with EmbeddedServer(password="") as server, closing(TlsFront(server.port, certificate, key, clients)) as front:
        yield front.port


@pytest.fixture(scope="module", params=[tls_server, tls_front])
def tls_port(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[int]:
    """Return the ports of both kinds of TLS that are available."""
    with request.param(*certificate) as port:
        yield port


@pytest.fixture(scope="module")
def client(tls_port: int, certificate: tuple[Path, Path]) -> Iterator[ControlClient]:
    """A client that trusts the certificate."""
    with connect(f"rediss://localhost:{tls_port}?ssl_ca_certs={certificate[0]}") as connected:
        yield connected


class TestChannelOverTls(ChannelContract):
    """Without sendmsg and recvmsg_into, the socket keeps the same promises."""

    @pytest.fixture
    def channel(self, client: ControlClient) -> Iterator[Channel]:
        """An open channel of the kind under test."""
        with closing(open_channel(client)) as channel:
            yield channel


@pytest.mark.parametrize("order", [None, "canonical"])
def test_samples_of_any_size_travel_by_tls(
    tls_port: int, certificate: tuple[Path, Path], order: Literal["canonical"] | None
) -> None:
    """A TLS record holds 16 kB, so a sample spans many records or shares one, and the last one is not full."""
    url = f"rediss://localhost:{tls_port}?ssl_ca_certs={certificate[0]}"
    sizes = [1, 4096, 16_384, 16_385, 150_528, 3_000_001]
    name = f"tls-{order}"
    with (
        Writer(name, url=url, spec={"x": ("uint8", (None,))}, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch(sizes=[len(sizes)]) as epoch,
        epoch.shard(0) as shard,
    ):
        for size in sizes:
            shard.write({"x": np.frombuffer(pattern(size), np.uint8)})
    with Loader(name, group="g", batch_size=2, url=url, order=order) as loader:
        read = [row.tobytes() for batch in loader for row in batch["x"]]
    assert sorted(read, key=len) == [pattern(size) for size in sizes]


@pytest.mark.parametrize("kind", [tls_server, tls_front])
def test_a_server_that_asks_for_a_client_certificate_gets_it_from_each_connection(
    certificate: tuple[Path, Path], kind: Callable[..., AbstractContextManager[int]]
) -> None:
    """Channels use the settings of the control connection, and log in without it."""
    with kind(*certificate, clients="yes") as port:
        url = f"rediss://localhost:{port}?ssl_ca_certs={certificate[0]}"
        with pytest.raises(ServerUnavailable, match=r"client certificate.*name it with .ssl_certfile=FILE"):
            connect(url)
        named = f"{url}&ssl_certfile={certificate[0]}&ssl_keyfile={certificate[1]}"
        with connect(named) as client, closing(open_channel(client)) as channel:
            channel.send([[b"SET", b"k", memoryview(bytes(1_000_000))], [b"STRLEN", b"k"]])
            assert [channel.read(), channel.read()] == [b"OK", 1_000_000]


def test_an_untrusted_certificate_names_the_option_that_trusts_it(tls_port: int) -> None:
    """Self-signed certificates are usual in private clusters."""
    with pytest.raises(ServerUnavailable, match=r"not trusted .*ssl_ca_certs"):
        connect(f"rediss://localhost:{tls_port}")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("rediss://trainer:secret@localhost:PORT?", "Hostname mismatch"),
        ("rediss://trainer:secret@127.0.0.1:PORT?", "IP address mismatch"),
        ("rediss://trainer:secret@localhost:PORT,127.0.0.1:PORT?", "mismatch"),
        ("rediss+sentinel://trainer:secret@localhost:PORT/feed?sentinel_password=secret&", "Hostname mismatch"),
    ],
    ids=["a server", "a server by its number", "nodes", "a Sentinel"],
)
def test_a_server_that_shows_a_certificate_of_another_name_receives_no_login(
    tmp_path: Path, address: str, words: str
) -> None:
    """The same CA signs many hosts, and one of them in between must not learn the password."""
    certificate, key = made_certificate(tmp_path, "DNS:other.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with suppress(OSError), context.wrap_socket(plain, server_side=True) as peer:
                    received.append(peer.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"{address.replace('PORT', str(listener.getsockname()[1]))}ssl_ca_certs={certificate}"
        with pytest.raises(ServerUnavailable, match=rf"has another name .*{words}.*ssl_check_hostname=false"):
            connect(url)
        assert not any(received)
        with pytest.raises(ServerUnavailable):  # the listener is no server
            connect(f"{url}&ssl_check_hostname=false")
        assert any(b"secret" in some for some in received)


@pytest.mark.parametrize(
    "options",
    ["ssl_ca_certs=CERT&ssl_check_hostname=false", "ssl_cert_reqs=none", "ssl_cert_reqs=none&ssl_check_hostname=true"],
)
def test_an_address_may_ask_for_no_check_of_the_name(tmp_path: Path, options: str) -> None:
    """Some certificates name no host, and without a check of the certificate there is no name to check."""
    certificate, key = made_certificate(tmp_path, "DNS:other.example")
    with (
        EmbeddedServer(password="") as server,
        closing(TlsFront(server.port, certificate, key)) as front,
        connect(f"rediss://localhost:{front.port}?{options.replace('CERT', str(certificate))}") as client,
        closing(open_channel(client)) as channel,
    ):
        channel.send([[b"PING"]])
        assert channel.read() == b"PONG"


def test_plain_talk_to_a_tls_port_says_that_tls_may_be_wanted(tls_port: int) -> None:
    """The whole mistake is one letter in the URL."""
    with pytest.raises(ServerUnavailable, match="rediss://"):
        connect(f"redis://localhost:{tls_port}")


def test_tls_talk_to_a_plain_port_says_that_there_may_be_no_tls(
    any_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis waits for the rest of a line that never ends, so the message must name the likely cause."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(ServerUnavailable, match="without TLS"):
        connect(f"rediss://localhost:{any_server.port}")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("ssl_ca_certs=JUNK", r"junk\.pem for .* cannot be used .*write \?ssl_ca_certs=FILE"),
        ("ssl_ca_certs=CERT&ssl_certfile=CERT", r"no key for .*write \?ssl_certfile=FILE&ssl_keyfile=FILE"),
        ("ssl_ca_certs=CERT&ssl_keyfile=KEY", r"a client key without its certificate: write \?ssl_certfile=FILE"),
        ("ssl_ca_certs=CERT&ssl_certfile=JUNK&ssl_keyfile=KEY", r"junk\.pem and .* cannot be used"),
        ("ssl_ca_certs=CERT&ssl_certfile=CERT&ssl_keyfile=OTHER", r"KEY_VALUES_MISMATCH.*the key that belongs to it"),
    ],
)
def test_files_that_are_no_certificates_are_named(
    certificate: tuple[Path, Path], tmp_path: Path, files: str, words: str
) -> None:
    """They were reported as a server that does not answer, or as a TypeError."""
    (tmp_path / "junk.pem").write_text("no certificate\n")
    names = {"JUNK": tmp_path / "junk.pem", "CERT": certificate[0], "KEY": certificate[1]}
    if "OTHER" in files:
        names["OTHER"] = made_certificate(tmp_path)[1]
    for name, file in names.items():
        files = files.replace(f"={name}", f"={file}")
    with pytest.raises(ServerUnavailable, match=words) as caught:
        connect(f"rediss://localhost:1?{files}")
    assert len(str(caught.value).splitlines()) == 1


def test_options_of_tls_at_a_plain_address_name_the_scheme() -> None:
    """The whole mistake is one letter in the URL."""
    with pytest.raises(ServerUnavailable, match="ssl_ca_certs is an option of rediss://"):
        connect("redis://localhost:1?ssl_ca_certs=ca.pem")
