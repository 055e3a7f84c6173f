"""Rows of .npy and .npz files as samples. Files are mapped into memory, so only the rows in use are read.

Several files of one tensor follow each other; several tensors make one sample.
"""

from __future__ import annotations

import os
import shlex
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SourceError
from penstock_common.hints import did_you_mean
from penstock_common.wire.dtypes import wire_name
from penstock_common.wire.spec import SpecLike
from penstock_producer.sources.allowed import require_inside
from penstock_producer.sources.config import ArraysConfig
from penstock_producer.sources.files import SourceFile, archive_of, fingerprint, member_start, shown
from penstock_producer.sources.items import as_sample
from penstock_producer.sources.order import part_at
from penstock_producer.sources.protocol import Sample

_TEXT = "US"
"""The dtype kinds of numpy's fixed-length strings, which travel as bytes."""


class ArrayColumn:
    """The rows of one tensor, from one file after the other."""

    def __init__(self, name: str, parts: Sequence[tuple[str, NDArray[Any]]]) -> None:
        _, like = parts[0]
        for where, part in parts:
            if not part.ndim:
                advice = "; take the others by name, as in x=FILE.npz:ARRAY" if where.endswith(".npz") else ""
                raise SourceError(
                    f"{where}: {name!r} has no rows: its shape is (); expected one row per sample{advice}"
                )
            if wire_name(part.dtype) is None and part.dtype.kind not in _TEXT:
                bits = part.dtype.kind == "V" and part.dtype.names is None and part.dtype.itemsize == 2
                hint = (
                    ". numpy.save cannot store bfloat16. Save its bits as x.view('uint16'), or give "
                    "np.load(path).view(ml_dtypes.bfloat16) from a dataset of your own (SOURCE `dataset`)"
                )
                raise SourceError(
                    f"{where}: {name!r} is of dtype {part.dtype}; expected numbers or strings{hint if bits else ''}"
                )
            if (part.dtype != like.dtype and part.dtype.kind not in _TEXT) or part.shape[1:] != like.shape[1:]:
                raise SourceError(
                    f"{where}: {name!r} has rows {part.dtype}{list(part.shape[1:])}, {parts[0][0]} has "
                    f"{like.dtype}{list(like.shape[1:])}; files of one tensor need the same"
                )
        self._parts = [part for _, part in parts]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self.dtype, self.shape = like.dtype, like.shape[1:]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return a copy of a row, because transforms may change it in place."""
        part, row = part_at(self._ends, index)
        return np.array(self._parts[part][row])

    @property
    def values(self) -> NDArray[Any]:
        """Return all rows."""
        return np.concatenate(self._parts)


class ArraysSource:
    """The rows of numpy files by index."""

    unit: Literal["sample"] = "sample"
    repeatable = True
    draws = False
    """`read` does not use its generator (see `protocol.draws`)."""

    def __init__(self, config: ArraysConfig) -> None:
        paths = [*config.archives, *(path for files in config.columns.values() for path in files)]
        files = [_file(_archive_in(path) or path) for path in paths]
        parts = {name: [(path, _mapped(path)) for path in group] for name, group in config.columns.items()}
        for path in config.archives:
            found = _unpacked(path)
            if parts.keys() - config.columns.keys() and found.keys() != parts.keys() - config.columns.keys():
                raise SourceError(f"{path} holds {sorted(found)}, {config.archives[0]} others; all need the same names")
            for name, array in found.items():
                if name in config.columns:
                    raise SourceError(f"tensor {name!r} is both in {path} and in {config.columns[name][0]}")
                parts.setdefault(name, []).append((path, array))
        self._columns = {name: ArrayColumn(name, group) for name, group in parts.items()}
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            advice = _by_name(config.archives[0], parts) if config.archives else ""
            raise SourceError(f"the arrays have different lengths: {lengths}; each needs one row per sample{advice}")
        self._length = next(iter(lengths.values()))
        if not self._length:
            raise SourceError(f"{paths[0]} is empty: its arrays have no rows")
        self._name = Path(paths[0]).name
        names = {name: [Path(path).name for path in group] for name, group in config.columns.items()}
        self.fingerprint = fingerprint(["arrays", names, config.transform], files)
        self.info: dict[str, Any] = {"source": "arrays", "files": [shown(file.path) for file in files]}

    def __len__(self) -> int:
        return self._length

    @property
    def spec(self) -> SpecLike:
        """Return the dtypes and row shapes of the arrays."""
        return {
            name: ("bytes", ()) if column.dtype.kind in _TEXT else (str(wire_name(column.dtype)), column.shape)
            for name, column in self._columns.items()
        }

    def key(self, index: int) -> str:
        """Return a name such as ``x.npy[12]``."""
        return f"{shown(self._name)}[{index}]"

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return a copy of one row of each array."""
        rows = {name: column[index] for name, column in self._columns.items()}
        return as_sample({name: row[()] if row.dtype.kind in _TEXT else row for name, row in rows.items()}, "")

    def column(self, name: str) -> NDArray[Any] | None:
        """Return all rows of one tensor, or None where there is none of that name."""
        return self._columns[name].values if name in self._columns else None

    def close(self) -> None:
        """Do nothing: the memory maps end with the object."""


def _file(path: str) -> SourceFile:
    try:
        stat = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give .npy or .npz files") from error
    return SourceFile(os.path.basename(path), stat.st_size, int(stat.st_mtime))  # noqa: PTH119


def _archive_in(path: str) -> str | None:
    """Return the file in ``FILE.npz:ARRAY``, or None for another path."""
    if (file := archive_of(path)) == path:
        return None
    require_inside(file)  # the file may have come since the job's paths were checked
    return file


def _by_name(path: str, parts: Mapping[str, Sequence[tuple[str, NDArray[Any]]]]) -> str:
    """Return the advice to take some arrays of an archive: those as long as its first."""
    arrays = {name: part for name, [(_, part), *_] in parts.items() if part.ndim}
    alike = [name for name, part in arrays.items() if len(part) == len(next(iter(arrays.values())))]
    named = " ".join(shlex.quote(f"{name}={path}:{name}") for name in alike[:_NAMED])
    return f"; take some of them by name, as in {shown(named)}"


_NAMED = 4
"""The most arrays that an example names."""


def _mapped(path: str) -> NDArray[Any]:
    if archive := _archive_in(path):
        name = path.removeprefix(f"{archive}:")
        return _unpacked(archive, name)[name]
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is not a readable .npy: {why_unread(error)}") from error
    if isinstance(found, Mapping):
        first = next(iter(found), "ARRAY")
        raise SourceError(
            f"{path} holds several arrays: give it without a tensor's name, or take one by name, as in x={path}:{first}"
        )
    array: NDArray[Any] = found
    return array


_UNREADABLE = (
    OSError, ValueError, EOFError, MemoryError, RuntimeError, struct.error, zlib.error, zipfile.BadZipFile,
)  # fmt: skip
"""The errors of numpy and of the modules for zips at a damaged archive, or at one of an unknown kind."""


def _unpacked(path: str, only: str | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz, mapped where they are stored and read into memory where they are compressed.

    Args:
        path: the file.
        only: the one array to return. None means all.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:  # noqa: PTH123
            members = {
                member.filename.removesuffix(".npy"): member
                for member in archive.infolist()
                if member.filename.endswith(".npy")
            }
            if only is not None and only not in members:
                raise SourceError(
                    f"{path} holds no array {only!r}; it holds {', '.join(members)}{did_you_mean(only, members)}"
                )
            return {
                name: _stored(path, file, member)
                if member.compress_type == zipfile.ZIP_STORED
                else _compressed(archive, member)
                for name, member in members.items()
                if only in (None, name)
            }
    except SourceError:
        raise
    except _UNREADABLE as error:
        raise SourceError(f"{path} is not a readable .npz: {why_unread(error)}") from error


def _stored(path: str, file: Any, member: zipfile.ZipInfo) -> NDArray[Any]:
    file.seek(member_start(file.fileno(), member.header_offset))
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded: they are pickles")
    if not np.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def _compressed(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as packed:
        array: NDArray[Any] = np.lib.format.read_array(packed, allow_pickle=False)
    return array


def why_unread(error: BaseException) -> str:
    """Return why numpy cannot read an array, without its advice to unpickle unknown bytes."""
    text = str(error)
    if "bject arrays" in text or "Python objects" in text:
        return (
            "it holds Python objects, which are pickles and never read: save texts as array.astype('S'), numbers as "
            "array.astype('float32'), and each value of dicts as an array of its own"
        )
    if "pickled" in text:  # numpy takes unknown bytes for a pickle, and advises to unpickle them
        return "it does not begin as numpy.save writes it"
    if "mmap length" in text or "EOF" in text or "reading array" in text:
        return "it is cut off, shorter than its header says: copy or save it again"
    return " ".join(str(error).split())[:200] or type(error).__name__
