"""The index of a folder of tars: found by one pass over their headers, and remembered for the next process.

Kept in the user's cache folder, one file per tar, named by the tar's path, size and time; losing one costs a pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.files import File, shown
from penstock_producer.sources.tar_members import MAX_MEMBER_BYTES, Found, scan

_VERSION = 1
"""Of the remembered form."""


@dataclass(frozen=True)
class Shard:
    """One tar's samples: arrays, because there may be millions."""

    keys: list[str]
    bad: dict[int, str]
    """Samples that cannot be read, and why."""
    offsets: dict[str, NDArray[np.int64]]
    """Field -> where each sample's bytes are; -1 where it has no such field."""
    sizes: dict[str, NDArray[np.int64]]

    @classmethod
    def of(cls, found: Found) -> Shard:
        """From a pass over the headers."""
        fields = dict.fromkeys(name for members in found.members for name in members)
        offsets = {name: np.full(len(found.keys), -1, np.int64) for name in fields}
        sizes = {name: np.zeros(len(found.keys), np.int64) for name in fields}
        for number, members in enumerate(found.members):
            for name, member in members.items():
                offsets[name][number], sizes[name][number] = member.offset, member.size
        return cls(found.keys, {n: why for n, why in enumerate(found.bad) if why}, offsets, sizes)


class TarFile:
    """One tar, opened for each read: there may be more of them than a process may have files open."""

    def __init__(self, path: Path, name: str, cache: Path | None) -> None:
        self.name, self._path = name, path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            stat = os.fstat(fd)
            self.file, self._time = File(name, stat.st_size, int(stat.st_mtime)), stat.st_mtime_ns
            where = _remembered_at(path, stat, cache)
            self.shard = _recalled(where) or _scanned(fd, path, where)
        finally:
            os.close(fd)

    def has(self, number: int, field: str) -> bool:
        """Whether a sample has a field."""
        return field in self.shard.offsets and bool(self.shard.offsets[field][number] >= 0)

    def read(self, number: int, field: str, key: str) -> bytes:
        """One field's bytes. Raises SampleError naming ``key`` and what is wrong."""
        if number in self.shard.bad:
            raise SampleError(f"{key}: {self.shard.bad[number]}")
        if not self.has(number, field):
            have = ", ".join(name for name in self.shard.offsets if self.has(number, name))
            raise SampleError(f"{key}: has no .{field}; it has {have}")
        offset, size = int(self.shard.offsets[field][number]), int(self.shard.sizes[field][number])
        if size > MAX_MEMBER_BYTES:
            raise SampleError(f"{key}: .{field} has {size} bytes; at most {MAX_MEMBER_BYTES} are read")
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
            raise SampleError(f"{key}: {self.name} was changed since it was looked through")
        return data


def _scanned(fd: int, path: Path, where: Path | None) -> Shard:
    shard = Shard.of(scan(fd, str(path)))
    if where is not None:
        _remember(where, shard)
    return shard


def _remembered_at(path: Path, stat: os.stat_result, cache: Path | None) -> Path | None:
    if cache is None:
        return None
    identity = f"{_VERSION}\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return cache / "tar" / f"{digest}.npz"


def _remember(where: Path, shard: Shard) -> None:
    """A cache that cannot be written is none; a half-written one is never seen."""
    fields = list(shard.offsets)
    words = json.dumps({"keys": shard.keys, "bad": shard.bad, "fields": fields}).encode()
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


def _recalled(where: Path | None) -> Shard | None:
    """What was remembered, if it is whole."""
    if where is None or not where.exists():
        return None
    try:
        with np.load(where, allow_pickle=False) as kept:
            words = json.loads(kept["words"].tobytes())
            fields = words["fields"]
            offsets = {name: kept[f"o{n}"].astype(np.int64) for n, name in enumerate(fields)}
            sizes = {name: kept[f"s{n}"].astype(np.int64) for n, name in enumerate(fields)}
        bad = {int(number): str(why) for number, why in words["bad"].items()}
        keys = [shown(key) for key in words["keys"]]
    except Exception:  # damaged in whatever way: it is made again
        return None
    whole = all(len(array) == len(keys) for array in (*offsets.values(), *sizes.values()))
    return Shard(keys, bad, offsets, sizes) if whole else None
