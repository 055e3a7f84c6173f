"""A folder of images on disk, walked once. Links are followed, but not back into a folder above."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock_common.errors import SampleError, SourceError
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
            return (self._root / path).read_bytes()
        except OSError as error:
            raise SampleError(f"{shown(path)}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Nothing is kept open."""


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[File]:
    try:
        stat = os.stat(folder)  # noqa: PTH116 - a million files: os.scandir, no Path objects
        here = (stat.st_dev, stat.st_ino)
        if here in above:
            return
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"folder {shown(folder)} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, here))
        elif entry.is_file() or entry.is_symlink():  # a pipe named .jpg would be read for ever
            yield _file(entry, prefix + entry.name)


def _file(entry: os.DirEntry[str], path: str) -> File:
    try:
        stat = entry.stat()
    except OSError:  # a link to nothing: listed, so that reading it names it
        return File(path, 0, 0)
    return File(path, stat.st_size, int(stat.st_mtime))
