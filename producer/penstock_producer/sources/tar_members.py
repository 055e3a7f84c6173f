"""What a tar file holds and where: one pass over its headers, samples by their common name, bytes read in place.

A place that is no header is kept as a bad sample and the next header is looked for behind it: a damaged archive must
not end an epoch early in silence, as ``tarfile`` would have it. Remembering what was found is ``tar_index``'s.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock_common.errors import SourceError
from penstock_producer.sources.files import is_hidden, shown

BLOCK = tarfile.BLOCKSIZE
MAX_MEMBER_BYTES = 512 << 20
"""No tensor field may be larger, so no member needs to be."""
_MAX_EXTENSION_BYTES = 1 << 20
"""Of a header that only holds a long name; Linux' longest path has 4096 bytes."""
_MAX_SIZE = 1 << 62
"""What a header claims beyond this is no size."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True, slots=True)
class Member:
    """One file's bytes in the archive."""

    offset: int
    size: int


@dataclass
class Found:
    """Samples in the order of their first members; ``members[n]`` maps a field, like ``jpg``, to its place."""

    keys: list[str] = field(default_factory=list)
    members: list[dict[str, Member]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """Per sample why it cannot be read, or an empty string."""


def split_name(name: str) -> tuple[str, str]:
    """(sample, field) of a member: the base name is cut at its first dot, as webdataset does.

    ``cat/001.seg.png`` is field ``seg.png`` of sample ``cat/001``.
    """
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def scan(fd: int, path: str) -> Found:
    """Every sample of the archive. Raises SourceError for what is no plain tar at all, or names two members alike."""
    _require_tar(fd, path)
    found, places = Found(), dict[str, int]()
    for name, member in _members(fd):
        if member is None:
            found.keys.append(name)
            found.members.append({})
            found.bad.append(f"damaged: {os.path.basename(path)} has no tar header at byte {name[1:]}")  # noqa: PTH119
            continue
        key, extension = split_name(name)
        if not extension or is_hidden(name.removeprefix("./")):
            continue
        if key not in places:
            places[key] = len(found.keys)
            found.keys.append(shown(key))
            found.members.append({})
            found.bad.append("")
        fields = found.members[places[key]]
        if extension in fields:
            raise SourceError(f"{path} holds {shown(name)!r} twice; every member needs a name of its own")
        fields[extension] = member
    return found


def _require_tar(fd: int, path: str) -> None:
    head = os.pread(fd, BLOCK, 0)
    packed = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    if packed:
        raise SourceError(f"{path} is compressed ({packed}), so its samples cannot be read by number; unpack it first")
    if _header(head) is None and (head.strip(b"\0") or len(head) < BLOCK):
        raise SourceError(f"{path} is no tar: it does not begin with a tar header")


_WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
_BEFORE_A_MEMBER = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
"""Headers whose data says more of the member behind them."""


def _members(fd: int) -> Iterator[tuple[str, Member | None]]:
    """Regular files; (``@offset``, None) where a header should be and is none."""
    end, at, is_lost = os.fstat(fd).st_size, 0, False
    said: dict[str, str] = {}
    while at < end:
        block = os.pread(fd, BLOCK, at)
        info = _header(block)
        if info is None:  # zeros are the end of an archive, behind which another may be joined on
            if block.strip(b"\0") and not is_lost:
                is_lost = True
                yield f"@{at}", None
            said, at = {}, at + BLOCK
            continue
        is_lost, start = False, at + BLOCK
        if info.type in _BEFORE_A_MEMBER:
            said |= _more(info, os.pread(fd, min(info.size, _MAX_EXTENSION_BYTES), start))
            at = start + _padded(info.size)
            continue
        size = min(int(said["size"]), _MAX_SIZE) if said.get("size", "").isdecimal() else info.size
        if info.type in tarfile.REGULAR_TYPES:
            yield said.get("path", info.name), Member(start, size)
        at = start + (0 if info.type in _WITHOUT_DATA else _padded(size))
        said = {}


def _header(block: bytes) -> tarfile.TarInfo | None:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return info if 0 <= info.size <= _MAX_SIZE and info.type != tarfile.GNUTYPE_SPARSE else None


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _more(info: tarfile.TarInfo, data: bytes) -> dict[str, str]:
    """The name (and size) that a header of its own gives the member behind it."""
    if info.type == tarfile.GNUTYPE_LONGLINK:
        return {}
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    said: dict[str, str] = {}
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            break
        name, _, value = rest[: int(length) - len(length) - 1].rstrip(b"\n").partition(b"=")
        said[name.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return {name: said[name] for name in ("path", "size") if name in said}
