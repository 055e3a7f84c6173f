"""A folder of images on disk, walked once. Links are followed, but not back into a folder above."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock_common.errors import SampleError, SourceError
from penstock_common.format.limits import MAX_FIELD_BYTES
from penstock_producer.sources.files import File, choose, shown


class Folder:
    """The images below a folder."""

    def __init__(self, path: str) -> None:
        self._root = Path(path)
        if not self._root.is_dir():
            what = "a file that is no .zip" if self._root.exists() else "nothing"
            raise SourceError(f"no image folder at {path}: found {what} there; give a folder or a .zip of images")
        self.files = choose(_walk(str(self._root), "", ()), path)

    def read(self, index: int) -> bytes:
        """The whole file."""
        path = self.files[index].path
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
