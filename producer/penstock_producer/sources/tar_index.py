"""The index of a tar file: one pass over its headers finds the members of each sample, which are later read in place.

If a header is missing where one should be, the index has a bad sample, and the search continues at the next header. It
has one, too, where the file ends without the zeros that end an archive, because the file may be cut there.
With ``tarfile``, a damaged archive would silently end an epoch early.

The user's cache folder keeps the index for the next process. Each tar has one file there, named by a hash of the tar's
path, size and time. A lost file costs one pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SampleError, SourceError
from penstock_common.wire.limits import MAX_FIELD_BYTES
from penstock_producer.sources.files import SourceFile, is_hidden, shown

BLOCK = tarfile.BLOCKSIZE
_MAX_EXTENSION_BYTES = 1 << 20
"""The largest header that holds only a long name. The longest path of Linux has 4096 bytes."""
_MAX_SIZE = 1 << 62
"""The largest size that a header may claim."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True, slots=True)
class TarMember:
    """The place of one file's bytes in the archive."""

    offset: int
    size: int


def split_name(name: str) -> tuple[str, str]:
    """Return sample and field of a member, by cutting its base name at the first dot, as webdataset does.

    Example:
        >>> split_name("cat/001.seg.png")
        ('cat/001', 'seg.png')
    """
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def scan(fd: int, path: str) -> TarShard:
    """Find every sample of a tar, in the order of their first members.

    Args:
        fd: the open file.
        path: the path of the tar, for errors.

    Raises:
        SourceError: the file is not an uncompressed tar, or two of its members have one name.
    """
    _require_tar(fd, path)
    keys, members, numbers = list[str](), list[dict[str, TarMember]](), dict[str, int]()
    bad, hidden = dict[int, str](), 0
    for name, member in _members(fd):
        if member is None:
            bad[len(keys)] = _fault(os.path.basename(path), int(name[1:]), os.fstat(fd).st_size)  # noqa: PTH119
            keys.append(name)
            members.append({})
            continue
        key, extension = split_name(name)
        # tarfile keeps the ".." of a relative path, which hides nothing
        if is_hidden("/".join(part for part in name.split("/") if part not in (".", ".."))):
            hidden += 1
            continue
        if not extension:
            continue
        if key not in numbers:
            numbers[key] = len(keys)
            keys.append(shown(key))
            members.append({})
        fields = members[numbers[key]]
        if extension in fields:
            raise SourceError(f"{path} holds {shown(name)!r} twice; every member needs a name of its own")
        fields[extension] = member
    return TarShard.of(keys, members, bad, hidden)


def _fault(name: str, at: int, end: int) -> str:
    """Return what is wrong with a tar at a place where a header or the end of the archive should be."""
    if at < end:
        return f"damaged: {name} has no tar header at byte {at}"
    return (
        f"cut off: {name} ends at byte {end} without the zeros that end an archive, so samples may be missing; "
        f"if it is whole, `truncate -s +{2 * BLOCK}` adds them"
    )


def _require_tar(fd: int, path: str) -> None:
    head = os.pread(fd, BLOCK, 0)
    packed = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    if packed:
        raise SourceError(f"{path} is compressed ({packed}), so its samples cannot be read by number; unpack it first")
    if _header(head) is None and (head.strip(b"\0") or len(head) < BLOCK):
        what = "it does not begin with a tar header" if head else "it is empty"
        raise SourceError(f"{path} is not a tar: {what}")


_WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
_PAX_RECORD = re.compile(rb"([0-9]{1,18}) ")
"""The beginning of a record in a pax header: its length in bytes, with these digits. More digits are no length."""
_BEFORE_A_MEMBER = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
"""The types of headers whose data describes the member after them."""


def _members(fd: int) -> Iterator[tuple[str, TarMember | None]]:
    """Yield name and place of each regular file, and (``@offset``, None) where a header or the end is missing."""
    end, at, is_lost, is_ended = os.fstat(fd).st_size, 0, False, True
    said: dict[str, str] = {}
    while at < end:
        block = os.pread(fd, BLOCK, at)
        info = _header(block)
        if info is None:  # zeros end an archive, and another archive may follow in the same file
            if block.strip(b"\0") and not is_lost:
                is_lost = True
                yield f"@{at}", None
            said, at, is_ended = {}, at + BLOCK, True
            continue
        is_lost, is_ended, start = False, False, at + BLOCK
        if info.type in _BEFORE_A_MEMBER:
            said |= _more(info, os.pread(fd, min(info.size, _MAX_EXTENSION_BYTES), start))
            at = start + _padded(info.size)
            continue
        # 20 digits are above the largest size already, and Python parses no number of 5000
        size = min(int(said["size"][:20]), _MAX_SIZE) if said.get("size", "").isdecimal() else info.size
        if info.type in tarfile.REGULAR_TYPES:
            yield said.get("path", info.name), TarMember(start, size)
        at = start + (0 if info.type in _WITHOUT_DATA else _padded(size))
        said = {}
    if not is_ended:  # cut after or within a member, and nothing says how many more there were
        yield f"@{end}", None


def _header(block: bytes) -> tarfile.TarInfo | None:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return info if 0 <= info.size <= _MAX_SIZE and info.type != tarfile.GNUTYPE_SPARSE else None


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _more(info: tarfile.TarInfo, data: bytes) -> dict[str, str]:
    """Return the name (and size) that a separate header gives the member after it."""
    if info.type == tarfile.GNUTYPE_LONGLINK:
        return {}
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    said: dict[str, str] = {}
    at = 0
    while record := _PAX_RECORD.match(data, at):
        end = at + int(record[1])
        if not record.end() <= end <= len(data):
            break
        name, _, value = data[record.end() : end].rstrip(b"\n").partition(b"=")
        if name in (b"path", b"size"):
            said[name.decode()] = value.decode("utf-8", "surrogateescape")
        at = end
    return said


_INDEX_VERSION = 3
"""The version of the stored index."""


@dataclass(frozen=True)
class TarShard:
    """The samples of one tar in arrays, because there may be millions."""

    keys: list[str]
    bad: dict[int, str]
    """Number of a sample that cannot be read -> the reason."""
    offsets: dict[str, NDArray[np.int64]]
    """Field -> the offset of each sample's bytes, or -1 where the sample has no such field."""
    sizes: dict[str, NDArray[np.int64]]
    hidden: int
    """The members that are no part of a sample because their path is hidden (see `is_hidden`)."""

    @classmethod
    def of(cls, keys: list[str], members: list[dict[str, TarMember]], bad: dict[int, str], hidden: int) -> TarShard:
        """Return the samples whose ``members`` give, for each sample, field (such as ``jpg``) -> place."""
        fields = dict.fromkeys(name for fields in members for name in fields)
        offsets = {name: np.full(len(keys), -1, np.int64) for name in fields}
        sizes = {name: np.zeros(len(keys), np.int64) for name in fields}
        for number, places in enumerate(members):
            for name, member in places.items():
                offsets[name][number], sizes[name][number] = member.offset, member.size
        return cls(keys, bad, offsets, sizes, hidden)


class TarFile:
    """One tar. It is opened for each read, because there may be more tars than a process may have open files."""

    def __init__(self, path: Path, name: str, cache: Path | None) -> None:
        self.name, self._path = name, path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            stat = os.fstat(fd)
            self.file, self._time = SourceFile(name, stat.st_size, int(stat.st_mtime)), stat.st_mtime_ns
            where = _remembered_at(path, stat, cache)
            self.shard = _recalled(where) or _scanned(fd, path, where)
        finally:
            os.close(fd)

    def _has(self, number: int, field: str) -> bool:
        """Tell whether a sample has a field."""
        return field in self.shard.offsets and bool(self.shard.offsets[field][number] >= 0)

    def read(self, number: int, field: str, key: str) -> bytes:
        """Return the bytes of one field. Raises SampleError with ``key`` and the reason."""
        if number in self.shard.bad:
            raise SampleError(f"{key}: {self.shard.bad[number]}")
        if not self._has(number, field):
            have = ", ".join(name for name in self.shard.offsets if self._has(number, name))
            raise SampleError(f"{key}: has no .{field}; it has {have}")
        offset, size = int(self.shard.offsets[field][number]), int(self.shard.sizes[field][number])
        if size > MAX_FIELD_BYTES:
            raise SampleError(f"{key}: .{field} has {size} bytes; at most {MAX_FIELD_BYTES} are read")
        if offset + size > self.file.size:
            raise SampleError(
                f"{key}: cut off: {self.name} ends after {max(0, self.file.size - offset)} of the {size} bytes of "
                f".{field}"
            )
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                stat, data = os.fstat(fd), os.pread(fd, size, offset)
            finally:
                os.close(fd)
        except OSError as error:
            raise SampleError(f"{key}: {self.name} cannot be read: {error.strerror}") from error
        if len(data) != size or (stat.st_size, stat.st_mtime_ns) != (self.file.size, self._time):
            raise SampleError(f"{key}: {self.name} was changed after its index was made")
        return data


def _scanned(fd: int, path: Path, where: Path | None) -> TarShard:
    shard = scan(fd, str(path))
    if where is not None:
        _remember(where, shard)
    return shard


def _remembered_at(path: Path, stat: os.stat_result, cache: Path | None) -> Path | None:
    if cache is None:
        return None
    identity = f"{_INDEX_VERSION}\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return cache / "tar" / f"{digest}.npz"


def _remember(where: Path, shard: TarShard) -> None:
    """Store an index. An error changes nothing, and other processes never see a half-written file."""
    fields = list(shard.offsets)
    words = json.dumps({"keys": shard.keys, "bad": shard.bad, "fields": fields, "hidden": shard.hidden}).encode()
    arrays: dict[str, Any] = {f"o{n}": shard.offsets[name] for n, name in enumerate(fields)}
    arrays |= {f"s{n}": shard.sizes[name] for n, name in enumerate(fields)}
    with suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        unfinished = where.with_name(f"{where.stem}.{secrets.token_hex(4)}.npz")
        try:
            np.savez(unfinished, words=np.frombuffer(words, np.uint8), **arrays)
            unfinished.replace(where)
        finally:
            unfinished.unlink(missing_ok=True)


def _recalled(where: Path | None) -> TarShard | None:
    """Return the stored index, or None where there is none or it is damaged."""
    if where is None or not where.exists():
        return None
    try:
        with np.load(where, allow_pickle=False) as kept:
            words = json.loads(kept["words"].tobytes())
            fields = words["fields"]
            offsets = {name: kept[f"o{n}"].astype(np.int64) for n, name in enumerate(fields)}
            sizes = {name: kept[f"s{n}"].astype(np.int64) for n, name in enumerate(fields)}
        bad = {int(number): str(why) for number, why in words["bad"].items()}
        keys, hidden = [shown(key) for key in words["keys"]], int(words["hidden"])
    except Exception:  # damaged in any way, so the index is made again
        return None
    whole = all(len(array) == len(keys) for array in (*offsets.values(), *sizes.values()))
    return TarShard(keys, bad, offsets, sizes, hidden) if whole else None
