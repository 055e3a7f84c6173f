"""Which files a folder or an archive of images holds: what counts as an image, what is passed over, what is reported.

Reading the bytes is ``folder``'s and ``zip``'s; what they show is ``decode``'s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock_common.errors import SourceError

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".j2k", ".ico",
)  # fmt: skip
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
    passed_over: Counter[str]
    """How many other files there are, by what their names end in."""

    def read(self, index: int) -> bytes:
        """The whole file; raises SampleError naming it."""

    def close(self) -> None:
        """Give back what is open."""


def sort_out(files: Iterable[File]) -> tuple[list[File], Counter[str]]:
    """Return the images among these, sorted by path, and how many others there are by what their names end in."""
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
    return sorted(chosen, key=lambda file: file.path), others


def choose(files: Iterable[File], where: str) -> tuple[list[File], Counter[str]]:
    """Return what `sort_out` does. Raises SourceError, saying what was found instead, where there are no images."""
    chosen, others = sort_out(files)
    if not chosen:
        raise SourceError(f"no images in {where}: found {_counted(others) or 'nothing'}; {_IMAGES}")
    return chosen, others


def passed_over(info: Mapping[str, Any]) -> str | None:
    """Return one line on the files that a source, by its info, passed over. None where there are none."""
    others: Counter[str] = Counter()
    for part in (info, *info.get("parts", ())):
        others.update(part.get("passed_over", {}))
    return f"{_counted(others)} passed over: {_IMAGES}" if others else None


_IMAGES = f"images are files ending in {' '.join(EXTENSIONS)}"
_SHOWN = 4
"""So many endings are named, the commonest."""


def _counted(others: Counter[str]) -> str:
    ranked = sorted(others.items(), key=lambda counted: (-counted[1], counted[0]))
    more = sum(n for _, n in ranked[_SHOWN:])
    return ", ".join(f"{n} x {shown(suffix)}" for suffix, n in ranked[:_SHOWN]) + (f", {more} others" if more else "")


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


def fingerprint(options: Any, files: Iterable[File] = ()) -> str:
    """16 hex digits of JSON options and of every file's path, size and time."""
    digest = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8)
    for file in files:
        digest.update(f"\n{file.path}\0{file.size}\0{file.mtime}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
