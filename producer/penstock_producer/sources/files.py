"""Which files a folder or an archive of images holds: what counts as an image, what is passed over, what is reported.

Reading the bytes is ``folder``'s and ``zip``'s; what they show is ``decode``'s.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock_common.errors import SourceError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Read, in any case; other files are passed over."""


@dataclass(frozen=True, slots=True)
class File:
    """One file, by its path relative to the root, with ``/`` whatever the system."""

    path: str
    size: int
    mtime: int
    """Whole seconds: copies and archives keep no more."""


class Files(Protocol):
    """A folder's or an archive's images, sorted by path; safe to read after a fork and from threads."""

    files: list[File]

    def read(self, index: int) -> bytes:
        """The whole file; raises SampleError naming it."""

    def close(self) -> None:
        """Give back what is open."""


def choose(files: Iterable[File], where: str) -> list[File]:
    """The images among these, sorted by path; raises SourceError saying what was found instead."""
    chosen: list[File] = []
    others: Counter[str] = Counter()
    for file in files:
        if is_hidden(file.path):
            continue
        suffix = os.path.splitext(file.path)[1].lower()  # noqa: PTH122 - a third of opening a large folder went to Path
        if suffix in EXTENSIONS:
            chosen.append(file)
        else:
            others[suffix or "no extension"] += 1
    if not chosen:
        found = ", ".join(f"{n} x {suffix}" for suffix, n in sorted(others.items(), key=_rank)[:4]) or "nothing"
        raise SourceError(f"no images in {where}: found {found}; images are files ending in {' '.join(EXTENSIONS)}")
    return sorted(chosen, key=lambda file: file.path)


def _rank(counted: tuple[str, int]) -> tuple[int, str]:
    return -counted[1], counted[0]


def is_hidden(path: str) -> bool:
    """Dot files, and the shadow tree that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def shown(path: str) -> str:
    """A path fit for JSON and one-line messages: file names may hold line breaks, and bytes that are no UTF-8."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fingerprint(options: Any, files: Iterable[File] = ()) -> str:
    """16 hex digits of JSON options and of every file's path, size and time."""
    digest = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8)
    for file in files:
        digest.update(f"\n{file.path}\0{file.size}\0{file.mtime}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
