"""The directory of streams: one key that has the names of a server's streams, which saves a scan of all keys.

A name in it is a hint, and the stream's meta is the fact. Versions before it neither write nor read it. Therefore the
first stream that is entered brings all that a scan finds, and `list_streams` may scan as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from penstock_common.errors import ServerUnavailable, Unauthorized
from penstock_common.server.channel import REPLY_TIMEOUT_S
from penstock_common.server.client import ANSWER_S
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, Refused, ask_all, run_script
from penstock_common.stream.keys import ANY_META, STREAM_NAMES, StreamKeys, is_name, name_in_meta_key

_FORGET_FIELD = load_script("forget_field")

Answer = TypeVar("Answer")

SCAN_EVERY_S: Final = 60.0
"""The time between two scans of a program that looks at all streams again and again."""
SCAN_S: Final = 1.0
"""The longest scan for the text of an error. It goes through some 100,000 keys."""


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


def strike_stream(client: Client, name: str, stream_id: bytes) -> None:
    """Remove a stream from the directory, unless the name is a newer stream's. Without an id, remove it anyway."""
    with _as_a_hint():
        if stream_id:
            run_script(client, _FORGET_FIELD, [STREAM_NAMES], [name, stream_id])
        else:
            client.hdel(STREAM_NAMES, name)


def list_streams(client: Client) -> list[str]:
    """Return the names of all streams of the servers, sorted. They are scanned only if there is no directory."""
    known = _entered(client)
    if known is None:
        return scan_streams(client)
    return sorted(_existing(client, known))


def scan_streams(client: Client) -> list[str]:
    """Return the names of all streams by their meta keys, sorted. It goes through all keys of every server."""
    names = (name_in_meta_key(key) for key in client.scan_iter(match=ANY_META, count=1000))
    return sorted({name for name in names if is_name(name)})  # another program's key with a similar name


def list_all_streams(client: Client) -> list[str]:
    """Return the names of all streams, sorted: also those of older versions that a scan of `SCAN_S` finds."""
    found = set(list_streams(client))
    with _as_a_hint():
        for _, names in client.at_once(_scan_briefly, ANSWER_S):
            if isinstance(names, set):  # a silent server has none to tell
                found |= names
    return sorted(found)


def _scan_briefly(client: Client) -> set[str]:
    """Return the names of the streams that a scan of one server finds within `SCAN_S`."""
    found: set[str] = set()
    cursor, until_s = None, time.monotonic() + SCAN_S
    while cursor != 0 and time.monotonic() < until_s:
        cursor, keys = client.scan(cursor or 0, match=ANY_META, count=1000)
        found.update(filter(is_name, map(name_in_meta_key, keys)))
    return found


def why_empty(client: Client) -> str:
    """Return the words on keys in other databases of a server without streams, or '' if there are none."""
    own = client.connection_pool.connection_kwargs.get("db") or 0
    found: dict[str, object] = {}
    with _as_a_hint():
        found = client.info("keyspace")
    others = [number for name in found if (number := int(name.removeprefix("db"))) != own]
    if not others:
        return ""
    has = f"database {others[0]} has" if len(others) == 1 else f"databases {', '.join(map(str, others))} have"
    return f"this database of the server has no streams; {has} keys: is the number at the end of the address right?"


class StreamLister:
    """The names of all streams for a program that asks again and again. It scans every `SCAN_EVERY_S` only.

    With several servers, it does not wait for a silent one. It keeps the names that were known to be on that server.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._known: set[str] = set()
        self._scan_at_s = clock()
        self.silent: dict[str, str] = {}
        """Address of each server that did not answer at the last look -> its failure. It may have more streams."""

    @property
    def unseen(self) -> dict[str, str]:
        """Return, under what a list of streams may call them, the streams that only a silent server knows."""
        return {f"others at {where}": failure for where, failure in self.silent.items()}

    def names(self) -> list[str]:
        """Return the names, sorted."""
        self.silent = {}
        directory = self._client.node_of(STREAM_NAMES)
        entered = self._asked(lambda node: _entered(node) if node is directory else set(), ANSWER_S)
        if None in entered or self._clock() >= self._scan_at_s:
            self._scan_at_s = self._clock() + SCAN_EVERY_S
            self._known = self._known.union(*self._asked(scan_streams, REPLY_TIMEOUT_S))
        known = self._known.union(*(names for names in entered if names is not None))
        nodes = {name: self._client.node_of(StreamKeys(name).meta) for name in known}
        there = self._asked(lambda node: _existing(node, [n for n in known if nodes[n] is node]), ANSWER_S)
        self._known = {name for name in known if nodes[name].where in self.silent}.union(*there)
        return sorted(self._known)

    def _asked(self, ask: Callable[[Client], Answer], seconds: float) -> list[Answer]:
        """Return what each server answers that does so in time, and note the others."""
        found: list[Answer] = []
        for node, answer in self._client.at_once(ask, seconds):
            if isinstance(answer, ServerUnavailable):
                self.silent[node.where] = str(answer)
            elif isinstance(answer, Exception):
                raise answer
            else:
                found.append(answer)
        return found


def _entered(client: Client) -> set[str] | None:
    """Return the names in the directory, or None if there is none."""
    found: list[bytes] = []
    with _as_a_hint():
        found = client.hkeys(STREAM_NAMES)
    return {text for name in found if is_name(text := name.decode("utf-8", "replace"))} or None


def _existing(client: Client, names: Iterable[str]) -> list[str]:
    """Return the names whose meta is there. A process that died may have left others."""
    ordered = list(names)
    replies = ask_all(client, [("EXISTS", StreamKeys(name).meta) for name in ordered])
    return [name for name, is_there in zip(ordered, replies, strict=True) if is_there]


def _ids_of(client: Client, names: list[str]) -> dict[str, str]:
    """Return stream -> id, without those whose meta is damaged."""
    replies = ask_all(client, [("HGET", StreamKeys(name).meta, "id") for name in names], raises=False)
    return {name: reply.decode() for name, reply in zip(names, replies, strict=True) if isinstance(reply, bytes)}
