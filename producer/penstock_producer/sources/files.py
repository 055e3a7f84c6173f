"""Files as every source sees them: path, size and time, how messages show a path, and fingerprints.

``image_files`` decides which files are images and reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock_common.errors import SourceError
from penstock_common.printable import printable

_SIGNS = re.compile(r"[*?\[{]")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The signature, then the lengths of name and extra field (APPNOTE.TXT 4.3.7)."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source."""

    path: str
    """Relative to the source's root, with ``/`` on every system."""
    size: int
    """In bytes."""
    mtime: int
    """The time of the last change, in whole seconds since 1970, because copies and archives keep no more."""


def archive_of(path: str) -> str:
    """Return the file in ``FILE.npz:ARRAY``, if there is one, or the path as it is."""
    start, sign, _ = path.partition(".npz:")
    file = f"{start}.npz"
    return file if sign and os.path.isfile(file) and not os.path.lexists(path) else path  # noqa: PTH113


def require_local(*paths: str | None) -> None:
    """Raise SourceError for a path that is an address, because object stores are not read."""
    for path in paths:
        if path is not None and "://" in path and not os.path.lexists(path):
            raise SourceError(
                f"{shown(path)} is an address, expected a path: object stores are not read yet. Copy or mount the "
                "files, or read them in a dataset of your own (SOURCE `dataset`)"
            )


def is_pattern(path: str) -> bool:
    """Tell whether a path that names no file has the signs of a pattern, such as ``*.jpg`` or ``{00..09}.tar``."""
    return bool(_SIGNS.search(path)) and not os.path.lexists(path)


def folder_of(pattern: str) -> str:
    """Return the folder that a pattern begins with, before its first sign."""
    return os.path.dirname(_SIGNS.split(pattern)[0]) or "."  # noqa: PTH120


def is_hidden(path: str) -> bool:
    """Tell whether a path has a part that begins with a dot, or is in the shadow tree that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def shown(path: str) -> str:
    """Return a path fit for JSON and one-line messages.

    File names may hold line breaks, and bytes that are not UTF-8.
    """
    return printable(path.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def fingerprint(options: Any, files: Iterable[SourceFile] = ()) -> str:
    """Return 16 hex digits that change with the options and with every file's path, size and time.

    Args:
        options: a JSON value. The order of its keys makes no difference.
        files: in the order of their indices in the source.
    """
    digest = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8)
    for file in files:
        digest.update(f"\n{file.path}\0{file.size}\0{file.mtime}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def member_start(fd: int, offset: int) -> int:
    """Return the offset of a zip member's bytes.

    Args:
        fd: the open zip file.
        offset: where the zip's directory says that the member's local header is.

    Raises:
        ValueError: no local header begins at ``offset``.
        struct.error: the file ends at ``offset``.
    """
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, offset))
    if signature != b"PK\x03\x04":
        raise ValueError("its header is not where the directory says")
    return int(offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
