"""Tars in webdataset's layout as samples by index. Members of one base name are one sample, in any order.

The ending of a member's name says how its bytes become a tensor: images are decoded, numbers read, text stays bytes.
``tar_index`` finds the members.
"""

from __future__ import annotations

import glob
import io
import json
import math
import os
import re
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_common.settings import Settings
from penstock_common.wire.spec import Spec, SpecLike
from penstock_producer.sources.allowed import require_inside
from penstock_producer.sources.arrays import why_unread
from penstock_producer.sources.config import TarConfig
from penstock_producer.sources.decode import Decoder, probed
from penstock_producer.sources.files import fingerprint, folder_of, is_hidden, is_pattern, shown
from penstock_producer.sources.image_files import EXTENSIONS, HIDDEN
from penstock_producer.sources.items import as_sample
from penstock_producer.sources.order import part_at
from penstock_producer.sources.protocol import Sample
from penstock_producer.sources.tar_index import TarFile


class TarSource:
    """The samples of one tar, of all tars below a folder, sorted by path, or of those of a pattern."""

    unit: Literal["sample"] = "sample"
    repeatable = True

    def __init__(self, config: TarConfig) -> None:
        cache = Settings.from_environment().cache
        self._tars = [TarFile(path, name, cache) for path, name in _tars(config.path)]
        self._ends = np.cumsum([len(tar.shard.keys) for tar in self._tars])
        if not len(self):
            raise SourceError(f"{config.path} holds no samples: its tars hold no files named like 0001.jpg")
        self._fields = self._chosen(config.fields)
        self._decoder = Decoder(config)
        self.draws = self._decoder.is_random
        """Whether `read` uses its generator (see `protocol.draws`)."""
        options = config.model_dump(mode="json", exclude={"path"})
        # these were left out once, and an epoch of fewer samples is not continued with more
        if found := sum(".." in key.split("/") for tar in self._tars for key in tar.shard.keys):
            options["above"] = found
        self.fingerprint = fingerprint(options, (tar.file for tar in self._tars))
        self.info: dict[str, Any] = {"source": "tar", "tars": len(self._tars), "fields": self._fields}
        if hidden := sum(tar.shard.hidden for tar in self._tars):
            self.info["passed_over"] = {HIDDEN: hidden}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _at(self, index: int) -> tuple[TarFile, int]:
        tar, number = part_at(self._ends, index)
        return self._tars[tar], number

    def _chosen(self, given: dict[str, str] | None) -> dict[str, str]:
        """Return tensor name -> field, as given, or for every field there is."""
        found = dict.fromkeys(field for tar in self._tars for field in tar.shard.offsets)
        if given:
            absent = [field for field in given.values() if field not in found]
            if absent:
                name = next(name for name, field in given.items() if field == absent[0])
                like = "json" if "/" in absent[0] and "json" in found else next(iter(found))
                raise SourceError(
                    f"no sample has a .{absent[0]}; the tars hold .{', .'.join(found)}, and a field is named by that: "
                    f"as in --field {shlex.quote(f'{name}={like}')}"
                )
            return dict(given)
        chosen: dict[str, str] = {}
        for field in found:
            other = chosen.setdefault(tensor_of(field), field)
            if other != field:
                raise SourceError(
                    f"both .{other} and .{field} would be tensor {tensor_of(field)!r}; "
                    f"say which: --field {shlex.quote(f'{tensor_of(field)}={other}')} (and all others that are wanted)"
                )
        return chosen

    def key(self, index: int) -> str:
        """Return a name such as ``train-0001.tar:cat/0012``."""
        tar, number = self._at(index)
        return f"{shown(tar.name)}:{tar.shard.keys[number]}"

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return the tensors of one sample."""
        key = self.key(index)
        made: dict[str, Any] = {}
        chance = int(rng.integers(1 << 63)) if self._decoder.is_random else None
        for name, field in self._fields.items():
            # each field has the same random numbers, so that an image and its mask are cropped and mirrored alike
            same = None if chance is None else np.random.Generator(np.random.Philox(key=chance))
            made |= tensors_of(field, name, self._data(index, field), self._decoder, key, same)
        return as_sample(made, key)

    def _data(self, index: int, field: str) -> bytes:
        tar, number = self._at(index)
        return tar.read(number, field, self.key(index))

    def column(self, name: str) -> np.ma.MaskedArray[Any, Any] | None:
        """Return a field of whole numbers for all samples, without reading their other fields (see `Labelled`)."""
        field = self._fields.get(name)
        if field is None or kind_of(field) not in NUMBERS:
            return None
        values: np.ma.MaskedArray[Any, Any] = np.ma.masked_all(len(self), np.int64)  # type: ignore[no-untyped-call]
        for index in range(len(self)):
            try:
                values[index] = int(self._data(index, field))
            except (SampleError, ValueError):
                continue  # stays masked, and reading the sample names the error
        return values

    @cached_property
    def spec(self) -> SpecLike | None:
        """Return the spec that up to 64 samples have in common. A size that differs among them is None."""
        common: dict[str, Form] | None = None
        for index in probed(len(self)):
            try:
                found = self._measured(index)
            except SampleError:
                continue  # reading the sample names the error
            common = found if common is None else _common(common, found)
            if common is None:
                return None
        return common

    def _measured(self, index: int) -> dict[str, Form]:
        found: dict[str, Form] = {}
        rest: dict[str, Any] = {}
        key = self.key(index)
        for name, field in self._fields.items():
            data = self._data(index, field)
            if kind_of(field) in IMAGES:
                fixed = self._decoder.shape
                found[name] = (self._decoder.dtype, self._decoder.measure(data, key) if fixed is None else fixed)
            else:
                rest |= tensors_of(field, name, data, self._decoder, key)
        if rest:
            for tensor in Spec.infer(as_sample(rest, key)):
                found[tensor.name] = (tensor.dtype, tensor.shape)
        return found

    def close(self) -> None:
        """Do nothing, because nothing is kept open."""


Form = tuple[str, tuple[int | None, ...]]
"""Dtype and shape of a tensor."""
EMPTY_LIST: Form = ("float64", (0,))
"""The form of ``[]`` in JSON. The writer takes it for no rows, whatever the dtype and the shape of a row."""


def _common(one: dict[str, Form], other: dict[str, Form]) -> dict[str, Form] | None:
    """Merge two specs. None where names, dtypes or numbers of dimensions differ: then the first sample decides."""
    merged: dict[str, Form] = {}
    for name, mine in one.items():
        theirs = other.get(name)
        both = None if len(one) != len(other) or theirs is None else _of_both(mine, theirs)
        if both is None:
            return None
        merged[name] = both
    return merged


def _of_both(one: Form, other: Form) -> Form | None:
    if one == other:
        return one
    for empty, full in ((one, other), (other, one)):
        if empty == EMPTY_LIST and full[1]:
            return full[0], (None, *full[1][1:])
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return None
    return one[0], tuple(a if a == b else None for a, b in zip(one[1], other[1], strict=True))


def _tars(given: str) -> Iterator[tuple[Path, str]]:
    """Yield the path and the name of each tar: of one file, of a folder sorted by name, or of a pattern."""
    path = Path(given)
    if is_pattern(given):
        for found in matches(given):
            require_inside(found)
            yield Path(found), os.path.relpath(found, folder_of(given))
        return
    if path.is_file():
        yield path, path.name
        return
    if not path.is_dir():
        raise SourceError(f"no tars at {path}: found nothing there; give a .tar, or a folder of them")
    names = sorted(found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file())
    chosen = [name for name in names if is_readable(PurePosixPath(name)) and not is_hidden(name)]
    if not chosen:
        raise SourceError(f"no tars in {path}: found {len(names)} other files; tars are files ending in .tar")
    for name in chosen:
        require_inside(path / name)
        yield path / name, name


_BRACES = re.compile(r"\{(?:([0-9]{1,18})\.\.([0-9]{1,18})|([^{},]*(?:,[^{},]*)+))\}")
_MOST_NAMES = 1 << 20
"""The most names that the braces of a pattern stand for. The largest data sets of images have some 250,000 tars."""


def matches(pattern: str) -> list[str]:
    """Return the files of a pattern: braces as in a shell and webdataset, and then ``*``, ``?``, ``[...]`` and ``**``.

    Each name is looked for as soon as it is made, so a pattern without files costs one look.

    Raises:
        SourceError: a name has no file, nothing matches, or there are too many names.

    Example:
        >>> matches("tars/train-{0000..0001}.tar")
        ['tars/train-0000.tar', 'tars/train-0001.tar']
    """
    count = math.prod(_choices(braces)[0] for braces in _BRACES.finditer(pattern))
    found: dict[str, None] = {}
    for number, name in enumerate(_expanded(pattern), 1):
        if max(number, count) > _MOST_NAMES:  # braces within braces are more names than the product
            raise SourceError(f"{shown(pattern)} is over {_MOST_NAMES} names; give a folder, or shorter ranges")
        some = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - a pattern may begin with /
        if not some:
            among = "" if name == pattern else f", one of the {count} names of {shown(pattern)}"
            raise SourceError(f"no tars at {shown(name)}{among}: found nothing there; see which there are by ls")
        found.update(dict.fromkeys(some))
    return list(found)


def _expanded(pattern: str) -> Iterator[str]:
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    for part in _choices(braces)[1]:
        yield from _expanded(f"{pattern[: braces.start()]}{part}{pattern[braces.end() :]}")


def _choices(braces: re.Match[str]) -> tuple[int, Iterable[str]]:
    """Return how many strings a pair of braces stands for, and the strings.

    The numbers of ``{first..last}`` are padded with zeros where one of the two is.
    """
    first, last, listed = braces.groups()
    if listed is not None:
        parts = listed.split(",")
        return len(parts), parts
    low, high = int(first), int(last)
    width = max(len(first), len(last)) if str(low) != first or str(high) != last else 0
    step = 1 if high >= low else -1
    return abs(high - low) + 1, (f"{number:0{width}d}" for number in range(low, high + step, step))


IMAGES = tuple(extension[1:] for extension in EXTENSIONS)
NUMBERS = ("cls", "cls2", "index", "inx", "id")
"""The fields that hold a whole number in ASCII, by webdataset's names."""
TENSORS = {"cls": "y", "npy": "x", **dict.fromkeys(IMAGES, "x")}
"""The tensor names of fields that have no name of their own."""
_HEADERS = threading.Lock()
"""Held while numpy lets Python parse the header of an array.

In CPython 3.11 that raises SystemError (its issue 106905) if two threads do it at once and one is interrupted. A fork
waits for it too, because in a child of a fork no other thread would ever release it.
"""
os.register_at_fork(before=_HEADERS.acquire, after_in_parent=_HEADERS.release, after_in_child=_HEADERS.release)


def kind_of(field: str) -> str:
    """Return the part of a field that says how to read it, such as ``png`` of ``seg.png``."""
    return field.rpartition(".")[2]


def tensor_of(field: str) -> str:
    """Return the tensor name of a field.

    Example:
        >>> [tensor_of(field) for field in ("jpg", "cls", "seg.png", "txt")]
        ['x', 'y', 'seg', 'txt']
    """
    stem, _, kind = field.rpartition(".")
    return stem or TENSORS.get(kind, kind)


def tensors_of(
    field: str, name: str, data: bytes, decoder: Decoder, key: str, rng: np.random.Generator | None = None
) -> dict[str, Any]:
    """Return the tensors of one member. A JSON object gives one tensor for each of its values.

    Args:
        field: the member's field, which says how to read it.
        name: the tensor's name.
        data: the member's bytes.
        decoder: the decoder of images.
        key: the sample's name, for the error.
        rng: the sample's generator, for random crops and flips.

    Raises:
        SampleError: the bytes cannot be read.
    """
    kind = kind_of(field)
    if kind in IMAGES:
        return {name: decoder.decode(data, key, rng)}
    try:
        if kind in NUMBERS:
            return {name: np.int64(int(data))}
        if kind == "json":
            return _flat("" if name == field else name, json.loads(data), key)
        if kind == "npy":
            with _HEADERS:
                return {name: np.load(io.BytesIO(data), allow_pickle=False)}
    except SampleError:
        raise
    except (ValueError, EOFError, OverflowError, RecursionError, MemoryError) as error:
        said = why_unread(error) if kind == "npy" else " ".join(str(error).split())
        raise SampleError(f"{key}: its .{field} cannot be read: {said:.160}; it begins with {data[:12]!r}") from None
    return {name: data}


def _flat(name: str, value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        if value is None:
            raise SampleError(f"{key}: {name or 'its JSON'} is null; expected a number, a text or a list of numbers")
        return {name or "json": value}
    made: dict[str, Any] = {}
    for inner, part in value.items():
        made |= _flat(f"{name}/{inner}" if name else str(inner), part, key)
    return made


def is_readable(path: PurePosixPath) -> bool:
    """Tell whether a file is a tar by its name. Compressed tars count, so that opening them says what to do."""
    return path.name.lower().endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"))
