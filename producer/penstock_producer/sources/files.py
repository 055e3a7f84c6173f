"""A file as all sources see it: its path, size and time, how messages show it, and the fingerprint of many.

Which files are images, and their bytes, are ``image_files``'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock_common.errors import SourceError

MAX_MEMBER_BYTES = 512 << 20
"""Bytes of the largest member of an archive that is read: no tensor field may be larger."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, then the lengths of name and extra field; see APPNOTE.TXT 4.3.7."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, by its path relative to the root, with ``/`` whatever the system."""

    path: str
    size: int
    mtime: int
    """Whole seconds: copies and archives keep no more."""


def require_local(*paths: str | None) -> None:
    """Raise SourceError for a path that is an address: object stores are not read."""
    for path in paths:
        if path is not None and "://" in path and not os.path.lexists(path):
            raise SourceError(
                f"{shown(path)} is an address, expected a path: object stores are not read yet. Copy or mount what is "
                "there, or read it in a dataset of your own (SOURCE `dataset`)"
            )


def is_hidden(path: str) -> bool:
    """Dot files, and the shadow tree that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def shown(path: str) -> str:
    """A path fit for JSON and one-line messages: file names may hold line breaks, and bytes that are no UTF-8."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fingerprint(options: Any, files: Iterable[SourceFile] = ()) -> str:
    """16 hex digits of JSON options and of every file's path, size and time."""
    digest = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8)
    for file in files:
        digest.update(f"\n{file.path}\0{file.size}\0{file.mtime}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def member_start(fd: int, offset: int) -> int:
    """Where the bytes begin of a member whose local header is at ``offset``; raises ValueError, struct.error."""
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, offset))
    if signature != b"PK\x03\x04":
        raise ValueError("its header is not where the directory says")
    return int(offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
