"""A folder of images on disk, walked once. Links are followed, but not back into a folder above."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock_common.errors import SampleError, SourceError
from penstock_common.format.limits import MAX_FIELD_BYTES
from penstock_producer.sources.bounds import require_inside
from penstock_producer.sources.files import File, choose, require_local, shown, sort_out


class Folder:
    """The images below a folder."""

    def __init__(self, path: str, only: Sequence[str] | None = None) -> None:
        """``only`` these, by relative path, whether they are there or not."""
        self._root = _root(path)
        found = _walk(str(self._root), "", ()) if only is None else (_named(self._root, each) for each in only)
        self.files, self.passed_over = choose(found, path)

    def read(self, index: int) -> bytes:
        """The whole file."""
        path = self.files[index].path
        require_inside(f"{self._root}/{path}")
        try:
            with open(f"{self._root}/{path}", "rb", opener=_open_at_once) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise SampleError(f"{shown(path)}: is no file any more, but a pipe or a device")
                if found.st_size > MAX_FIELD_BYTES:
                    raise SampleError(f"{shown(path)}: has {found.st_size} bytes; at most {MAX_FIELD_BYTES} are read")
                return file.read()
        except OSError as error:
            raise SampleError(f"{shown(path)}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Nothing is kept open."""


def images_below(path: str) -> tuple[list[File], Counter[str]]:
    """Return what `sort_out` does of a folder's files. Raises SourceError where there is no folder."""
    return sort_out(_walk(str(_root(path)), "", ()))


def _root(path: str) -> Path:
    require_local(path)
    root = Path(path)
    if not root.is_dir():
        what = "a file that is no .zip" if root.exists() else "nothing"
        raise SourceError(f"no image folder at {path}: found {what} there; give a folder or a .zip of images")
    return root


def _named(root: Path, path: str) -> File:
    """One that is gone is listed, so that reading it names it."""
    try:
        found = os.stat(root / path)  # noqa: PTH116 - as in _walk
    except OSError:
        return File(path, 0, 0)
    return File(path, found.st_size, int(found.st_mtime))


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[File]:
    try:
        found = os.stat(folder)  # noqa: PTH116 - a million files: os.scandir, no Path objects
        here = (found.st_dev, found.st_ino)
        if here in above:
            return
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"folder {shown(folder)} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_symlink():
            require_inside(entry.path)
        found = _what(entry)
        if stat.S_ISDIR(found.st_mode):
            yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, here))
        elif stat.S_ISREG(found.st_mode):  # a pipe named .jpg would be read for ever
            yield File(prefix + entry.name, found.st_size, int(found.st_mtime))
        elif stat.S_ISLNK(found.st_mode):  # to nothing: listed, so that reading it names it
            yield File(prefix + entry.name, 0, 0)


def _what(entry: os.DirEntry[str]) -> os.stat_result:
    """Of what a link leads to; of the link itself if it leads to nothing, in a circle, or to where nobody may look."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that has taken a file's place since would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
