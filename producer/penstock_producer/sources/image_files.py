"""The image files of a folder or zip: which files are images, and their bytes.

A folder is listed once. Links are followed, but not back into a folder above. A zip is read in place: ``zipfile`` reads
its directory, and ``pread`` its members, because forked processes share the position of a seek. ``decode`` makes pixels
of the bytes. Both kinds sort their files by path, and may be read after a fork and from threads.
"""

from __future__ import annotations

import datetime as dt
import os
import shlex
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_common.errors import SampleError, SourceError
from penstock_common.hints import near
from penstock_common.wire.limits import MAX_FIELD_BYTES
from penstock_producer.sources.allowed import require_inside
from penstock_producer.sources.files import (
    SourceFile,
    folder_of,
    is_hidden,
    is_pattern,
    member_start,
    require_local,
    shown,
)

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".j2k", ".ico",
)  # fmt: skip
"""The endings of images, in upper or lower case. Other files are ignored and counted."""


def images_among(files: Iterable[SourceFile]) -> tuple[list[SourceFile], Counter[str]]:
    """Return the images among some files, sorted by path, and the number of other files by their endings."""
    chosen: list[SourceFile] = []
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


def some_images(files: Iterable[SourceFile], where: str) -> tuple[list[SourceFile], Counter[str]]:
    """Return the result of `images_among`. Raises SourceError with what was found where there are no images."""
    chosen, others = images_among(files)
    if not chosen:
        raise SourceError(f"no images in {where}: found {_counted(others) or 'nothing'}; {_IMAGES}")
    return chosen, others


def passed_over(info: Mapping[str, Any]) -> str | None:
    """Return one line on the files that a source ignored, by its info. None where it ignored none."""
    others: Counter[str] = Counter()
    for part in (info, *info.get("parts", ())):
        others.update(part.get("passed_over", {}))
    hidden = others.pop(HIDDEN, 0)
    lines = [f"{_counted(others)} passed over: {_IMAGES}"] if others else []
    if hidden:
        lines.append(
            f"{hidden} hidden members of tars passed over: a part of their path begins with a dot, or is __MACOSX"
        )
    return "; ".join(lines) or None


HIDDEN = "hidden"
"""The key of hidden members among the endings of ignored files. Endings begin with a dot."""

_IMAGES = f"images are files ending in {' '.join(EXTENSIONS)}"


_ENDINGS_NAMED = 4
"""The most endings that a message names."""


def _counted(others: Counter[str]) -> str:
    ranked = sorted(others.items(), key=lambda counted: (-counted[1], counted[0]))
    more = sum(n for _, n in ranked[_ENDINGS_NAMED:])
    return ", ".join(f"{n} x {shown(suffix)}" for suffix, n in ranked[:_ENDINGS_NAMED]) + (
        f", {more} others" if more else ""
    )


class ImageFolder:
    """The images below a folder."""

    def __init__(self, path: str, only: Sequence[str] | None = None) -> None:
        """List the folder, or take the files ``only`` by relative path, including those that do not exist."""
        self._root = _root(path)
        found = _walk(str(self._root), "", ()) if only is None else (_named(self._root, each) for each in only)
        self.files, self.passed_over = some_images(found, path)

    def read(self, index: int) -> bytes:
        """Return the bytes of a file. Raises SampleError with its path."""
        listed = self.files[index]
        path = listed.path
        require_inside(f"{self._root}/{path}")
        try:
            with open(f"{self._root}/{path}", "rb", opener=_open_at_once) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise SampleError(f"{shown(path)}: is a pipe or a device now; expected a file")
                if found.st_size > MAX_FIELD_BYTES:
                    raise SampleError(f"{shown(path)}: has {found.st_size} bytes; at most {MAX_FIELD_BYTES} are read")
                if (found.st_size, int(found.st_mtime)) != (listed.size, listed.mtime):
                    raise SampleError(f"{shown(path)}: was changed after its folder was listed")
                return file.read()
        except OSError as error:
            raise SampleError(f"{shown(path)}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Do nothing, because nothing is kept open."""


def images_below(path: str) -> tuple[list[SourceFile], Counter[str]]:
    """Return the result of `images_among` for a folder. Raises SourceError where there is no folder."""
    return images_among(_walk(str(_root(path)), "", ()))


def _root(path: str) -> Path:
    require_local(path)
    root = Path(path)
    if not root.is_dir():
        what = "a file that is no .zip" if root.exists() else "nothing"
        if is_pattern(path):
            raise SourceError(
                f"{shown(path)} is a pattern, expected a folder: give {shown(folder_of(path))}/, which is read "
                "whole; to read a part, name its files in a file for --labels, with --skip-unlabelled"
            )
        if root.suffix == ".tar":
            raise SourceError(
                f"{path} is no image folder: a tar is read by `penstock produce tar {shlex.quote(str(path))}`"
            )
        beside = [other.name for other in root.parent.glob("*") if other.is_dir()] if root.parent.is_dir() else []
        meant = near(root.name, beside)
        hint = f"; did you mean {root.with_name(meant)}/?" if meant and not root.exists() else ""
        raise SourceError(f"no image folder at {path}: found {what} there; give a folder or a .zip of images{hint}")
    return root


def _named(root: Path, path: str) -> SourceFile:
    """Return a file of the folder. One that does not exist is listed, too, so that reading it names it."""
    try:
        found = os.stat(root / path)  # noqa: PTH116 - as in _walk
    except OSError:
        return SourceFile(path, 0, 0)
    return SourceFile(path, found.st_size, int(found.st_mtime))


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[SourceFile]:
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
        elif stat.S_ISREG(found.st_mode):  # reading a pipe named .jpg would never end
            yield SourceFile(prefix + entry.name, found.st_size, int(found.st_mtime))
        elif stat.S_ISLNK(found.st_mode):  # a broken link is listed, so that reading it names it
            yield SourceFile(prefix + entry.name, 0, 0)


def _what(entry: os.DirEntry[str]) -> os.stat_result:
    """Return the status of the file that a link leads to, or of the link itself where that cannot be read."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, because a pipe may have taken its place since."""
    return os.open(path, flags | os.O_NONBLOCK)


_ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True)
class _ZipMember:
    """The values that reading a member needs. A ZipInfo takes ten times the memory, and there may be a million."""

    offset: int
    packed: int
    size: int
    crc: int
    is_deflated: bool


class ImageZip:
    """The images of a zip file. If one top folder holds everything, paths begin below it."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.infolist() if not m.is_dir() and not is_hidden(m.filename)]
        except FileNotFoundError:
            raise SourceError(f"no file at {path}; give a folder or a .zip of images") from None
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise SourceError(f"{path} is not a readable zip: {error}") from error
        root = _common_root([m.filename for m in members])
        found = {m.filename[len(root) :]: m for m in members}
        listed = (SourceFile(name, m.file_size, _seconds(m.date_time)) for name, m in found.items())
        self.files, self.passed_over = some_images(listed, path)
        self._members = [_member(found[file.path], path) for file in self.files]
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, index: int) -> bytes:
        """Return the bytes of a member, checked against its CRC. Raises SampleError with its path."""
        path, member = self.files[index].path, self._members[index]
        if max(member.size, member.packed) > MAX_FIELD_BYTES:  # only this file is bad, the rest of the archive is not
            raise SampleError(f"{shown(path)} has {member.size} bytes; at most {MAX_FIELD_BYTES} are read")
        try:
            data = self._inflated(member)
        except (OSError, zlib.error, struct.error, ValueError) as error:
            raise SampleError(f"{shown(path)}: damaged in {Path(self._path).name}: {error}") from error
        if len(data) != member.size or zlib.crc32(data) != member.crc:
            raise SampleError(f"{shown(path)}: damaged in {Path(self._path).name}: wrong size or CRC")
        return data

    def _inflated(self, member: _ZipMember) -> bytes:
        data = os.pread(self._fd, member.packed, member_start(self._fd, member.offset))
        if not member.is_deflated:
            return data
        # one byte more than declared shows a wrong size, and without a bound it could fill the memory
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _common_root(names: list[str]) -> str:
    roots = {name.split("/", 1)[0] if "/" in name else "" for name in names}
    root = roots.pop() if len(roots) == 1 else ""
    return f"{root}/" if root else ""


def _seconds(date_time: tuple[int, int, int, int, int, int]) -> int:
    try:
        return int(dt.datetime(*date_time, tzinfo=dt.UTC).timestamp())
    except ValueError:  # archives may hold month 0
        return 0


def _member(member: zipfile.ZipInfo, path: str) -> _ZipMember:
    if member.flag_bits & _ENCRYPTED:
        raise SourceError(f"{path} is encrypted ({shown(member.filename)}); give a zip without a password")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise SourceError(f"{path}: {shown(member.filename)} is neither stored nor deflated; zip it again with either")
    is_deflated = member.compress_type == zipfile.ZIP_DEFLATED
    return _ZipMember(member.header_offset, member.compress_size, member.file_size, member.CRC, is_deflated)
