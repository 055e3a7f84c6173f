"""Runs scripts and reads raw replies, for every module in ``stream/``.

The module of a subject explains its commands: streams, manifest, roster, entries, ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from hashlib import sha1
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from penstock_common.errors import BadSpec, PenstockError
from penstock_common.stream.damage import unreadable_value

P = ParamSpec("P")
T = TypeVar("T")
EntryId = tuple[int, int]
"""The two numbers of an id of a Redis stream, which sort like the stream."""

Key = str
Arg = str | bytes | int

Call: TypeAlias = tuple[Sequence[Key], Sequence[Arg]]
"""A script's keys and arguments."""


class ScriptCall(NamedTuple):
    """A script with its keys and arguments, to be run now or sent later."""

    script: str
    keys: list[Key]
    arguments: list[Arg]


Client: TypeAlias = Any
"""A control connection, as ``stream.client.connect`` makes it.

redis-py declares every reply as `bytes | str`, though here it is bytes. So each reply gets its type where it is read.
"""

Refused = ResponseError
"""The error of redis-py for a command that the server refused, for callers that can handle the cause."""

_CANNOT_READ = re.compile(r"user_script:\s*\d+: (Expected |Found too many nested |attempt to |bad argument )")
"""The words of Lua and its cjson for a value that they cannot use; a command inside a script says other words."""
_UNREADABLE = (
    BadSpec, KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError, OverflowError,
)  # fmt: skip
"""The errors of parsing a text that no producer wrote."""
_NUMBER = re.compile(r"Command # (\d+) ")


@cache
def sha_of(script: str) -> bytes:
    """Return the digest by which EVALSHA knows a script."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest().encode()


def run_script(client: Client, script: str, keys: Sequence[Key], args: Iterable[Arg]) -> Any:
    """Run a script by its digest, and load it if the server has lost it (a restart, SCRIPT FLUSH).

    Raises DamagedKey if the script cannot use a value that it finds; the first key is the most likely one.
    """
    return _run(client.evalsha, client.eval, script, keys, args)


def read_by_script(client: Client, script: str, keys: Sequence[Key], args: Iterable[Arg]) -> Any:
    """Run a script that only reads, as `run_script` does. From Redis 7.0 on, the user needs no right to write."""
    return _run(client.evalsha_ro, client.eval_ro, script, keys, args)


def _run(
    by_digest: Callable[..., Any], in_full: Callable[..., Any], script: str, keys: Sequence[Key], args: Iterable[Arg]
) -> Any:
    given = list(args)
    try:
        try:
            return by_digest(sha_of(script).decode(), len(keys), *keys, *given)
        except NoScriptError:
            return in_full(script, len(keys), *keys, *given)
    except ResponseError as error:
        raise _explained(error, keys) from None


def run_scripts(client: Client, script: str, calls: Sequence[Call]) -> list[Any]:
    """Run a script once for each call, in one round trip. Some may run twice.

    Raises the first of their errors, once all have run.
    """
    if len(calls) == 1:
        return [run_script(client, script, *calls[0])]
    try:
        try:
            return _run_all(client, script, calls)
        except NoScriptError:
            client.script_load(script)
            return _run_all(client, script, calls)
    except ResponseError as error:
        number = _NUMBER.match(str(error))  # redis-py says which command of a pipeline it was
        raise _explained(error, calls[int(number[1]) - 1][0] if number else ()) from None


def _run_all(client: Client, script: str, calls: Sequence[Call]) -> list[Any]:
    sha = sha_of(script)
    return ask_all(client, [("EVALSHA", sha, len(keys), *keys, *args) for keys, args in calls])


def ask_all(client: Client, commands: Iterable[Sequence[Any]], *, raises: bool = True) -> list[Any]:
    """Return the replies to these commands, as redis-py parses them, in one round trip to each server.

    Without ``raises`` the error of a refused command is its reply.
    """
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return list(pipe.execute(raise_on_error=raises))


def _explained(error: ResponseError, keys: Sequence[Key]) -> Exception:
    """Return a script's error, or DamagedKey if the script could not use what one of these keys holds."""
    if (found := _CANNOT_READ.search(text := str(error))) is None:
        return error
    plain = ValueError(text[found.start(1) :])  # its repr is the text, and no digest of a script is in it
    return unreadable_value(" or ".join(keys[:3]), plain, keys[0] if keys else "")


def decoded(reply: dict[bytes, bytes]) -> dict[str, str]:
    """Return a hash reply as text."""
    return {key.decode(): value.decode() for key, value in reply.items()}


def readable(where: Callable[P, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that parses what a key holds: nonsense raises a DamagedKey that names the key.

    ``where`` gives the key for the function's arguments.
    """

    def decorate(parse: Callable[P, T]) -> Callable[P, T]:
        @wraps(parse)
        def parsed(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return parse(*args, **kwargs)
            except _UNREADABLE as error:
                if isinstance(error, PenstockError) and not isinstance(error, BadSpec):
                    raise
                raise unreadable_value(where(*args, **kwargs), error) from None

        return parsed

    return decorate


def is_script_error(error: Exception, word: str) -> bool:
    """Return True if a script ended with ``redis.error_reply('PENSTOCK <word>...')``."""
    return f"PENSTOCK {word}" in str(error)


def server_ms(client: Client, key: Key) -> int:
    """Return the clock of the server that holds ``key``, in ms. All ``seen`` times of that server are of it."""
    return ms_of(client.time(at=key))


def ms_of(reply: tuple[int, int]) -> int:
    """Return the answer of TIME in ms."""
    return reply[0] * 1000 + reply[1] // 1000


def parse_id(text: bytes) -> EntryId:
    """Return an entry's id as two numbers, which sort like the stream."""
    high, _, low = text.partition(b"-")
    return int(high), int(low or 0)
