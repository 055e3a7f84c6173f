"""Addresses of a service that Sentinels watch, and connections that ask them for its primary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode

import redis
from redis import exceptions as foreign

DEFAULT_PORT: Final = 26379
ASK_S: Final = 1.0
"""The silence of one Sentinel, or of one node of a cluster, after which the next one is asked."""
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
    hosts: tuple[tuple[str, int], ...]
    name: str
    server_url: str
    """The URL for redis-py: login, database and options of the service's servers, at the first Sentinel's address."""
    own_login: tuple[tuple[str, str], ...]
    """The login of the Sentinels, as arguments of redis-py."""

    def __repr__(self) -> str:
        """Return the address without passwords."""
        return f"<SentinelService {self.where}>"

    @property
    def where(self) -> str:
        """Return the address without logins, for messages."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}+sentinel://{hosts}/{self.name}"

    def find_primary(self, tls: dict[str, Any]) -> tuple[str, int]:
        """Return host and port of the primary, from the first Sentinel that knows them.

        Raises:
            redis.ConnectionError: No Sentinel answers, or no Sentinel knows the service.
        """
        kind: Any = redis.SSLConnection if self.scheme == "rediss" else redis.Connection
        found = []
        for host, port in self.hosts:
            connection = kind(
                host=host, port=port, protocol=2, socket_timeout=ASK_S, socket_connect_timeout=ASK_S,
                **dict(self.own_login), **tls,
            )  # fmt: skip
            try:
                connection.connect()
                connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
                if answer := connection.read_response():
                    return bytes(answer[0]).decode(), int(answer[1])
                found.append(f"{host}:{port} knows no service {self.name!r}")
            except (foreign.RedisError, OSError) as error:
                found.append(f"{host}:{port}: {error}")
            finally:
                connection.disconnect()
        raise foreign.ConnectionError(f"no Sentinel names a primary, {', '.join(found)}")


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

    def __init__(self, *, service: SentinelService, **options: Any) -> None:
        super().__init__(**options)
        self._service = service
        self._tls = {name: value for name, value in options.items() if name.startswith("ssl_")}

    def _connect(self) -> Any:
        self.host, self.port = self._service.find_primary(self._tls)
        return super()._connect()  # type: ignore[misc]

    def on_connect(self) -> None:
        """Log in, and check that the server is the primary, because the Sentinels may report a failover late."""
        super().on_connect()  # type: ignore[misc]
        connection: Any = self
        connection.send_command("ROLE")
        role = connection.read_response()[0]
        if role != b"master":
            raise foreign.ConnectionError(
                f"{self.host}:{self.port} is no primary at this moment, the connection closed"
            )


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
    plain = redis.ConnectionPool.from_url(service.server_url, **options)
    kind = SentinelTlsConnection if service.scheme == "rediss" else SentinelConnection
    settings = {name: value for name, value in plain.connection_kwargs.items() if name not in ("host", "port")}
    return client_class.from_pool(redis.ConnectionPool(connection_class=kind, service=service, **settings))
