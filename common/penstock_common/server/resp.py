"""RESP2, both ways: commands are packed without a copy of large arguments, replies are received in place.

Small replies go through one reused buffer, and payloads straight into their final memory. RespReader knows the protocol
and its limits, and a ReceivingSocket knows a socket. Neither opens connections or names commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from redis.exceptions import InvalidResponse, ResponseError

Command: TypeAlias = Sequence[bytes | memoryview]
"""One command. Its arguments are bytes or C-contiguous memoryviews; large ones are sent without a copy."""

Reply: TypeAlias = "int | bytes | list[Reply] | ResponseError | None"
"""An error reply is a value, also inside the array of an EXEC."""

Part: TypeAlias = bytes | bytearray | memoryview
"""A piece of what is sent."""

BY_REFERENCE_BYTES: Final = 6000
"""From this size on an iovec is cheaper than a copy; redis-py's own packer cuts there too."""

BUFFER_BYTES: Final = 65536
"""The most bytes of small replies that one receive may bring."""

BEHIND_LARGE_BYTES: Final = 4096
"""The most that the first receive after a large payload may bring: the next header, and little of its payload."""

THROUGH_BUFFER_BYTES: Final = 16384
"""Payloads up to this size pass through the buffer, so that one system call brings several entries."""

FIRST_PART_BYTES: Final = 1 << 20
"""The most memory that a value may take before a byte of it has come."""

MAX_BULK_BYTES: Final = (512 << 20) + 65536
"""The default of proto-max-bulk-len, and some slack. A server that announces more is broken or hostile."""

MAX_ITEMS: Final = 1 << 22
"""The most items of a reply, those of all its lists together. An item of four bytes takes 64 bytes of memory."""
MAX_DEPTH: Final = 16

_POSITIONS = 16
_NUMBER = re.compile(rb"0|-?[1-9]\d{0,18}")
_LENGTHS = tuple(b"$%d\r\n" % size for size in range(1024))
_CRLF = b"\r\n"
_NIL = (bytearray(b"*-1"), bytearray(b"$-1"))
_ENTRY = re.compile(rb"\*2\r\n\$([1-9]\d?)\r\n(\d{1,20}-\d{1,20})\r\n\*(0|[1-9]\d{0,6})\r\n")
_FIELD = re.compile(rb"\$(0|[1-9]\d{0,2})\r\n([^\r\n]{0,255})\r\n\$(0|[1-9]\d{0,9})\r\n")


class Skip(Enum):
    """The type of SKIP."""

    SKIP = "skip"


SKIP: Final = Skip.SKIP
"""The answer of EntrySink.target for a field whose bytes are read and dropped."""


class EntrySink(Protocol):
    """An object that decides where each field of a received entry goes.

    It never raises: it records its failure and returns SKIP.
    """

    def begin(self, entry_id: bytes) -> None:
        """Note that an entry starts."""

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Return writable 'B' views of `nbytes` in all, filled in order, or SKIP.

        None means that the field goes to `value`.
        """

    def value(self, name: bytes, data: bytes) -> None:
        """Take a field for which `target` returned None."""

    def end(self) -> None:
        """Note that the entry is complete."""


class ReceivingSocket(Protocol):
    """The receiving half of a connected socket. Both methods raise at the end of the stream and after silence."""

    def receive(self, view: memoryview) -> int:
        """Receive at least one byte into `view` and return how many came."""

    def receive_all(self, views: Sequence[memoryview]) -> None:
        """Fill all views. None of them is empty."""


def pack(commands: Sequence[Command]) -> list[Part]:
    """Return the commands as bytes to be sent one after the other: small arguments copied, large ones referenced."""
    parts: list[Part] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            size = len(argument) if isinstance(argument, bytes) else argument.nbytes
            small += _LENGTHS[size] if size < 1024 else b"$%d\r\n" % size
            if size < BY_REFERENCE_BYTES:
                small += argument
            else:
                parts += (small, argument if isinstance(argument, bytes) else argument.cast("B"))
                small = bytearray()
            small += b"\r\n"
    if small:
        parts.append(small)
    return parts


def check_target(views: Sequence[memoryview], nbytes: int) -> None:
    """Raise ValueError for views of another size than the field. Filling them would corrupt neighbouring memory."""
    found = views[0].nbytes if len(views) == 1 else sum(view.nbytes for view in views)
    if found != nbytes:
        raise ValueError(f"the sink gave views of {found} bytes for a field of {nbytes}")


class RespReader:
    """Parses the replies of one connection. After an exception its place in them is lost: close the connection."""

    def __init__(self, socket: ReceivingSocket, parse_error: Callable[[str], Exception]) -> None:
        self._socket, self._parse_error = socket, parse_error
        self._buf = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buf)
        self._pos = self._end = 0
        self._window = BUFFER_BYTES
        self._items = 0  # of the lists of this reply so far
        self._seen = [(b"?", b"", 0)] * _POSITIONS  # header, name, size of the last field at each position

    def reply(self, depth: int = 0) -> Reply:
        """Return the next reply, of any type, as values."""
        line = self._line()
        kind, rest = line[0], line[1:]
        if kind == 0x24:  # $
            size = _number(rest, MAX_BULK_BYTES)
            return None if size < 0 else self._bulk(size)
        if kind == 0x3A:  # :
            return _number(rest)
        if kind == 0x2B:  # +
            return bytes(rest)
        if kind == 0x2D:  # -
            return self._error(rest)
        if kind == 0x2A and depth < MAX_DEPTH:  # *
            items = _number(rest, MAX_ITEMS)
            if items < 0:
                return None
            self._items = self._items + items if depth else items
            if self._items > MAX_ITEMS:
                raise InvalidResponse(f"a reply of {self._items} items, where at most {MAX_ITEMS} is sane")
            return [self.reply(depth + 1) for _ in range(items)]
        raise _unexpected(line)

    def entries(self, sink: EntrySink) -> int | ResponseError:
        """Receive entries of XREADGROUP, one-key XREAD or XRANGE into the sink; return how many are listed.

        An entry without fields is refused. Servers list one in a member's own history and in XCLAIM, which no reader
        asks for.
        """
        line = self._line()
        # 1. an error, or nothing (nil array, or a nil bulk)
        if line[0] == 0x2D:
            return self._error(line[1:])
        if line in _NIL:
            return 0
        count = _items(line)
        # 2. several entries can only be XRANGE's; XREAD lists one key
        if count != 1 or self._peek() != 0x2A:
            return self._many(count, sink)
        # 3. one pair: (key, entries) of XREAD, or (id, fields) of XRANGE; only entries are lists
        if _items(self._line()) != 2:
            raise InvalidResponse("expected a pair of id and fields")
        head, items = self._name(), _items(self._line())
        if items == 0 or self._peek() == 0x2A:
            return self._many(items, sink)
        self._fields(head, items, sink)
        return 1

    def _many(self, count: int, sink: EntrySink) -> int:
        for _ in range(count):
            match = _ENTRY.match(self._buf, self._pos, self._end)
            if match is not None and len(match[2]) == int(match[1]):
                self._pos = match.end()
                self._fields(match[2], int(match[3]), sink)
            else:
                self._entry(sink)
        return count

    def _entry(self, sink: EntrySink) -> None:
        """Read one entry token by token, because the buffer's end cuts its header, or its shape is unusual."""
        line = self._line()
        if _items(line) != 2:
            raise _unexpected(line)
        self._fields(self._name(), _items(self._line()), sink)

    def _fields(self, entry_id: bytes, items: int, sink: EntrySink) -> None:
        if items % 2:
            raise InvalidResponse(f"entry {entry_id!r} has a field without a value")
        sink.begin(entry_id)
        for number in range(items // 2):
            header, name, nbytes = self._seen[number % _POSITIONS]
            if self._buf.startswith(header, self._pos, self._end):  # as in the entry before: shapes are mostly fixed
                self._pos += len(header)
            else:
                name, nbytes = self._field(number % _POSITIONS)
            self._value(name, nbytes, sink)
        sink.end()

    def _field(self, number: int) -> tuple[bytes, int]:
        """Return name and size of the next field, and remember them: the next entry probably has the same."""
        match = _FIELD.match(self._buf, self._pos, self._end)
        if match is None or len(match[2]) != int(match[1]):  # cut by the buffer's end, or odd: token by token
            return self._name(), self._size()
        self._pos = match.end()
        name, nbytes = match[2], _limited(int(match[3]))
        self._seen[number] = match[0], name, nbytes
        return name, nbytes

    def _value(self, name: bytes, nbytes: int, sink: EntrySink) -> None:
        target = sink.target(name, nbytes)
        stop = self._pos + nbytes
        if stop + 2 > self._end:
            if nbytes > THROUGH_BUFFER_BYTES:
                self._large_value(name, nbytes, target, sink)
                return
            self._need(nbytes + 2)
            stop = self._pos + nbytes
        # the buffer has all of it, with its CRLF
        held = self._view[self._pos : stop]
        self._pos = stop
        self._crlf()
        if target is None:
            sink.value(name, bytes(held))
        elif target is not SKIP:
            check_target(target, nbytes)
            if len(target) == 1:
                target[0][:] = held
                return
            for view in target:
                view[:] = held[: len(view)]
                held = held[len(view) :]

    def _large_value(
        self, name: bytes, nbytes: int, target: Sequence[memoryview] | Skip | None, sink: EntrySink
    ) -> None:
        if target is None:
            sink.value(name, self._bulk(nbytes))
            return
        if target is SKIP:
            self._drop(nbytes)
        else:
            check_target(target, nbytes)
            self._into(target)
        self._crlf()

    def _bulk(self, nbytes: int) -> bytes:
        """Return the bytes of a bulk whose header was read, and pass its CRLF."""
        if nbytes <= THROUGH_BUFFER_BYTES:
            self._need(nbytes + 2)
            start = self._pos
            self._pos = start + nbytes
            data = bytes(self._view[start : self._pos])
        else:
            data = bytes(self._grown(nbytes))
        self._crlf()
        return data

    def _grown(self, nbytes: int) -> bytearray:
        """Return a large value that has no target.

        Its memory grows with the bytes that have come, not with the announced size.
        """
        data = bytearray()
        while len(data) < nbytes:
            part = bytearray(min(nbytes - len(data), max(len(data), FIRST_PART_BYTES)))
            self._into((memoryview(part),))
            data += part
        return data

    def _into(self, views: Sequence[memoryview]) -> None:
        """Fill the views with a large payload: copy what the buffer already holds, receive the rest in place."""
        self._window = BEHIND_LARGE_BYTES
        rest = []
        for view in views:
            held = min(len(view), self._end - self._pos)
            if held:
                view[:held] = self._view[self._pos : self._pos + held]
                self._pos += held
            if held < len(view):
                rest.append(view[held:] if held else view)
        if rest:
            self._socket.receive_all(rest)

    def _drop(self, nbytes: int) -> None:
        while nbytes:
            self._need(1)
            held = min(nbytes, self._end - self._pos)
            self._pos += held
            nbytes -= held

    def _name(self) -> bytes:
        return self._bulk(self._size())

    def _size(self) -> int:
        line = self._line()
        if line[0] != 0x24:
            raise _unexpected(line)
        return _limited(_number(line[1:]))

    def _error(self, text: bytearray) -> ResponseError:
        error = self._parse_error(text.decode("utf-8", "replace"))
        if not isinstance(error, ResponseError):  # LOADING, NOAUTH: the connection is unusable
            raise error
        return error

    def _peek(self) -> int:
        self._need(1)
        return self._buf[self._pos]

    def _crlf(self) -> None:
        if self._pos + 2 > self._end:
            self._need(2)
        start = self._pos
        if not self._buf.startswith(_CRLF, start):
            raise InvalidResponse("a value is longer than announced")
        self._pos = start + 2

    def _line(self) -> bytearray:
        """Return the next line without its CRLF; it is never empty."""
        scanned = self._pos
        while (stop := self._buf.find(_CRLF, scanned, self._end)) < 0:
            held = self._end - self._pos
            if held >= BUFFER_BYTES:
                raise InvalidResponse(f"a line longer than {BUFFER_BYTES} bytes")
            self._need(held + 1)
            scanned = self._pos + max(held - 1, 0)
        line = self._buf[self._pos : stop]
        self._pos = stop + 2
        if not line:
            raise _unexpected(line)
        return line

    def _need(self, nbytes: int) -> None:
        """Receive until the buffer has `nbytes` unread bytes, which must fit into it."""
        held = self._end - self._pos
        if held >= nbytes:
            return
        self._view[:held] = self._view[self._pos : self._end]
        self._pos, self._end = 0, held
        while self._end < nbytes:
            free = self._view[self._end : max(nbytes, min(self._end + self._window, BUFFER_BYTES))]
            got = self._socket.receive(free)
            self._end += got
            if got == len(free):  # more is waiting, and no large payload since
                self._window = min(2 * self._window, BUFFER_BYTES)


def _number(text: bytearray, most: int | None = None) -> int:
    # int() would also accept spaces, underscores, signs and leading zeros, which a length cannot have
    is_plain = text.isdigit() and text[0] != 0x30 and len(text) < 19  # nearly every one
    if not is_plain and not _NUMBER.fullmatch(text):
        raise InvalidResponse(f"expected a number, found {bytes(text[:80])!r}")
    number = int(text)
    if most is not None and not -1 <= number <= most:
        raise InvalidResponse(f"a length of {number}, where at most {most} is sane")
    return number


def _items(line: bytearray) -> int:
    items = _number(line[1:], MAX_ITEMS)
    if line[0] != 0x2A or items < 0:
        raise _unexpected(line)
    return items


def _limited(size: int) -> int:
    if not 0 <= size <= MAX_BULK_BYTES:
        raise InvalidResponse(f"a value of {size} bytes, where at most {MAX_BULK_BYTES} is sane")
    return size


def _unexpected(line: bytearray) -> InvalidResponse:
    return InvalidResponse(f"found {bytes(line[:80])!r}")
