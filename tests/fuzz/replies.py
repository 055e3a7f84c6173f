"""Promises for any bytes that a server sends, however they are cut: the value that they encode, or an error with a
name. The oracle is a very plain parser of RESP2, which hiredis confirms. For entries it is the plain channel's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest.mock import patch

import hiredis
from redis.exceptions import InvalidResponse, ResponseError

from penstock_common.server import resp
from penstock_common.server.channel import SKIP, Skip
from penstock_common.server.error_translation import translate
from tests.contracts.plain_channel import deliver, entries_of
from tests.contracts.sink import RecordingSink

BUFFER, THROUGH, BEHIND, LARGEST = 256, 64, 16, 4096
ENTRIES, SKIPPING, IN_PLACE = 1, 2, 4
"""Switches in an input's first byte: read entries into a sink, which drops fields or has views for them."""
_NUMBER = re.compile(rb"(0|-?[1-9][0-9]{0,18})\Z")


@contextmanager
def small_limits() -> Iterator[None]:
    """Reduce the limits, so that inputs of a few hundred bytes reach a full buffer and exceed a limit."""
    with (
        patch.object(resp, "BUFFER_BYTES", BUFFER),
        patch.object(resp, "THROUGH_BUFFER_BYTES", THROUGH),
        patch.object(resp, "BEHIND_LARGE_BYTES", BEHIND),
        patch.object(resp, "MAX_BULK_BYTES", LARGEST),
        patch.object(resp, "MAX_ITEMS", 1000),
    ):
        yield


class SlicedSocket:
    """A connection that brings given bytes in given slices, and then ends."""

    def __init__(self, data: bytes, sizes: bytes) -> None:
        self._data, self._at = data, 0
        self._sizes = cycle([size + 1 for size in sizes] or [1 << 20])
        self.most = 0
        """The largest memory that was kept for bytes to come."""

    def receive(self, view: memoryview) -> int:
        """Receive the next slice, or as much of it as fits."""
        assert len(view)
        self.most = max(self.most, len(view))
        found = self._data[self._at : self._at + min(next(self._sizes), len(view))]
        if not found:
            raise ConnectionResetError("closed by the server")
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Receive slice by slice."""
        for view in views:
            assert len(view)
            done = 0
            while done < len(view):
                done += self.receive(view[done:])


class Invalid(Exception):
    """The bytes are not RESP2."""


class Incomplete(Exception):
    """More bytes are needed."""


class Status(bytes):
    """A simple string: as a value it is bytes, and in an entry it is not allowed."""

    def __repr__(self) -> str:
        return "a status"


class Plain:
    """The oracle: RESP2 by the specification, from complete bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def value(self, depth: int = 0) -> Any:
        """Return the next reply. Errors are pairs."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return Status(rest)
        if kind == b"-":
            return ("error", rest.decode("utf-8", "replace"))
        if kind not in (b":", b"$", b"*") or not _NUMBER.match(rest):
            raise Invalid
        number = int(rest)
        if kind == b":":
            return number
        if number < -1 or number > (LARGEST if kind == b"$" else 1000) or (kind == b"*" and depth >= resp.MAX_DEPTH):
            raise Invalid
        if number < 0:
            return None
        return self._bulk(number) if kind == b"$" else [self.value(depth + 1) for _ in range(number)]

    def _bulk(self, size: int) -> bytes:
        data, end = self._data[self.at : self.at + size], self._data[self.at + size : self.at + size + 2]
        if len(end) < 2:
            raise Incomplete
        if end != b"\r\n":
            raise Invalid
        self.at += size + 2
        return data

    def _line(self) -> bytes:
        stop = self._data.find(b"\r\n", self.at)
        if stop < 0:
            raise Incomplete
        line = self._data[self.at : stop]
        if not line or len(line) >= BUFFER - 1:
            raise Invalid
        self.at = stop + 2
        return line


def check(data: bytes) -> None:
    """Raise AssertionError, or an error that a reader should not raise, if the input breaks a promise."""
    switches, cuts = data[0] if data else 0, data[1] if len(data) > 1 else 0
    sizes, stream = data[2 : 2 + cuts % 8], data[2 + cuts % 8 :]
    sliced = SlicedSocket(stream, sizes)
    reader = resp.RespReader(sliced, _parse_error)
    oracle = Plain(stream)
    for _ in range(64):  # replies in a row: the reader must stay in step
        start = oracle.at
        try:
            expected = oracle.value()
        except (Invalid, Incomplete) as error:
            _check_refused(reader, switches, type(error))
            break
        _check_hiredis(stream[start : oracle.at], expected)
        if not _check_reply(reader, switches, expected):
            break
    assert sliced.most <= BUFFER + LARGEST


def _check_refused(reader: resp.RespReader, switches: int, expected: type[Exception]) -> None:
    try:
        found: Any = reader.entries(_sink(switches)) if switches & ENTRIES else reader.reply()
    except (InvalidResponse, OSError) as error:
        _check_error(error, is_cut=expected is Incomplete or bool(switches & ENTRIES))
        return
    except FatalError:
        return
    raise AssertionError(f"{found!r} was read from what is {expected.__name__}")


def _check_error(error: Exception, *, is_cut: bool) -> None:
    assert translate(error, "there") is not None  # an error that a user sees has a name
    assert is_cut or isinstance(error, InvalidResponse)


def _check_reply(reader: resp.RespReader, switches: int, expected: Any) -> bool:
    """Return whether the reader is still in step, and may read the next reply."""
    try:
        if switches & ENTRIES:
            return _check_entries(reader, switches, expected)
        assert _plain(reader.reply()) == expected
    except FatalError:
        assert "FATAL" in repr(expected)
        return False
    return True


def _check_entries(reader: resp.RespReader, switches: int, expected: Any) -> bool:
    """Compare what the reader and the plain channel give a sink, or that both refuse."""
    if type(expected) is tuple:
        assert _plain(reader.entries(_sink(switches))) == expected
        return True
    if "a status" in repr(expected) or "'error'" in repr(expected):
        return False  # no server sends this, and the two read it differently
    wanted = _sink(switches)
    try:
        listed = entries_of(expected)
        for entry in listed:
            deliver(entry, wanted)
    except InvalidResponse:
        try:
            reader.entries(_sink(switches))
        except InvalidResponse:
            return False
        raise AssertionError(f"{expected!r} was taken for entries") from None
    found = _sink(switches)
    assert reader.entries(found) == len(listed)
    assert found.events == wanted.events
    assert found.rooms == wanted.rooms
    return True


class FatalError(Exception):
    """The errors of redis-py after which a connection is unusable."""


def _parse_error(text: str) -> Exception:
    return FatalError(text) if text.startswith("FATAL") else ResponseError(text)


def _plain(reply: Any) -> Any:
    if isinstance(reply, ResponseError):
        return ("error", str(reply))
    return [_plain(one) for one in reply] if isinstance(reply, list) else reply


class Rooms(RecordingSink):
    """A sink that keeps the memory it gave, to be compared once it is filled."""

    def __init__(self, switches: int) -> None:
        super().__init__(self._decide)
        self._switches = switches
        self.rooms: list[bytearray] = []

    def _decide(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        if self._switches & SKIPPING and len(name) % 2:
            return SKIP
        if not self._switches & IN_PLACE:
            return None
        room = bytearray(nbytes)
        self.rooms.append(room)
        view, cut = memoryview(room), nbytes // 3
        return [view[:cut], view[cut:]] if cut else [view]


def _sink(switches: int) -> Rooms:
    return Rooms(switches)


def _check_hiredis(data: bytes, expected: Any) -> None:
    """Compare the oracle with hiredis, except for bytes that no server sends."""
    if re.search(rb"[0-9]{19}|-[2-9][0-9]*\r|-1[0-9]+\r|[+-][^\r\n]*(?:\r[^\n]|\n)", data):
        return
    parser = hiredis.Reader(notEnoughData=Incomplete)
    parser.feed(data)
    assert _from_hiredis(parser.gets()) == expected


def _from_hiredis(reply: Any) -> Any:
    if isinstance(reply, hiredis.ReplyError):
        return ("error", str(reply))
    return [_from_hiredis(one) for one in reply] if isinstance(reply, list) else reply


# --- where the fuzzer starts ------------------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    """Return replies of every kind, in slices of every size."""
    entry = b"*2\r\n$3\r\n1-0\r\n*4\r\n$4\r\nmeta\r\n$2\r\n{}\r\n$1\r\nx\r\n$%d\r\n%b\r\n"
    small, large = entry % (3, b"abc"), entry % (100, b"p\r\n*" * 25)
    streams = [
        b"+OK\r\n:12\r\n$-1\r\n$5\r\nhello\r\n*-1\r\n*0\r\n-ERR no\r\n",
        b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n+b\r\n-WRONGTYPE no\r\n",
        b"$100\r\n" + b"z" * 100 + b"\r\n:-5\r\n",
        b"-FATAL gone\r\n",
        b"*1\r\n*2\r\n$3\r\nkey\r\n*2\r\n" + small + small,
        b"*1\r\n*2\r\n$3\r\nkey\r\n*3\r\n" + large + small + large,
        b"*2\r\n" + small + large,
        b"*1\r\n" + large,
        b"*2\r\n*-1\r\n*2\r\n$3\r\n2-0\r\n*-1\r\n",
        b"*1\r\n*2\r\n$3\r\nkey\r\n*1\r\n*2\r\n$3\r\n2-0\r\n$-1\r\n",
        b"*1\r\n*2\r\n$3\r\nkey\r\n*0\r\n*-1\r\n",
    ]
    cuts = [b"\x00", b"\x01\x00", b"\x03\x04\x00\x1f", b"\x02\x7f\x3f"]
    return [bytes((switches,)) + cut + stream for stream in streams for cut in cuts for switches in (0, 1, 3, 5, 7)]


TOKENS = [
    b"\r\n", b"\r", b"\n", b"*1\r\n", b"*2\r\n", b"*0\r\n", b"*-1\r\n", b"$-1\r\n", b"$0\r\n\r\n",
    b"$3\r\n1-0\r\n", b"$100\r\n", b":1\r\n", b"+OK\r\n", b"-ERR\r\n", b"-FATAL\r\n", b"$4097\r\n",
    b"$536936449\r\n", b"*1001\r\n", b"$00\r\n", b"$+1\r\n", b"$ 1\r\n", b"$1_0\r\n", b"%1\r\n", b"_\r\n",
    b"$4\r\nmeta\r\n", b"*1\r\n" * 17, b"x" * 60, b"x" * 250,
]  # fmt: skip
"""A dictionary for the fuzzer."""
