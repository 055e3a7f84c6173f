"""A real service for the tests: a primary, replicas, and three Sentinels that watch them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from chaos.cluster import low_port
from penstock_common.errors import PenstockError
from penstock_common.stream.servers.embedded import EmbeddedServer

SERVER_PASSWORD, SENTINEL_USER, SENTINEL_PASSWORD = "of-servers", "looker", "of-sentinels"
SENTINELS = 3
PATIENCE_S = 60.0
"""A wait that is longer is a failure. A busy machine needs more than 20 s for a failover."""
FAILOVER_TIMEOUT_MS = 1000
"""Sentinels that did not agree on a leader try again after twice this time."""


class Service:
    """The service ``feed``. Its Sentinels have a login of their own, and TLS where the servers have it."""

    def __init__(
        self, servers: list[EmbeddedServer], known_ports: list[int], ports: list[int], certificate: Path | None
    ) -> None:
        self.servers, self.ports, self._known_ports, self._certificate = servers, ports, known_ports, certificate

    @property
    def url(self) -> str:
        """The address of the service, with both logins."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        scheme, tls = ("rediss", f"&ssl_ca_certs={self._certificate}") if self._certificate else ("redis", "")
        own = f"sentinel_username={SENTINEL_USER}&sentinel_password={SENTINEL_PASSWORD}"
        return f"{scheme}+sentinel://:{SERVER_PASSWORD}@{hosts}/feed?{own}{tls}"

    def asked_sentinel(self, *command: Any, which: int = 0) -> Any:
        """A Sentinel's answer."""
        login = {"username": SENTINEL_USER, "password": SENTINEL_PASSWORD}
        tls = {"ssl": True, "ssl_ca_certs": str(self._certificate)} if self._certificate else {}
        with redis.Redis(port=self.ports[which], **login, **tls) as sentinel:  # type: ignore[arg-type]
            return sentinel.execute_command(*command)

    def primary(self) -> EmbeddedServer:
        """The server that the first Sentinel names."""
        port = int(self.asked_sentinel("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "feed")[1])
        return self.servers[self._known_ports.index(port)]

    def fail(self, fault: str) -> EmbeddedServer:
        """Lose the primary once a replica has all that was written so far, and return it."""
        primary = self.primary()
        with redis.Redis.from_url(primary.url, single_connection_client=True) as client:
            client.set("probe", 1)
            assert int(client.wait(len(self.servers) - 1, 5000)) == len(self.servers) - 1
            pid = client.info("server")["process_id"]
        if fault == "kill":
            primary.kill()
        elif fault == "stop":
            os.kill(pid, signal.SIGSTOP)
        else:
            self.asked_sentinel("SENTINEL FAILOVER", "feed")
        return primary


def asked(server: EmbeddedServer, *command: Any) -> Any:
    """A server's answer, soon or not at all."""
    with redis.Redis.from_url(server.url, socket_timeout=2) as client:
        return client.execute_command(*command)


def has_tls(executable: Path, certificate: tuple[Path, Path]) -> bool:
    """Whether a server is built with TLS."""
    try:
        EmbeddedServer(executable, extra={"tls-port": str(low_port()), **_tls(*certificate)}).close()
    except PenstockError:
        return False
    return True


def _tls(certificate: Path, key: Path) -> dict[str, str]:
    files = {"tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-ca-cert-file": str(certificate)}
    return {**files, "tls-auth-clients": "no", "tls-replication": "yes"}


@contextmanager
def started_service(
    executable: Path, folder: Path, *, replicas: int = 1, certificate: tuple[Path, Path] | None = None
) -> Iterator[Service]:
    """Start a service, and end it. With a certificate and its key, everybody speaks TLS to everybody.

    A service that is not whole in time is started again on other ports: sentinels of another test may still watch a
    primary that had the port before, and would be counted here.
    """
    for patience_s in (PATIENCE_S / 2, PATIENCE_S):
        with ExitStack() as stack:
            try:
                service = _begun(stack, executable, folder / f"{patience_s:.0f}", replicas, certificate, patience_s)
            except AssertionError:
                if patience_s == PATIENCE_S:
                    raise
                continue
            yield service
            return


def _begun(
    stack: ExitStack, executable: Path, folder: Path, replicas: int, certificate: tuple[Path, Path] | None,
    patience_s: float,
) -> Service:  # fmt: skip
    tls = {} if certificate is None else _tls(*certificate)
    servers: list[EmbeddedServer] = []
    ports: list[int] = []
    for number in range(1 + replicas):
        ports.append(low_port())
        extra = {"masterauth": SERVER_PASSWORD, "repl-diskless-sync-delay": "0", **tls}
        extra |= {"tls-port": str(ports[-1])} if tls else {}
        extra |= {"replicaof": f"127.0.0.1 {ports[0]}"} if number else {}
        port = low_port() if tls else ports[-1]
        server = EmbeddedServer(executable, port=port, password=SERVER_PASSWORD, extra=extra)
        servers.append(stack.enter_context(server))
    sentinels = [low_port() for _ in range(SENTINELS)]
    service = Service(servers, ports, sentinels, certificate[0] if certificate else None)
    for number in range(SENTINELS):
        stack.enter_context(_sentinel(executable, folder / str(number), sentinels[number], ports[0], tls))
    until(lambda: len(asked(servers[0], "ROLE")[2]) == replicas, patience_s)
    for number in range(SENTINELS):
        until(lambda number=number: _knows_all(service, number, replicas), patience_s)  # type: ignore[misc]
    return service


@contextmanager
def _sentinel(executable: Path, home: Path, port: int, primary: int, tls: dict[str, str]) -> Iterator[None]:
    home.mkdir(parents=True)
    settings = "".join(f"{name} {value}\n" for name, value in tls.items())
    (home / "sentinel.conf").write_text(
        f"{f'port 0{chr(10)}tls-port' if tls else 'port'} {port}\n{settings}bind 127.0.0.1\ndir {home}\n"
        f"user default off\nuser {SENTINEL_USER} on >{SENTINEL_PASSWORD} ~* &* +@all\n"
        f"sentinel sentinel-user {SENTINEL_USER}\nsentinel sentinel-pass {SENTINEL_PASSWORD}\n"
        f"sentinel monitor feed 127.0.0.1 {primary} 2\nsentinel auth-pass feed {SERVER_PASSWORD}\n"
        f"sentinel down-after-milliseconds feed 700\nsentinel failover-timeout feed {FAILOVER_TIMEOUT_MS}\n"
    )
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([executable, home / "sentinel.conf", "--sentinel"], stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _knows_all(service: Service, number: int, replicas: int) -> bool:
    told = service.asked_sentinel("SENTINEL MASTER", "feed", which=number)
    return int(told["num-other-sentinels"]) == SENTINELS - 1 and int(told["num-slaves"]) == replicas


def until(is_so: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait until something is so. A server that does not answer yet is asked again."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if is_so():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, f"it took more than {patience_s:.0f} s"
        time.sleep(0.05)
