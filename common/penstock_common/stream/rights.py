"""The rights of a user: the commands and keys that a role needs, and the ACL SETUSER line for those that are missing.

docs/acl.md has whole lines. Each command is tried on keys that do not exist, with arguments that change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.exceptions import NoPermissionError, ResponseError

from penstock_common.errors import ServerUnavailable, Unauthorized
from penstock_common.server.client import ANSWER_S
from penstock_common.server.error_translation import (
    is_about_keys,
    refused_command,
    server_at,
    translated,
)
from penstock_common.stream.keys import patterns_of_stream, rights_keys

_PROBES: Final = {
    name: words.split()
    for name, words in {
        "ping": "PING", "time": "TIME", "info": "INFO server", "scan": "SCAN 0 COUNT 1", "exists": "EXISTS KEY",
        "unlink": "UNLINK KEY", "get": "GET KEY", "set": "SET KEY v XX", "getrange": "GETRANGE KEY 0 1",
        "strlen": "STRLEN KEY", "setbit": "SETBIT KEY 0 2", "setrange": "SETRANGE KEY -1 v",
        "bitcount": "BITCOUNT KEY", "hget": "HGET KEY f", "hmget": "HMGET KEY f", "hgetall": "HGETALL KEY",
        "hkeys": "HKEYS KEY", "hlen": "HLEN KEY", "hexists": "HEXISTS KEY f", "hscan": "HSCAN KEY 0",
        "hset": "HSET KEY f v f", "hdel": "HDEL KEY f", "hincrby": "HINCRBY KEY f v",
        "xadd": "XADD KEY NOMKSTREAM * f v", "xlen": "XLEN KEY", "xrange": "XRANGE KEY - +",
        "xrevrange": "XREVRANGE KEY + -", "xdel": "XDEL KEY 0-1", "xread": "XREAD COUNT 1 STREAMS KEY 0",
        "xreadgroup": "XREADGROUP GROUP g c COUNT 1 STREAMS KEY >", "xack": "XACK KEY g 0-1",
        "xclaim": "XCLAIM KEY g c 0 0-1", "xpending": "XPENDING KEY g", "xinfo|groups": "XINFO GROUPS KEY",
        "xgroup|create": "XGROUP CREATE KEY g 0", "xgroup|setid": "XGROUP SETID KEY g 0",
        "xgroup|destroy": "XGROUP DESTROY KEY g", "xgroup|delconsumer": "XGROUP DELCONSUMER KEY g c",
        "eval": "EVAL return 1 KEY", "evalsha": f"EVALSHA {'0' * 40} 1 KEY", "script|load": "SCRIPT LOAD return",
        "multi": "MULTI", "exec": "EXEC", "watch": "WATCH KEY",
    }.items()
}  # fmt: skip
"""Command -> what is sent to learn whether the user may use it. It fails, or finds nothing."""

WRITER: Final = (
    "time", "info", "scan", "exists", "unlink", "get", "set", "hget", "hmget", "hgetall", "hkeys", "hexists",
    "hset", "hdel", "hincrby", "xadd", "xdel", "xrange", "xrevrange", "xinfo|groups", "xgroup|create",
    "xgroup|setid", "eval", "evalsha", "multi", "exec",
)  # fmt: skip
LOADER: Final = (
    "time", "scan", "exists", "get", "hget", "hmget", "hgetall", "hkeys", "hexists", "hset", "hdel",
    "hincrby", "setbit", "setrange", "bitcount", "getrange", "xack", "xclaim", "xrange", "xrevrange", "xread",
    "xreadgroup", "xpending", "xinfo|groups", "xgroup|create", "xgroup|delconsumer", "eval", "evalsha",
    "script|load",
)  # fmt: skip
MONITOR: Final = (
    "time", "info", "scan", "hget", "hmget", "hgetall", "xlen", "xrange", "xrevrange", "xpending",
    "xinfo|groups",
)  # fmt: skip
ALL: Final = tuple(_PROBES)
ANY_STREAM: Final = "~any"
"""A name for the keys of all streams, which no stream has."""


@dataclass(frozen=True, slots=True)
class Role:
    """The rights that a program needs."""

    commands: tuple[str, ...]
    """The commands, as ACL SETUSER names them."""
    stream: str = ANY_STREAM
    """The stream whose keys are needed."""


@dataclass(frozen=True, slots=True)
class MissingRights:
    """The rights that a user lacks."""

    commands: tuple[str, ...]
    """The commands, as ACL SETUSER names them."""
    keys: tuple[str, ...]
    """Commands that are allowed, but not for the keys."""

    def rules(self, stream: str) -> str:
        """Return the rules that add the rights, for ACL SETUSER."""
        patterns = ["penstock:*"] if stream == ANY_STREAM else patterns_of_stream(stream)
        patterns = [f"~{pattern}" for pattern in patterns] if self.keys else []
        return " ".join([*patterns, *(f"+{command}" for command in self.commands)])


def find_missing(client: Any, needed: Iterable[str] = ALL, stream: str = ANY_STREAM) -> MissingRights:
    """Return what the user of a client may not do, in one round trip to each server. One that is away is left out.

    Args:
        client: A client that is connected.
        needed: The commands, as ACL SETUSER names them.
        stream: The stream whose keys are needed.
    """
    names = tuple(needed)
    found = [
        answer
        for _, answer in client.at_once(lambda node: _missing_at(node, names, stream), ANSWER_S)
        if isinstance(answer, MissingRights)
    ]
    return MissingRights(
        tuple(dict.fromkeys(one for each in found for one in each.commands)),
        tuple(dict.fromkeys(one for each in found for one in each.keys)),
    )


def require_rights(client: Any, needed: Iterable[str], stream: str | None = None) -> None:
    """Raise Unauthorized, with the line to paste, if a user lacks rights on the server of the stream's own keys.

    It takes one round trip. A server that is away tells nothing. Other servers refuse what comes to them. A later
    refusal names only rights of this role.
    """
    name = stream or ANY_STREAM
    role = Role(tuple(needed), name)
    client.take_role(role)
    own = client.node_of(rights_keys(name)[0])
    with suppress(ServerUnavailable):  # the next command waits for it
        for _, failure in client.at_once(
            lambda node: lacking(node, role.commands, name) if node is own else None, ANSWER_S
        ):
            if isinstance(failure, Unauthorized):
                raise failure


def role_of_refusal(error: Exception, role: Role | None) -> Role:
    """Return what to ask for after a refusal: the rights of the role, and the command that the error names.

    Without a role it is that command, or all commands if the error names none.
    """
    refused = refused_command(error)
    named = () if refused not in _PROBES else (refused,)
    if role is None:
        return Role(named or ALL)
    return Role(tuple(dict.fromkeys((*role.commands, *named))), role.stream)


def require_commands(client: Any, needed: Iterable[str]) -> None:
    """Raise Unauthorized, with the line to paste, if a user may not use some of these commands.

    It ignores the keys, which a user may have of one stream only. It takes one round trip to each server.
    """
    missing = replace(find_missing(client, needed), keys=())
    if missing.commands:
        raise _unauthorized(client, missing, ANY_STREAM)


def lacking(client: Any, needed: Iterable[str] = ALL, stream: str = ANY_STREAM) -> Unauthorized | None:
    """Return the error that names the rights that a user lacks, or None if it has all."""
    names = tuple(needed)
    missing = find_missing(client, names, stream)
    # without a role all commands were asked for, and most users should lack some
    instead = "log in as a user whose role has them, or, " if names == ALL else ""
    return _unauthorized(client, missing, stream, instead) if missing.commands or missing.keys else None


def user_of(client: Any) -> str:
    """Return the name of the user in a client's address. Without a name it is the server's default user."""
    return client.connection_pool.connection_kwargs.get("username") or "default"


def _unauthorized(client: Any, missing: MissingRights, stream: str, instead: str = "") -> Unauthorized:
    user = user_of(client)
    return Unauthorized(
        f"user {user!r} of {server_at(client.where)} lacks rights: {instead}as an administrator, run "
        f"`ACL SETUSER {user} {missing.rules(stream)}` there (docs/acl.md has a whole line for each role)"
    )


def _missing_at(node: Any, names: tuple[str, ...], stream: str) -> MissingRights:
    own, partition = rights_keys(stream)
    asked = [(name, [partition if word == "KEY" else word for word in _PROBES[name]]) for name in names]
    both = [name for name in ("hget", "hset") if name in names]
    asked += [(name, [own if word == "KEY" else word for word in _PROBES[name]]) for name in both]
    commands: list[str] = []
    keys: list[str] = []
    with translated(node):
        replies = node.request().of(lambda: _replies(node.connection_pool, [words for _, words in asked]))
    for (name, _), reply in zip(asked, replies, strict=True):
        if isinstance(reply, NoPermissionError):
            (keys if is_about_keys(reply) else commands).append(name)
    return MissingRights(tuple(commands), tuple(keys))


def _replies(pool: Any, commands: list[list[str]]) -> list[Any]:
    replies: list[Any] = []
    connection = pool.get_connection()
    try:
        connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                # Its traceback would keep the callers' frames, and a loader in them, until the next collection.
                replies.append(error.with_traceback(None))
    finally:
        connection.disconnect()  # it may be inside a MULTI or a WATCH
        pool.release(connection)
    return replies
