"""The end of an append-only file that a crash cut inside a transaction.

Redis removes the command that was cut, and leaves the transaction begun. Everything until the next EXEC becomes part of
it then, so another start runs what nobody was answered: a block is committed a second time.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

_BEGIN = b"*1\r\n$5\r\nMULTI\r\n"
_CHUNK = 1 << 20
_LINE = 32
"""More bytes than a line with a number has."""
_PART = re.compile(r"appendonly\.aof\.(\d+)\.incr\.aof")


def cut_open_transaction(folder: Path) -> int:
    """Remove the transaction that was begun and not ended, from the newest append-only file in a server's folder.

    No server may run there. Returns the bytes that were removed.
    """
    parts = [(int(match[1]), path) for path in folder.glob("appendonlydir/*") if (match := _PART.fullmatch(path.name))]
    newest = max(parts)[1] if parts else folder / "appendonly.aof"  # Redis 6.2 has one file
    if not newest.is_file():
        return 0
    size = newest.stat().st_size
    with newest.open("rb") as file:
        begin = _open_at(file, size)
    if begin is None:
        return 0
    os.truncate(newest, begin)
    return size - begin


def _open_at(file: BinaryIO, size: int) -> int | None:
    """Return the offset at which a transaction begins that goes on at the end of the file, or None."""
    end = size
    while end > 0:
        start = max(0, end - _CHUNK)
        file.seek(start)
        found = file.read(end - start + len(_BEGIN) - 1)
        at = found.rfind(_BEGIN)
        while at >= 0:
            if (is_open := _goes_on(file, start + at)) is not None:
                return start + at if is_open else None
            at = found.rfind(_BEGIN, 0, at)  # the bytes are a part of a sample
        end = start
    return None


def _goes_on(file: BinaryIO, begin: int) -> bool | None:
    """Return whether the file ends before an EXEC, or None if what stands at ``begin`` are no commands."""
    file.seek(begin)
    try:
        while (name := _read_command(file)) is not None:
            if name == b"EXEC":
                return False
    except ValueError:
        return None
    return True


def _read_command(file: BinaryIO) -> bytes | None:
    """Read a command, and return its name. None if the file ends first. Raises ValueError for other bytes."""
    words, name = _read_number(file, b"*"), b""
    for number in range(words or 0):
        if (length := _read_number(file, b"$")) is None:
            return None
        if number:
            file.seek(length, os.SEEK_CUR)
        else:
            name = file.read(length)
        if len(end := file.read(2)) < 2:
            return None
        if end != b"\r\n":
            raise ValueError(end)
    return None if words is None else name


def _read_number(file: BinaryIO, sign: bytes) -> int | None:
    line = file.readline(_LINE)
    if len(line) < _LINE and not line.endswith(b"\n"):
        return None
    if line[:1] != sign or not line[1:-2].isdigit():
        raise ValueError(line)
    return int(line[1:])
