"""A zip of images, read in place: nothing is unpacked, and no state is shared between threads or forked processes.

``zipfile`` reads the directory; members are read with ``pread``, because a seek is shared with forked processes.
"""

from __future__ import annotations

import datetime as dt
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.files import File, choose, is_hidden, shown

MAX_MEMBER_BYTES = 512 << 20
"""No tensor field may be larger, so no image file needs to be."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, then the lengths of name and extra field; see APPNOTE.TXT 4.3.7."""
_ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True)
class _Member:
    """What reading needs of a member; a ZipInfo takes ten times the memory, and there may be a million."""

    offset: int
    packed: int
    size: int
    crc: int
    is_deflated: bool


class Zip:
    """The images in a zip file; a single top folder that holds everything is taken as the root."""

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
        self.files, self.passed_over = choose(_listed(found), path)
        self._members = [_member(found[file.path], path) for file in self.files]
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, index: int) -> bytes:
        """One member's bytes, checked against its CRC."""
        path, member = self.files[index].path, self._members[index]
        if max(member.size, member.packed) > MAX_MEMBER_BYTES:  # one file's fault, and not the archive's
            raise SampleError(f"{shown(path)} has {member.size} bytes; at most {MAX_MEMBER_BYTES} are read")
        try:
            data = self._inflated(member)
        except (OSError, zlib.error, struct.error, ValueError) as error:
            raise SampleError(f"{shown(path)}: damaged in {Path(self._path).name}: {error}") from error
        if len(data) != member.size or zlib.crc32(data) != member.crc:
            raise SampleError(f"{shown(path)}: damaged in {Path(self._path).name}: wrong size or CRC")
        return data

    def _inflated(self, member: _Member) -> bytes:
        data = os.pread(self._fd, member.packed, member_start(self._fd, member.offset))
        if not member.is_deflated:
            return data
        # one byte more than declared shows a lie; without a bound it could fill the memory
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def member_start(fd: int, offset: int) -> int:
    """Where the bytes begin of a member whose local header is at ``offset``; raises ValueError, struct.error."""
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, offset))
    if signature != b"PK\x03\x04":
        raise ValueError("its header is not where the directory says")
    return int(offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def _common_root(names: list[str]) -> str:
    roots = {name.split("/", 1)[0] if "/" in name else "" for name in names}
    root = roots.pop() if len(roots) == 1 else ""
    return f"{root}/" if root else ""


def _listed(members: dict[str, zipfile.ZipInfo]) -> Iterator[File]:
    for path, member in members.items():
        yield File(path, member.file_size, _seconds(member.date_time))


def _seconds(date_time: tuple[int, int, int, int, int, int]) -> int:
    try:
        return int(dt.datetime(*date_time, tzinfo=dt.UTC).timestamp())
    except ValueError:  # archives may hold month 0
        return 0


def _member(member: zipfile.ZipInfo, path: str) -> _Member:
    if member.flag_bits & _ENCRYPTED:
        raise SourceError(f"{path} is encrypted ({shown(member.filename)}); give a zip without a password")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise SourceError(f"{path}: {shown(member.filename)} is neither stored nor deflated; zip it again with either")
    is_deflated = member.compress_type == zipfile.ZIP_DEFLATED
    return _Member(member.header_offset, member.compress_size, member.file_size, member.CRC, is_deflated)
