"""Addresses of a service that Sentinels watch, and connections that ask them for its primary.

A server that is demoted closes its connections itself, but one that is stopped or cut off does not. So a thread asks
the Sentinels, too, and ends the connections to a former primary. A thread that waits on one connects again.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

import redis
from redis import exceptions as foreign

from penstock_common.server.hosts import named_address
from penstock_common.server.pool import ClientPool, ask_once
from penstock_common.server.primary_watcher import ASK_S, QUICK, Address, Watcher
from penstock_common.stall_detector import STALL_DETECTOR

DEFAULT_PORT: Final = 26379
_URL: Final = re.compile(
    r"(?P<scheme>rediss?)\+sentinel://(?:(?P<login>.*)@)?(?P<hosts>[^/?#@]+)/(?P<service>[^/?#]+)"
    r"(?:/(?P<database>[0-9]+))?/?(?:\?(?P<options>[^#]*))?"
)
_OWN_LOGIN: Final = {"sentinel_username": "username", "sentinel_password": "password"}


def is_sentinel_url(url: str) -> bool:
    """Return whether a URL names Sentinels. Nothing else of it is checked."""
    return url.partition("://")[0] in ("redis+sentinel", "rediss+sentinel")


@dataclass(frozen=True)
class SentinelService:
    """A service and the Sentinels that know its primary."""

    scheme: str
    """The scheme of the servers and of the Sentinels: redis, or rediss for TLS."""
    hosts: tuple[Address, ...]
    name: str
    server_url: str
    """The URL for redis-py: login, database and options of the service's servers, at the first Sentinel's address."""
    own_login: tuple[tuple[str, str], ...]
    """The login of the Sentinels, as arguments of redis-py."""
    tls: tuple[tuple[str, Any], ...] = ()
    """The options of TLS, for servers and Sentinels, as arguments of redis-py."""
    _in_turn: list[Address] = field(default_factory=list, compare=False)
    """The Sentinels in the order in which they are asked: the one that answered last comes first."""
    _led_to: list[Address] = field(default_factory=list, compare=False)
    """The server that answered as the primary to the last new connection, if there was one."""

    def __repr__(self) -> str:
        """Return the address without passwords."""
        return f"<SentinelService {self.where}>"

    @property
    def where(self) -> str:
        """Return the address without logins, for messages."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}+sentinel://{hosts}/{quote(self.name, safe='')}"

    @property
    def primary(self) -> str:
        """Return the address of the server that answered as the primary last, without a login, or '' before that."""
        return "".join(f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in self._led_to)

    def leads_to(self, primary: Address) -> None:
        """Note which server answered a new connection as the primary."""
        self._led_to[:] = [primary]

    def find_primary(self, within_s: float = ASK_S) -> Address:
        """Return host and port of the primary, from the first Sentinel that knows them.

        ``within_s`` bounds the silence of each Sentinel.

        Raises:
            redis.ConnectionError: No Sentinel answers, or no Sentinel knows the service.
        """
        found = []
        for where in list(self._in_turn) or self.hosts:
            try:
                if answer := self._ask(where, within_s):
                    primary = named_address(*answer)
                    self._in_turn[:] = [where, *(other for other in self.hosts if other != where)]
                    return primary
                found.append(f"{where[0]}:{where[1]} knows no service {self.name!r}")
            except (foreign.RedisError, OSError) as error:
                found.append(f"{where[0]}:{where[1]}: {error}")
        raise foreign.ConnectionError(f"no Sentinel names a primary, {', '.join(found)}")

    def _ask(self, where: Address, within_s: float) -> Any:
        kind: Any = redis.SSLConnection if self.scheme == "rediss" else redis.Connection
        connection = kind(
            host=where[0], port=where[1], protocol=2, socket_timeout=within_s, socket_connect_timeout=within_s,
            **dict(self.own_login), **dict(self.tls),
        )  # fmt: skip
        answer = ask_once(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        if answer is not None and not (isinstance(answer, list) and len(answer) == 2):
            raise foreign.InvalidResponse(f"it answered {answer!r:.80}, expected a host and a port")
        return answer


def parse_sentinel_url(url: str) -> SentinelService:
    """Return the service of a URL that `is_sentinel_url` accepts. Raises ValueError with a text that omits the URL."""
    parts = _URL.fullmatch(url)
    if parts is None:
        raise ValueError("expected redis+sentinel://host:26379,host:26379/service/0")
    hosts = []
    for text in parts["hosts"].split(","):
        found = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::([0-9]{1,5}))?", text)
        if found is None:
            raise ValueError(f"{text!r} is no host:port")
        hosts.append((found[1].strip("[]"), int(found[2] or DEFAULT_PORT)))
    options = parse_qsl(parts["options"] or "", keep_blank_values=True)
    own = tuple((_OWN_LOGIN[name], value) for name, value in options if name in _OWN_LOGIN)
    others = urlencode([(name, value) for name, value in options if name not in _OWN_LOGIN])
    login = f"{parts['login']}@" if parts["login"] else ""
    server = f"{parts['scheme']}://{login}{parts['hosts'].split(',')[0]}/{parts['database'] or 0}?{others}"
    return SentinelService(parts["scheme"], tuple(hosts), unquote(parts["service"]), server, own)


class _AsksForPrimary:
    """A connection of redis-py to the primary that the Sentinels name at the time of opening."""

    host: str
    port: int
    socket_timeout: Any
    socket_connect_timeout: Any

    def __init__(self, *, service: SentinelService, **options: Any) -> None:
        super().__init__(**options)
        self._options = options
        self.service = service
        """The service to whose primary it leads."""

    def _connect(self) -> Any:
        self.host, self.port = self.service.find_primary(min(ASK_S, self.socket_connect_timeout))
        silence_s, self.socket_timeout = self.socket_timeout, self.socket_connect_timeout  # also of a TLS handshake
        try:
            sock = super()._connect()  # type: ignore[misc]
        finally:
            self.socket_timeout = silence_s
        sock.settimeout(silence_s)
        WATCHERS.watch(self, sock)
        return sock

    def on_connect(self) -> None:
        """Log in, check that the server is the primary, and end the connections of this process to another one.

        The Sentinels may report a failover late. HELLO is asked, which every user may send.
        """
        super().on_connect()  # type: ignore[misc]
        connection: Any = self
        connection.send_command("HELLO")
        reply = connection.read_response()
        if b"master" not in reply:
            raise foreign.ConnectionError(
                f"{self.host}:{self.port} is no primary at this moment, the connection closed"
            )
        self.service.leads_to(self.leads_to)
        WATCHERS.leave_others(self)

    @property
    def leads_to(self) -> Address:
        """Return the server that the Sentinels named."""
        return self.host, self.port

    def probe(self) -> Any:
        """Return another connection of the kind, not connected. It opens quickly or not at all."""
        return type(self)(service=self.service, **self._options | QUICK)


class SentinelConnection(_AsksForPrimary, redis.Connection):
    """A connection to a service's primary."""


class SentinelTlsConnection(_AsksForPrimary, redis.SSLConnection):
    """A connection to a service's primary, over TLS."""


def client_of_service(service: SentinelService, client_class: type[Any], options: dict[str, Any]) -> Any:
    """Return a client whose every connection asks the Sentinels for the primary; it is not connected.

    Args:
        service: The service, from `parse_sentinel_url`.
        client_class: ControlClient, or one of its kind.
        options: Options of redis-py for connections to the servers.
    """
    plain = ClientPool.from_url(service.server_url, **options)
    kind = SentinelTlsConnection if service.scheme == "rediss" else SentinelConnection
    settings = {name: value for name, value in plain.connection_kwargs.items() if name not in ("host", "port")}
    tls = tuple((name, value) for name, value in settings.items() if name.startswith("ssl_"))
    service = replace(service, tls=tls)
    return client_class.from_pool(ClientPool(connection_class=kind, service=service, **settings))


class ServiceWatcher(Watcher):
    """A watcher of the sockets of this process to a service's primary. It shuts those to a former primary."""

    def __init__(self, service: SentinelService, probe: Any, watchers: ServiceWatchers) -> None:
        """Begin. ``probe`` is a connection that can be opened to the primary, and ``watchers`` may end this one."""
        self._service, self._probe, self._watchers = service, probe, watchers
        self._open: dict[socket.socket, Address] = {}
        super().__init__("penstock-sentinels")

    def add(self, sock: socket.socket, where: Address) -> None:
        """Watch a socket that leads to this server."""
        self._open[sock] = where

    def has_open(self) -> bool:
        """Forget the sockets that were closed, and return whether any is left."""
        for sock in list(self._open):
            if sock.fileno() < 0:
                del self._open[sock]
        return bool(self._open)

    def is_urgent(self) -> bool:
        """See Watcher."""
        return bool(STALL_DETECTOR.silent_s(self._service.where))

    def look(self) -> None:
        """See Watcher."""
        if self._watchers.end_unused(self):
            return
        primary = self._service.find_primary()
        if any(where != primary for where in list(self._open.values())):
            try:
                self._probe.connect()  # fails if the Sentinel missed the failover and names a former primary
            finally:
                self._probe.disconnect()

    def leave_others(self, primary: Address) -> None:
        """Shut the sockets to other servers. Their owners close them, and ask the primary for what they waited for."""
        for sock, where in list(self._open.items()):
            if where != primary:
                with suppress(OSError):  # closed in this moment
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


class ServiceWatchers:
    """The watchers of this process: one for each service to whose primary it has connections."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start again, as a forked process must, in which no watcher runs and whose sockets are its parent's."""
        self._lock = threading.Lock()
        self._watchers: dict[SentinelService, ServiceWatcher] = {}

    def watch(self, connection: _AsksForPrimary, sock: socket.socket) -> None:
        """Watch a connection's socket from now on."""
        with self._lock:
            watcher = self._watchers.get(connection.service)
            if watcher is None:
                watcher = ServiceWatcher(connection.service, connection.probe(), self)
                self._watchers[connection.service] = watcher
            watcher.add(sock, connection.leads_to)

    def leave_others(self, connection: _AsksForPrimary) -> None:
        """End the connections to another server than this one, which answered as the primary.

        A reader that asks two servers could miss on one of them what it found on the other.
        """
        if (watcher := self._watchers.get(connection.service)) is not None:
            watcher.leave_others(connection.leads_to)

    def end_unused(self, watcher: ServiceWatcher) -> bool:
        """End a watcher all of whose sockets were closed. Returns whether it is at its end."""
        with self._lock:
            if watcher.has_open():
                return False
            self._watchers = {service: one for service, one in self._watchers.items() if one is not watcher}
        watcher.close()
        return True


WATCHERS: Final = ServiceWatchers()
"""The watchers of this process."""
os.register_at_fork(after_in_child=WATCHERS.forget)
