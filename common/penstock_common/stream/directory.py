"""The directory of streams: one key that has the names of a server's streams, so that nobody scans for them.

A name in it is a hint, and the stream's meta is the fact. Versions before it neither write nor read it. Therefore the
first stream that is entered brings all that a scan finds, and `list_streams` may scan as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from penstock_common.errors import Unauthorized
from penstock_common.stream.commands import Client, Refused
from penstock_common.stream.keys import ANY_META, STREAM_NAMES, StreamKeys, is_name, name_in_meta_key

SCAN_EVERY_S: Final = 60.0
"""The time between two scans of a program that looks at all streams again and again."""


@contextmanager
def _as_a_hint() -> Iterator[None]:
    """Go on without the directory if another program wrote over it, or if this user may not use it."""
    with suppress(Unauthorized, Refused):
        yield


def enter_stream(client: Client, name: str, stream_id: str) -> None:
    """Note a stream in the directory. The first one that is noted brings those that older versions made."""
    with _as_a_hint():
        if client.hget(STREAM_NAMES, name) == stream_id.encode():
            return
        others = {} if client.exists(STREAM_NAMES) else _ids_of(client, scan_streams(client))
        client.hset(STREAM_NAMES, mapping={**others, name: stream_id})


def strike_stream(client: Client, name: str) -> None:
    """Remove a stream from the directory."""
    with _as_a_hint():
        client.hdel(STREAM_NAMES, name)


def list_streams(client: Client, *, is_scanned: bool = False) -> list[str]:
    """Return the names of all streams of the server, sorted.

    Args:
        client: The streams' server.
        is_scanned: Whether all keys are scanned as well, for streams that only an older version wrote.
    """
    known = _entered(client)
    if known is None:
        return scan_streams(client)
    return _existing(client, known.union(scan_streams(client) if is_scanned else ()))


def scan_streams(client: Client) -> list[str]:
    """Return the names of all streams by their meta keys, sorted. It goes through all keys of every server."""
    names = (name_in_meta_key(key) for key in client.scan_iter(match=ANY_META, count=1000))
    return sorted({name for name in names if is_name(name)})  # another program's key with a similar name


class StreamLister:
    """The names of all streams for a program that asks again and again. It scans every `SCAN_EVERY_S` only."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._scanned: list[str] = []
        self._scan_at_s = clock()

    def names(self) -> list[str]:
        """Return the names, sorted."""
        known = _entered(self._client)
        if known is None or self._clock() >= self._scan_at_s:
            self._scanned, self._scan_at_s = scan_streams(self._client), self._clock() + SCAN_EVERY_S
        return _existing(self._client, (known or set()).union(self._scanned))


def _entered(client: Client) -> set[str] | None:
    """Return the names in the directory, or None if there is none."""
    found: list[bytes] = []
    with _as_a_hint():
        found = client.hkeys(STREAM_NAMES)
    return {text for name in found if is_name(text := name.decode("utf-8", "replace"))} or None


def _existing(client: Client, names: Iterable[str]) -> list[str]:
    """Return the names whose meta is there, sorted. A process that died may have left others."""
    ordered = sorted(names)
    with client.pipeline(transaction=False) as pipe:
        for name in ordered:
            pipe.exists(StreamKeys(name).meta)
        return [name for name, is_there in zip(ordered, pipe.execute(), strict=True) if is_there]


def _ids_of(client: Client, names: list[str]) -> dict[str, str]:
    """Return stream -> id, without those whose meta is damaged."""
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hget(StreamKeys(name).meta, "id")
        replies = pipe.execute(raise_on_error=False)
    return {name: reply.decode() for name, reply in zip(names, replies, strict=True) if isinstance(reply, bytes)}
