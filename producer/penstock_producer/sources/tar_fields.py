"""A member's bytes as tensors, by what its name ends in: images decoded, numbers read, text as bytes.

Where the bytes lie is ``tar_index``'s.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from penstock_common.errors import SampleError
from penstock_producer.sources.decode import Decoder
from penstock_producer.sources.files import EXTENSIONS

IMAGES = tuple(extension[1:] for extension in EXTENSIONS)
NUMBERS = ("cls", "cls2", "index", "inx", "id")
"""Whole numbers in ASCII; webdataset's own names."""
TENSORS = {"cls": "y", "npy": "x", **dict.fromkeys(IMAGES, "x")}
"""What a field that is nothing but its kind is called."""
_HEADERS = threading.Lock()
"""numpy has Python parse an array's header, which fails in CPython 3.11 (SystemError, as in its issue 106905) where two
threads do so at once and one of them is interrupted in the middle."""


def kind_of(field: str) -> str:
    """The part of a field that says how to read it: ``png`` of ``seg.png``."""
    return field.rpartition(".")[2]


def tensor_of(field: str) -> str:
    """``x`` of ``jpg`` and ``npy``, ``y`` of ``cls``, ``seg`` of ``seg.png``, ``txt`` of ``txt``."""
    stem, _, kind = field.rpartition(".")
    return stem or TENSORS.get(kind, kind)


def tensors_of(
    field: str, name: str, data: bytes, decoder: Decoder, key: str, rng: np.random.Generator | None = None
) -> dict[str, Any]:
    """The tensors in one member; JSON objects give one for each of their values. Raises SampleError naming ``key``."""
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
        said = " ".join(str(error).split())
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
    """Whether a file is a tar by its name; packed ones count, so that opening them says what to do."""
    return path.name.lower().endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"))
