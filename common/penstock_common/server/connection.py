"""Connections to a server: the control client, and channels for data that are made from its settings.

redis-py does addresses, TLS and login. No channel retries a command: a repeated XADD would be a duplicate.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import redis
from redis import exceptions as foreign
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock_common.errors import PenstockError, ServerUnavailable, ServerUnsuitable
from penstock_common.server.channel import REPLY_TIMEOUT_S, Channel, RoutedChannel
from penstock_common.server.client import ControlClient, connections_of
from penstock_common.server.error_translation import (
    broke_off,
    is_disk_refusal,
    may_pass,
    redacted,
    translated,
)
from penstock_common.server.pool import ClientPool, ask_once
from penstock_common.server.primary_watcher import QUICK, Address
from penstock_common.server.sentinel import client_of_service, is_sentinel_url, parse_sentinel_url
from penstock_common.server.slots import Key
from penstock_common.server.topology import SlotMap
from penstock_common.waiting import OUTAGE_S, Notify, Outage, to_stderr

CONNECT_TIMEOUT_S: Final = 5.0
"""A host that drops packets is reported within 5 s, the time in which every wait explains itself."""
GREETING_S: Final = 5.0
"""The time for which a server is retried that accepts connections and closes them, and that never answered before.

A proxy in between may be starting. But the URL may also be wrong (a port that wants TLS), and then a user waits.
"""

AnyClient = TypeVar("AnyClient", bound=ControlClient)

MEMORY_OPTION: Final = "server_memory"
"""The option of an address that names the memory of a server that does not tell it."""
_OTHER_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}
"""Schemes that mean the same as one of redis-py's."""
_FILES_OF_TLS: Final = {"ssl_ca_certs": "CA file", "ssl_certfile": "client certificate", "ssl_keyfile": "client key"}
"""The options of a URL that name files of TLS, and what each file is."""
_FORMS = (
    "write redis://host:6379/0, rediss://host:6379/0, unix:///path/to/socket?db=0, "
    "redis://host:6379,host:6379 for a cluster, or redis+sentinel://host:26379,host:26379/service/0"
)
_HOSTS = re.compile(r"(?P<before>rediss?://(?:.*@)?)(?P<hosts>[^/?#@]*,[^/?#@]*)(?P<after>[/?#].*)?", re.DOTALL)
"""A URL of several hosts."""


def connect(
    url: str,
    client_class: type[AnyClient],
    *,
    timeout_s: float = REPLY_TIMEOUT_S,
    bears_outages: Notify | None = None,
    patience_s: float | None = None,
    notify: Notify = to_stderr,
) -> AnyClient:
    """Return a client whose server has let it in; it speaks RESP2 and returns bytes.

    Args:
        url: The server's address, with user and password if it asks for them.
        client_class: ControlClient, or one that explains refusals.
        timeout_s: The longest silence after a command.
        bears_outages: Called with a line for each outage. With it, commands that a lost server did not answer are
            repeated (see ``client``). Without it, every failure is raised.
        patience_s: The longest outage that is waited for; None is `OUTAGE_S`.
        notify: Called for a server that does not answer, if ``bears_outages`` is not given.

    Raises:
        ServerUnsuitable: The server is a Sentinel. Nothing is written to it.
        PenstockError: The server is away or silent, or refuses the login. With ``bears_outages``, some servers are
            asked again. A server that is busy with a script, or has too many clients, is asked for ``patience_s``. A
            server that loads its data is asked until it has loaded. A server that closes the connection is asked for
            `GREETING_S`.
    """
    client, seeds = _client_of_first(url, client_class, timeout_s)
    _require_usable_files(client)
    client.patience.tell(bears_outages or notify)
    patience_s = OUTAGE_S if patience_s is None else patience_s
    outage = Outage(client.patience.notify, doing="connecting")
    while True:
        try:
            with translated(redacted(url)):
                _greet(client, seeds)
            break
        except PenstockError as failure:
            speaks, is_cut = may_pass(failure.__cause__), broke_off(failure.__cause__)
            # the message is complete; redis-py's three tracebacks would bury it
            failure.with_traceback(None).__cause__ = None
            if bears_outages is None or not isinstance(failure, ServerUnavailable) or not (speaks or is_cut):
                raise failure from None
            outage.limit_patience(patience_s if speaks else min(GREETING_S, patience_s))
            outage.bear(failure)
    if bears_outages is not None:
        client.patience.last(patience_s)
    return client


def open_channel(client: ControlClient, key: Key = None) -> Channel:
    """Return a separate connection for data, made with the client's address, TLS and login.

    Args:
        client: The control connection.
        key: A key on the server to which the channel leads. None is for a client of one server.
    """
    if client.is_spread and key is not None:
        asking = client.impatient()
        asking.execute_command("EXISTS", key)  # follows the key to another server
        client = asking.node_of(key)
    with translated(client):
        connection = _dedicated(client)
        try:
            client.request().of(connection.connect)
            channel = Channel(connection, client.where, client.patience.notify)
            client.own(channel)
            return channel
        except BaseException:
            connection.disconnect()
            raise


def open_channels(client: ControlClient) -> Channel:
    """Return a channel that sends each command to the server that holds its key."""
    return RoutedChannel(client, open_channel) if client.is_spread else open_channel(client)


def require_one_server(client: ControlClient, what: str, instead: str) -> None:
    """Raise ServerUnsuitable if a client's keys may be on several servers.

    Args:
        client: A client that is connected.
        what: What needs one server, and why.
        instead: What to write instead.
    """
    if client.is_spread:
        raise ServerUnsuitable(f"a cluster answers at {client.where}, and {what}: {instead}")


def may_keep_jobs(client: ControlClient) -> bool:
    """Return whether jobs may be where a client's keys are. rq uses keys together, so they must be on one server."""
    return not client.is_spread


def _greet(client: ControlClient, seeds: Sequence[Address]) -> None:
    """Connect, log in and ask what kind of server answers. A cluster is asked for its map.

    With several seeds, the first one that answers is greeted. Raises ServerUnsuitable for a Sentinel.
    """
    mode = _greet_any(client, seeds) if seeds else _greet_one(client)
    if mode == "cluster":
        _spread(client, seeds)
    elif len(seeds) > 1:
        raise ServerUnsuitable(
            f"the server at {client.where} is not a node of a cluster, and only a cluster has several hosts: write the "
            "one server, as in redis://host:6379, or redis+sentinel:// for a service that Sentinels watch"
        )


def _greet_any(client: ControlClient, seeds: Sequence[Address]) -> str:
    """Greet the first host that answers.

    Try each host for `ASK_S`. If none answers, try each again with the usual timeouts.
    """
    tries: list[tuple[Address, dict[str, float]]] = [
        *((seed, QUICK) for seed in seeds),
        *((seed, {}) for seed in seeds),
    ]
    for number, (seed, times) in enumerate(tries, 1):
        client.lead_to(seed)
        try:
            return _greet_one(client, **times)
        except (foreign.ConnectionError, foreign.TimeoutError, OSError) as error:
            if number == len(tries) or isinstance(error, foreign.AuthenticationError):
                raise
    raise AssertionError("a URL of several hosts names none")


def _spread(client: ControlClient, seeds: Sequence[Address]) -> None:
    pool = client.connection_pool
    settings = {name: value for name, value in _settings_of(client).items() if name not in ("host", "port")}
    if "path" in settings:
        raise ServerUnsuitable(f"a node of a cluster answers at {client.where}: write redis://host:port of any node")
    first = (str(pool.connection_kwargs.get("host", "localhost")), int(pool.connection_kwargs.get("port", 6379)))
    slots = SlotMap([first, *(seed for seed in seeds if seed != first)], pool.connection_class, settings)
    slots.refresh()
    client.spread(slots)


def _greet_one(client: ControlClient, **times: float) -> str:
    """Return the mode of the server, once it has let the client in. ``times`` replace those of a connection."""
    probe = _dedicated(client, **times)

    def greet() -> str:
        probe.connect()
        probe.send_command("PING")
        probe.send_command("HELLO")
        _read_pong(probe)
        try:
            return _mode_in(probe.read_response())
        except (foreign.ResponseError, foreign.AuthenticationError):
            return ""  # it does not answer HELLO

    try:
        mode = client.request().of(greet)
    except (foreign.ResponseError, foreign.AuthenticationError):
        _require_suitable(client, _mode_behind_refusal(client))
        raise
    finally:
        probe.disconnect()
    if mode == "sentinel":
        _require_suitable(client, mode)
    return mode


def _read_pong(connection: Any) -> None:
    """Read the answer to a PING. A server that cannot write its disk refuses that one, too, and still answers reads."""
    try:
        connection.read_response()
    except foreign.ResponseError as error:
        if not is_disk_refusal(error):
            raise


def _mode_in(answer: Any) -> str:
    """Return the mode that an answer to HELLO names, or ''."""
    facts = dict(zip(answer[::2], answer[1::2], strict=False)) if isinstance(answer, list) else {}
    return bytes(facts.get(b"mode", b"")).decode(errors="replace")


def _mode_behind_refusal(client: ControlClient) -> str:
    """Return the mode of a server that refused the login or the database, or ''.

    A Sentinel has no databases and often no password. A cluster often has database 0 only.
    """
    no_database: dict[str, object] = {"db": 0, "client_name": None}
    no_login: dict[str, object] = {"username": None, "password": None, "credential_provider": None}
    for others in (no_database, no_database | no_login):
        with suppress(foreign.RedisError, OSError):
            if mode := _mode_in(ask_once(_dedicated(client, **others), "HELLO")):
                return mode
    return ""


def _require_suitable(client: ControlClient, mode: str) -> None:
    if mode == "sentinel":
        raise ServerUnsuitable(
            f"a Sentinel answers at {client.where}, which keeps no data: write "
            "redis+sentinel://host:port/service, where `SENTINEL MASTERS` names the services"
        )
    if mode == "cluster" and client.connection_pool.connection_kwargs.get("db"):
        raise ServerUnsuitable(
            f"a cluster answers at {client.where}, which has database 0 only: leave out the number behind the host"
        )


def _require_usable_files(client: ControlClient) -> None:
    """Raise ServerUnavailable unless the files that the URL names for TLS are certificates that fit together.

    A connection would report it as a server that does not answer.
    """
    settings = client.connection_pool.connection_kwargs
    for option, what in _FILES_OF_TLS.items():
        if (file := settings.get(option)) and not os.access(file, os.R_OK):
            raise ServerUnavailable(
                f"the {what} {str(file)!r} for {client.where} cannot be read: write ?{option}=FILE with the path of a "
                "file on this host in the URL"
            )
    ca, certificate, key = (settings.get(option) for option in _FILES_OF_TLS)
    if key and not certificate:
        raise ServerUnavailable(
            f"the address {client.where} names a client key without its certificate: write "
            "?ssl_certfile=FILE&ssl_keyfile=FILE in the URL"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    options, files = "ssl_ca_certs=FILE", str(ca)
    try:
        if ca:
            context.load_verify_locations(ca)
        if certificate:
            options, files = "ssl_certfile=FILE&ssl_keyfile=FILE", f"{certificate} and {key or 'no key'}"
            context.load_cert_chain(certificate, key, settings.get("ssl_password") or "")
    except (ssl.SSLError, OSError) as error:
        raise ServerUnavailable(
            f"{files} for {client.where} cannot be used ({getattr(error, 'reason', None) or error}): write ?{options} "
            "with files in the PEM format, a certificate and the key that belongs to it, in the URL"
        ) from None


def _client_of_first(url: str, client_class: type[AnyClient], timeout_s: float) -> tuple[AnyClient, list[Address]]:
    """Return a client of the first host of a URL, and all hosts if it names several."""
    if not isinstance(url, str):
        raise ServerUnavailable(f"{url!r:.80} is no Redis URL: {_FORMS}")
    found = _HOSTS.fullmatch(_with_usual_scheme(url := url.strip()))
    if found is None:
        return _client(url, client_class, timeout_s), []
    seeds: list[Address] = []
    clients = []
    for host in found["hosts"].split(","):
        one = _client(f"{found['before']}{host}{found['after'] or ''}", client_class, timeout_s)
        clients.append(one)
        settings = one.connection_pool.connection_kwargs
        seeds.append((settings.get("host", "localhost"), int(settings.get("port", 6379))))
    return clients[0], seeds


def _with_usual_scheme(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return f"{_OTHER_SCHEMES.get(scheme, scheme)}{mark}{rest}"


def _client(url: str, client_class: type[AnyClient], timeout_s: float) -> AnyClient:
    """Return a client that is not connected. A wrong URL shows here, not at the first command."""
    url = _with_usual_scheme(url)
    try:
        url, memory_bytes = _split_memory(url)
        if not is_sentinel_url(url):
            _check_path(url)
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            **_without_maintenance(),
            **_parser(),
        }
        client: Any
        if is_sentinel_url(url):
            client = client_of_service(parse_sentinel_url(url), client_class, options)
        else:
            client = client_class.from_pool(ClientPool.from_url(url, **options))
        pool = client.connection_pool
        if pool.connection_kwargs.get("decode_responses") or pool.connection_kwargs.get("protocol") != 2:
            raise ValueError("decode_responses and protocol=3 are not supported")
        connections_of(client)  # from the first one on
        client.limit_memory(memory_bytes)
        pool.connection_class(**pool.connection_kwargs)  # an unknown ?option= is a TypeError only here
    except (ValueError, TypeError, redis.RedisError) as error:
        text = " ".join(str(error).replace(url, redacted(url)).split())
        if found := re.search(r"unexpected keyword argument ('\w+')", text):
            text = f"it has no option {found[1]}"
        if "://" not in url:
            text = "it does not begin with redis://"
        secret = url.partition("://")[2].rpartition("@")[0]
        if any(letter in secret for letter in "/?#@"):  # Python's message would quote a part of the password
            scheme, host = url.partition("://")[0], url.rpartition("@")[2]
            raise ServerUnavailable(
                f"{scheme}://...@{host} is no Redis URL: in a user or password write "
                "%2F for /, %3F for ?, %23 for # and %40 for @ (urllib.parse.quote(password, safe=''))"
            ) from None
        raise ServerUnavailable(f"{redacted(url)!r} is no Redis URL ({text}): {_FORMS}") from None
    return cast(AnyClient, client)


def with_memory(url: str, nbytes: int | None) -> str:
    """Return an address that names the memory of its servers, or the same without a number."""
    return url if nbytes is None else f"{url}{'&' if '?' in url else '?'}{MEMORY_OPTION}={nbytes}"


def _split_memory(url: str) -> tuple[str, int]:
    """Return an address without the option of Penstock's own, and the bytes that it names, or 0."""
    found = re.search(rf"[?&]{MEMORY_OPTION}=([^&#]*)", url)
    if found is None:
        return url, 0
    size = re.fullmatch(r"([0-9]{1,18})([kmgt]?)b?", found[1].lower())
    if size is None:
        raise ValueError(f"{MEMORY_OPTION} is a number of bytes as 8gb, found {found[1]!r}")
    before, after = url[: found.start()], url[found.end() :]
    if found[0].startswith("?") and after.startswith("&"):
        after = f"?{after[1:]}"
    return before + after, int(size[1]) << 10 * ("kmgt".find(size[2]) + 1 if size[2] else 0)


def check_url(url: str) -> None:
    """Raise ServerUnavailable for a text that is not a Redis URL. It makes no connection."""
    _client_of_first(url, ControlClient, CONNECT_TIMEOUT_S)[0].close()


def _check_path(url: str) -> None:
    """Refuse options of TLS without TLS, and a path that redis-py takes for database 0 and would write there."""
    parts = urlsplit(url)
    if parts.scheme in ("redis", "unix") and (found := re.search(r"(?:^|&)(ssl_\w+)=", parts.query)):
        raise ValueError(f"{found[1]} is an option of rediss://")
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ValueError(f"the path is a database number, found {database!r}")


def lets_in_all(client: ControlClient) -> bool | None:
    """Return whether the server answers a connection without a login. None means that it cannot be reached anew."""
    login = dict.fromkeys(("username", "password", "credential_provider", "client_name"))
    try:
        ask_once(_dedicated(client, **login, db=0), "PING")
    except (redis.AuthenticationError, redis.ResponseError) as error:
        return is_disk_refusal(error)  # it lets in, and cannot write its disk
    except (redis.RedisError, OSError):
        return None
    return True


def _dedicated(client: redis.Redis, **others: object) -> Any:
    """Return a connection with the client's address, TLS and login, not connected yet.

    ``others`` replace its settings.
    """
    return client.connection_pool.connection_class(**_settings_of(client) | others)


def _settings_of(client: redis.Redis) -> dict[str, Any]:
    """Return the arguments for a connection with the client's address, TLS and login."""
    kwargs: dict[str, Any] = {
        name: value
        for name, value in client.connection_pool.connection_kwargs.items()
        if not name.startswith(("maint_", "orig_", "oss_cluster_"))  # redis-py's maintenance moves connections
    }
    kwargs |= {"protocol": 2, "decode_responses": False, "health_check_interval": 0}
    # a TLS handshake has no other bound; channels set their own
    return kwargs | {"socket_timeout": min(CONNECT_TIMEOUT_S, kwargs.get("socket_timeout") or CONNECT_TIMEOUT_S)}


def _without_maintenance() -> dict[str, Any]:
    """Return options that switch off maintenance notifications (redis-py 7 and later), which move connections."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


def _parser() -> dict[str, Any]:
    """Return the option by which redis-py tells redirections from other refusals, in versions that need it."""
    parser = getattr(redis.cluster, "ClusterParser", None)
    return {} if parser is None else {"parser_class": parser}
