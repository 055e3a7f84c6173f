"""The ``meta`` field of an entry: one compact JSON object, parsed with every number bounded.

What the payload fields hold is ``wire``'s; whether an identity lies inside the manifest is the reader's to check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from json import loads
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, UnsupportedVersion
from penstock_common.format.block import MAX_HOLES
from penstock_common.format.spec import SHAPES_SUFFIX, Spec, TensorSpec

VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_FIELD_BYTES = 512_000_000
"""Redis' own limit is 512 MiB a string (proto-max-bulk-len); a little below leaves room for nothing to go wrong."""
MAX_ENTRY_BYTES = 1 << 30
"""client-query-buffer-limit is 1 GiB: a larger command closes the connection."""
MAX_SHARD_SAMPLES = 1 << 20
"""Bounds the ledger: SETBIT at 2^32 allocates half a gigabyte."""
MAX_NUMBER = 1 << 53
"""Epochs and shards stay exact in every language's JSON numbers."""
_DIGEST = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says of itself."""

    stream: str
    """Random id of the stream, so that two lives of a name never meet."""
    epoch: int
    shard: int
    first: int
    """Offset in the shard of the first sample planned for this entry."""
    count: int
    """Samples present, n >= 1."""
    holes: tuple[int, ...]
    """Offsets in ``[first, end)`` that were dropped, rising."""
    shapes: dict[str, NDArray[np.int64] | None]
    """Per ragged tensor its samples' shapes ``[n, ndim]``, None when they are in a field of their own."""
    spec: Spec
    xxh3: str | None

    @property
    def end(self) -> int:
        """The offset after the last one this entry accounts for."""
        return self.first + self.count + len(self.holes)

    def fields(self) -> list[tuple[bytes, int | None]]:
        """The payload fields this header announces, in order, with their size in bytes where it is known."""
        announced: list[tuple[bytes, int | None]] = []
        for tensor in self.spec:
            name = tensor.name.encode()
            if not tensor.is_ragged:
                announced.append((name, self.count * tensor.sample_bytes))
                continue
            if self.shapes[tensor.name] is None:
                announced.append((name + SHAPES_SUFFIX.encode(), 8 * self.count * tensor.wire_ndim))
            announced.append((name, None))
        return announced


def parse_header(data: bytes, spec: Spec) -> Header:
    """Reads and bounds a header written for a stream of this spec; raises BadEntry or UnsupportedVersion."""
    if len(data) > MAX_HEADER_BYTES:
        raise BadEntry(f"header of {len(data)} bytes, at most {MAX_HEADER_BYTES} are read")
    try:
        value = loads(data, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"header is not JSON: {str(error)[:80]}") from None
    if type(value) is not dict:
        raise BadEntry("header is not a JSON object")
    version = _number(value, "v", 1, MAX_NUMBER)
    if version != VERSION:
        raise UnsupportedVersion(f"entry of wire format v{version}, this reader knows v{VERSION}: update penstock")
    for reserved in ("compression", "ref"):
        if value.get(reserved) is not None:
            raise UnsupportedVersion(f"entry uses {reserved!r}, reserved in wire format v1: update penstock")
    stream, digest = value.get("stream"), value.get("xxh3")
    if type(stream) is not str or not 1 <= len(stream) <= 64:
        raise BadEntry("header has no stream id")
    if digest is not None and (type(digest) is not str or not _DIGEST.match(digest)):
        raise BadEntry("xxh3 is not 16 lowercase hex digits")
    first = _number(value, "first", 0, MAX_SHARD_SAMPLES - 1)
    count = _number(value, "count", 1, MAX_SHARD_SAMPLES)
    return Header(
        stream=stream,
        epoch=_number(value, "epoch", 0, MAX_NUMBER),
        shard=_number(value, "shard", 0, MAX_NUMBER),
        first=first,
        count=count,
        holes=_holes(value.get("holes", []), first, count),
        shapes=_tensors(value.get("tensors"), count, spec),
        spec=spec,
        xxh3=digest,
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _number(value: dict[str, Any], key: str, low: int, high: int) -> int:
    found = value.get(key)
    if type(found) is not int or not low <= found <= high:
        raise BadEntry(f"{key} is {str(found)[:40]}, expected an integer from {low} to {high}")
    return found


def _holes(value: Any, first: int, count: int) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_HOLES:
        raise BadEntry(f"holes is not a list of at most {MAX_HOLES} offsets")
    end = first + count + len(value)
    if end > MAX_SHARD_SAMPLES:
        raise BadEntry(f"offsets run to {end}, a shard has at most {MAX_SHARD_SAMPLES}")
    previous = first - 1
    for hole in value:
        if type(hole) is not int or not previous < hole < end:
            raise BadEntry(f"holes do not rise within offsets {first} to {end}")
        previous = hole
    return tuple(value)


def _tensors(value: Any, count: int, spec: Spec) -> dict[str, NDArray[np.int64] | None]:
    if type(value) is not dict or tuple(value) != spec.names:
        found = ", ".join(map(str, value))[:120] if type(value) is dict else "none"
        raise BadEntry(f"tensors {found}; the stream's spec is {spec}")
    shapes: dict[str, NDArray[np.int64] | None] = {}
    for tensor in spec:
        said = value[tensor.name]
        if type(said) is not dict or said.get("dtype") != tensor.dtype or said.get("shape") != [count, *tensor.shape]:
            raise BadEntry(f"tensor {tensor.name!r} is {str(said)[:120]}; expected {tensor.dtype} {[count, *tensor.shape]}")
        if any(type(dim) not in (int, type(None)) for dim in said["shape"]):
            raise BadEntry(f"tensor {tensor.name!r}: a size is not an integer")  # 3.0 == 3 and True == 1 in Python
        if tensor.is_ragged:
            shapes[tensor.name] = _inline_shapes(said["shapes"], count, tensor) if "shapes" in said else None
        elif "shapes" in said:
            raise BadEntry(f"tensor {tensor.name!r} is not ragged, yet has shapes")
    return shapes


def _inline_shapes(value: Any, count: int, tensor: TensorSpec) -> NDArray[np.int64]:
    if type(value) is not list or len(value) != count:
        raise BadEntry(f"tensor {tensor.name!r}: shapes is not a list of {count}")
    for shape in value:
        if type(shape) is not list or any(type(dim) is not int or not 0 <= dim <= MAX_FIELD_BYTES for dim in shape):
            raise BadEntry(f"tensor {tensor.name!r}: a sample's shape is {str(shape)[:60]}")
        if not tensor.admits(tuple(shape)):
            raise BadEntry(f"tensor {tensor.name!r}: a sample's shape is {shape}, expected {list(tensor.shape)}")
    return np.array(value, dtype=np.int64).reshape(count, tensor.wire_ndim)
