"""Translates exceptions of redis-py and of sockets into Penstock's errors: one line with what was found and what to do.

This module makes no connections. Flow control (WatchError, an EXEC that answers nil) is not a failure and is raised as
it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard
from urllib.parse import urlsplit, urlunsplit

import redis
from redis import exceptions as foreign

from penstock_common.errors import (
    PenstockError,
    ServerLoading,
    ServerUnavailable,
    ServerUnsuitable,
    Unauthorized,
    WritesRefused,
)
from penstock_common.printable import printable, readable_bytes, readable_server
from penstock_common.settings import file_with_login

START_ONE = "start one with `penstock server`, or set PENSTOCK_URL"
NODE_AWAY = "it is a node of the cluster: start it again, or see that a replica takes its place (`CLUSTER NODES`)"
FULL = "max number of clients"
_OF_PIPELINE = re.compile(r"\ACommand # \d+ \(.*?\) of pipeline caused error: ")
"""The prefix that redis-py puts before an error of a pipeline."""
_DEFAULT_USER = "default"
"""The user whose name messages leave out."""
_DENIED = re.compile(r"(?:The user executing the script can't|ACL failure in script: .*?permissions to) (run|access)")
"""The words of Redis and of Valkey 9.1 for NOPERM inside a script. The script's digest surrounds them."""
_COMMAND = re.compile(r"run the '([\w.|-]+)' command")
"""The words of NOPERM for a command."""
_ANY_KEY = re.compile(r"access (?:a key|one of the keys)")
"""The words of NOPERM for a key."""
_ANOTHER_USER = "log in as a user whose role has it, or extend the user's ACL"
_WHOLE_LINES = "docs/acl.md has a whole line for each role"
_WRONG_TYPE = "WRONGTYPE"
"""The server's word for a key of another type than a command needs; a script's error quotes it."""
_WITH_TLS = ("rediss:", "rediss+sentinel:", "valkeys:")
_CLIENT_CERTIFICATE = "name it with ?ssl_certfile=FILE&ssl_keyfile=FILE in the URL"
_NODE = re.compile(r"://(?:[^@]*@)?([^/]+)")
"""The host and port in a server's address."""
_LEAST_LIMIT_BYTES = 1 << 20
"""The least limit of a command that a server can have."""
_CLOSED = re.compile("while reading|while writing|closed|reset|Broken pipe")


class ReplyError(PenstockError, RuntimeError):
    """The server answered a command with an error; `error` is redis-py's exception, for callers that can handle it."""

    def __init__(self, error: foreign.ResponseError, where: str) -> None:
        self.error, self.where = error, where
        super().__init__(f"{server_at(where)} refused a command: {_text(error)}")


class UnknownCommand(ServerUnsuitable, foreign.ResponseError):
    """The server has no such command. A caller that can do without the command catches redis-py's class."""


def redacted(url: str) -> str:
    """Return a URL without its password, whether that is in front of the host or among the options."""
    head, _, tail = url.rpartition("@")
    scheme, _, user = head.partition("://")
    name = user.partition(":")[0]
    shown = url if not head else f"{scheme}://{tail}" if name == _DEFAULT_USER else f"{scheme}://{name}@{tail}"
    try:
        parts = urlsplit(shown)
    except ValueError:  # brackets without an end, for example: show no options, because they may hold a password
        return shown.partition("?")[0]
    kept = [
        option
        for option in parts.query.split("&")
        if not option.lower().startswith(("password=", "ssl_password=", "sentinel_password="))
    ]
    return urlunsplit(parts._replace(query="&".join(kept))) if parts.query else shown


def address(client: redis.Redis) -> str:
    """Return the URL of a client's server without its password."""
    pool = client.connection_pool
    kwargs: dict[str, Any] = pool.connection_kwargs
    if (service := kwargs.get("service")) is not None:
        return str(service.where)
    user = f"{kwargs['username']}@" if kwargs.get("username") not in (None, "", _DEFAULT_USER) else ""
    if kwargs.get("path"):
        return f"unix://{user}{kwargs['path']}"
    secure = "s" if issubclass(pool.connection_class, redis.SSLConnection) else ""
    host = kwargs.get("host") or getattr(pool, "service_name", None) or "localhost"
    base = f"redis{secure}://{user}{f'[{host}]' if ':' in host else host}:{kwargs.get('port', 6379)}"
    return f"{base}/{kwargs['db']}" if kwargs.get("db") else base


def server_at(where: str) -> str:
    """Return how messages name the server at an address, see `readable_server`."""
    return readable_server(where) if "+sentinel:" in where else f"Redis at {where}"


@contextmanager
def translated(where: str | redis.Redis) -> Iterator[None]:
    """Turn exceptions of redis-py and of sockets inside the block into Penstock's. Keep files out of the block."""
    try:
        yield
    except (foreign.RedisError, OSError) as error:
        failure = translate(error, where)
        if failure is None:
            raise
        raise failure from error


def translate(error: BaseException, where: str | redis.Redis, sent_bytes: int | None = None) -> PenstockError | None:
    """Return the Penstock error for `error`, or None if it is one already or does not come from the server.

    ``sent_bytes`` is the size of the last request on a channel. A client, or a channel, has been answered before.
    """
    server = where if isinstance(where, str) else address(where)
    # 1. Penstock's own, or not a failure
    if isinstance(error, PenstockError):
        return None
    _spell_out(error)
    # 2. the server refused this client; redis-py makes these ConnectionErrors, so they come first
    if isinstance(error, foreign.BusyLoadingError):
        return ServerLoading(f"{server_at(server)} is still loading its data: wait until it has, then try again")
    if isinstance(error, foreign.AuthenticationError | foreign.AuthenticationWrongNumberOfArgsError):
        return Unauthorized(f"{server_at(server)} refused the login ({_text(error)}): {_login_advice(server)}")
    # 3. no usable connection
    if isinstance(error, foreign.TimeoutError | TimeoutError):
        hint = ", or without TLS (then write redis://)" if server.startswith(_WITH_TLS) else ""
        return ServerUnavailable(
            f"{server_at(server)} does not answer ({_text(error)}): is it stopped, overloaded, behind a firewall{hint}?"
        )
    if isinstance(error, foreign.ConnectionError | OSError):
        sent_bytes = sent_bytes if isinstance(where, str) else 0
        return _unreachable(error, server, sent_bytes, is_node=getattr(where, "is_of_cluster", False))
    if isinstance(error, foreign.InvalidResponse):
        return ServerUnavailable(
            f"what answers at {server} does not speak the Redis protocol ({_text(error)}): check host and port"
        )
    # 4. the server refused one command
    if isinstance(error, foreign.ResponseError):
        is_cluster = getattr(where, "is_spread", False)
        if is_cluster and isinstance(error, foreign.AskError) and not isinstance(error, foreign.MovedError):
            server = where.holder_of(int(error.slot_id))  # type: ignore[union-attr]
        elif is_cluster and isinstance(error, foreign.TryAgainError):
            return ServerUnavailable(_half_moved("a slot moves", server), is_said=True)  # it names no slot
        return _refused(error, server)
    return None


def _spell_out(error: BaseException) -> None:
    """Make the server's words in an exception of redis-py printable. A traceback shows it as the cause."""
    if isinstance(error, foreign.RedisError):
        error.args = tuple(printable(part) if isinstance(part, str) else part for part in error.args)


def _login_advice(server: str) -> str:
    """Return what to do if a server refuses the login."""
    if found := file_with_login(server):
        variable, file = found
        return (
            f"put user and password into {file}, which {variable} names; a program reads it as it starts, so start "
            "this one again if the file has a newer password"
        )
    return (
        "put user and password into the URL, as in redis://user:password@host:6379; for a server that "
        '`penstock server` started here, export PENSTOCK_URL="$(penstock server --print-url)"'
    )


def _unreachable(error: BaseException, server: str, sent_bytes: int | None, *, is_node: bool) -> PenstockError:
    text = _text(error)
    is_service = "+sentinel:" in server
    plain, secure = ("redis+sentinel://", "rediss+sentinel://") if is_service else ("redis://", "rediss://")
    if "WRONG_VERSION_NUMBER" in text or "UNEXPECTED_EOF" in text:
        return ServerUnavailable(f"no TLS is spoken at {server} ({text}): write {plain} if the server has none")
    if "certificate is not valid for" in text:
        return ServerUnavailable(
            f"the certificate shown at {server} has another name ({text}): write the host as the certificate names it, "
            "or make one with this name; ?ssl_check_hostname=false in the URL takes any name"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return ServerUnavailable(
            f"the certificate shown at {server} is not trusted ({text}): name its CA with ?ssl_ca_certs=FILE in the URL"
        )
    if FULL in text or isinstance(error, foreign.MaxConnectionsError):
        return ServerUnavailable(
            f"{server_at(server)} takes no more clients ({text}): raise its maxclients", is_said=True
        )
    is_tls = server.startswith(_WITH_TLS)
    if "CERTIFICATE_REQUIRED" in text or (is_tls and "HANDSHAKE_FAILURE" in text):
        return ServerUnavailable(f"{server_at(server)} asks for a client certificate ({text}): {_CLIENT_CERTIFICATE}")
    if _CLOSED.search(text):
        found = f"{server_at(server)} closed the connection ({text})"
        if sent_bytes is not None and sent_bytes > _LEAST_LIMIT_BYTES:
            return ServerUnavailable(
                f"{found} after a request of {readable_bytes(sent_bytes)}: see its log, and whether its "
                "client-query-buffer-limit and proto-max-bulk-len are large enough (`penstock doctor`)"
            )
        if sent_bytes is not None:
            return ServerUnavailable(f"{found}: see its log, then try again")
        hint = f"if it asks for a client certificate, {_CLIENT_CERTIFICATE}" if is_tls else f"{secure} if it wants TLS"
        return ServerUnavailable(f"{found}: see its log, then try again ({hint})")
    if is_service:
        return ServerUnavailable(
            f"{server_at(server)} does not answer ({text}): see that its Sentinels run, and that the last part of the "
            "address is the service"
        )
    return ServerUnavailable(f"no Redis answers at {server} ({text}): {NODE_AWAY if is_node else START_ONE}")


def _refused(error: foreign.ResponseError, server: str) -> PenstockError:
    text = _text(error)
    if (denied := _DENIED.search(text)) is not None:
        what = "a command" if denied[1] == "run" else "a key"
        return Unauthorized(
            f"{server_at(server)} does not permit this user {what} that Penstock's scripts use: {_ANOTHER_USER}; "
            f"`penstock doctor` names the commands that it lacks, and its keys are ~penstock:*; {_WHOLE_LINES}"
        )
    if isinstance(error, foreign.NoPermissionError) or "NOPERM " in text:  # EXEC quotes it
        command = refused_command(error)
        rule = "~penstock:*" if command is None else f"+{command}"
        return Unauthorized(
            f"{server_at(server)} does not permit this user a command ({text}): {_ANOTHER_USER}: as an "
            f"administrator, run `ACL SETUSER {_user_of(server)} {rule}` there ({_WHOLE_LINES})"
        )
    if (failure := _hindered(error, text, server)) is not None:
        return failure
    if "DB index is out of range" in text:
        return ServerUnsuitable(
            f"{server_at(server)} has no database of this number: end the address with a lower one, as /0 "
            "(`redis-cli CONFIG GET databases` says how many it has)"
        )
    if is_unknown_command(error):
        return UnknownCommand(
            f"{server_at(server)} lacks a command ({text.partition(',')[0]}): see that its configuration has no "
            "`rename-command` for it, or use Redis 6.2, Valkey 7.2 or newer"
        )
    return ReplyError(error, server)


def _hindered(error: foreign.ResponseError, text: str, server: str) -> ServerUnavailable | None:
    """Return an error for a state that may pass, else None: a failover, a long script, full memory or a full disk.

    Redis 6.2 wraps these up in a script's error.
    """
    if (
        isinstance(error, foreign.ReadOnlyError)
        or "READONLY " in text
        or "with replica instances" in text
        or "instance state changed" in text  # UNBLOCKED, as are the next two
    ):
        instead = "the Sentinels name another one soon" if "+sentinel:" in server else "connect to its primary"
        return WritesRefused(f"{server_at(server)} is a read-only replica: {instead}")
    if text.startswith("UNBLOCKED"):
        cause = (
            "the stream, or an epoch of it, was deleted, released or lost (FLUSHALL), or moves to another server"
            if "no longer exists" in text
            else "somebody ended that with CLIENT UNBLOCK"
        )
        return ServerUnavailable(f"{server_at(server)} no longer waits for samples: {cause}", is_said=True)
    if isinstance(error, foreign.OutOfMemoryError) or "OOM command" in text:
        return WritesRefused(
            f"{server_at(server)} is above its maxmemory and takes no writes: raise maxmemory, or release epochs"
        )
    if text.startswith("MISCONF") or "-MISCONF" in text:
        return WritesRefused(
            f"{server_at(server)} takes no writes now ({text[:200]}): see whether its disk is full, and its log"
        )
    if text.startswith("NOREPLICAS") or "-NOREPLICAS" in text:
        return WritesRefused(f"{server_at(server)} takes no writes now ({text[:200]}): see its log")
    if text.startswith("BUSY "):
        return ServerUnavailable(
            f"{server_at(server)} is kept busy by a script ({text}): end it with SCRIPT KILL", is_said=True
        )
    if isinstance(error, foreign.MasterDownError) or text.startswith("MASTERDOWN"):  # redis-py: a ClusterDownError, too
        return ServerUnavailable(
            f"{server_at(server)} is a replica without its primary ({text}): connect to the primary", is_said=True
        )
    if is_redirection(error):
        return ServerUnavailable(_resharded(error, text, server), is_said=True)
    return None


def is_disk_refusal(error: foreign.RedisError) -> bool:
    """Return True if the server refused because its last write to disk failed.

    Redis refuses commands that write, and PING, so that whoever watches it notices. It answers all others.
    """
    return _text(error).startswith("MISCONF")


def is_redirection(error: object) -> TypeGuard[foreign.ResponseError]:
    """Return True if a server of a cluster does not serve the slot of a command's keys, now or any more."""
    return isinstance(
        error, foreign.AskError | foreign.TryAgainError | foreign.ClusterDownError
    )  # MOVED is an AskError


def _resharded(error: foreign.ResponseError, text: str, server: str) -> str:
    """Return what happens to a slot, and what to do if that lasts."""
    if isinstance(error, foreign.ClusterDownError):
        return (
            f"the cluster of {server} does not serve these keys ({text}): see that each master or a replica of it runs "
            "(`CLUSTER NODES`)"
        )
    if isinstance(error, foreign.MovedError):
        return f"slot {error.slot_id} moved from {server} to {error.host}:{error.port}"
    return _half_moved(
        f"slot {error.slot_id} moves from {server} to {error.host}:{error.port}"
        if isinstance(error, foreign.AskError)
        else f"a slot moves away from {server}",
        server,
    )


def _half_moved(what: str, server: str) -> str:
    """Return what to do about a slot that moves. ``redis-cli`` needs one node of the cluster only, any one."""
    node = _NODE.search(server)
    where = shlex.quote(node[1]) if node else ""
    return f"{what} and is half moved: if that lasts, finish it with `redis-cli --cluster fix {where}`"


def is_unknown_command(error: BaseException) -> bool:
    """Return True if the server has no such command."""
    return _text(error).lower().startswith(("unknown command", "err unknown command", "unknown subcommand"))


def is_wrong_type(reply: object) -> TypeGuard[Exception]:
    """Return True if the server refused a command because of a key's type; a script's error quotes it."""
    return isinstance(reply, Exception) and _WRONG_TYPE in str(reply)


def is_about_keys(error: Exception) -> bool:
    """Return True if the right that a user lacks is one to a key."""
    return _ANY_KEY.search(_text(error)) is not None


def _user_of(server: str) -> str:
    return urlsplit(server).username or _DEFAULT_USER


def is_denied(error: BaseException) -> bool:
    """Return whether a script met a command or a key that the user may not use."""
    return isinstance(error, foreign.ResponseError) and _DENIED.search(_text(error)) is not None


def refused_command(error: BaseException) -> str | None:
    """Return the command that a refusal names, as ACL SETUSER does, or None."""
    command = _COMMAND.search(_text(error))
    return None if command is None else command[1].lower()


def translate_reply(error: foreign.ResponseError, where: str | redis.Redis) -> PenstockError:
    """Return the error for an error reply that a channel read.

    It is ServerUnavailable for a state that may pass, else ReplyError.
    """
    return translate(error, where) or ReplyError(error, where if isinstance(where, str) else address(where))


def may_pass(error: BaseException | None) -> bool:
    """Return True if the server refused because of its own state, not because of the command."""
    if isinstance(error, foreign.ConnectionError):  # redis-py takes some replies of a server for it
        return isinstance(error, foreign.BusyLoadingError) or FULL in _text(error)
    return isinstance(error, foreign.ResponseError) and _hindered(error, _text(error), "") is not None


def broke_off(error: BaseException | None) -> bool:
    """Return True if a connection was made and then closed without a reply."""
    return isinstance(error, foreign.ConnectionError | OSError) and bool(
        _CLOSED.search(text := _text(error)) or "UNEXPECTED_EOF" in text
    )


def _text(error: BaseException) -> str:
    """Return an exception's text as one line. Of a pipeline's error, return only the server's words."""
    return _OF_PIPELINE.sub("", " ".join(str(error).split()), count=1).rstrip(".") or type(error).__name__
