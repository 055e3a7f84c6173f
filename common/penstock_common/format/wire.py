"""Entries on the wire: a block to fields and back, header first. docs/wire-format.md is the rule, this its Python form.

A decoder trusts nothing: every size is bounded before memory is taken, and any fault is a BadEntry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from json import dumps
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, ChecksumMismatch, TooLarge
from penstock_common.format.block import Block, Column
from penstock_common.format.dtypes import numpy_dtype
from penstock_common.format.header import MAX_ENTRY_BYTES, MAX_FIELD_BYTES, VERSION, Header, parse_header
from penstock_common.format.spec import META, SHAPES_SUFFIX, Spec, TensorSpec

INLINE_SHAPES = 64
"""Ragged shapes of up to this many samples travel in the header; more in a field of their own."""

Fields = list[tuple[bytes, "bytes | memoryview"]]


def encode(block: Block, *, stream: str, epoch: int, shard: int, checksum: bool = True) -> Fields:
    """The fields of one entry, in order: ``meta`` first, then the tensors; payloads are views of the block's arrays.

    Raises TooLarge above 512 MB a field or 1 GiB an entry.
    """
    payload: Fields = []
    for column in block.columns:
        name = column.spec.name.encode()
        if column.shapes is not None and block.count > INLINE_SHAPES:
            payload.append((name + SHAPES_SUFFIX.encode(), _bytes_of(column.shapes.astype("<i8", copy=False))))
        payload.append((name, _bytes_of(column.values)))
    _refuse_large(payload)
    tensors = _fixed_json(tuple(column.spec for column in block.columns), block.count) or _tensors_json(block)
    holes = f',"holes":{dumps(block.holes, separators=(",", ":"))}' if block.holes else ""
    digest = f',"xxh3":"{digest_of(value for _, value in payload)}"' if checksum else ""
    meta = (
        f'{{"v":{VERSION},"stream":"{stream}","epoch":{epoch},"shard":{shard},"first":{block.first},'
        f'"count":{block.count}{holes},"tensors":{tensors}{digest}}}'
    )
    return [(META.encode(), meta.encode()), *payload]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    # a view as uint8 first: bfloat16 has no buffer format of its own
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _refuse_large(payload: Fields) -> None:
    sizes = [len(value) for _, value in payload]
    if max(sizes) > MAX_FIELD_BYTES or sum(sizes) > MAX_ENTRY_BYTES:
        raise TooLarge(
            f"an entry of {sum(sizes)} bytes (largest tensor {max(sizes)}) is over the limit of {MAX_FIELD_BYTES} bytes "
            f"a tensor and {MAX_ENTRY_BYTES} an entry: write fewer or smaller samples at once"
        )


@lru_cache(maxsize=256)
def _fixed_json(tensors: tuple[TensorSpec, ...], count: int) -> str:
    """The header's ``tensors`` where it depends on nothing but the count; empty with ragged tensors."""
    if any(tensor.is_ragged for tensor in tensors):
        return ""
    return dumps(
        {t.name: {"dtype": t.dtype, "shape": [count, *t.shape]} for t in tensors},
        separators=(",", ":"),
    )


def _tensors_json(block: Block) -> str:
    tensors: dict[str, dict[str, Any]] = {}
    for column in block.columns:
        spec = column.spec
        tensors[spec.name] = {"dtype": spec.dtype, "shape": [block.count, *spec.shape]}
        if column.shapes is not None and block.count <= INLINE_SHAPES:
            tensors[spec.name]["shapes"] = column.shapes.tolist()
    return dumps(tensors, separators=(",", ":"))


def digest_of(buffers: Iterable[Any]) -> str:
    """XXH3-64 (seed 0) of the buffers one after the other, 16 lowercase hex digits."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def verify(header: Header, buffers: Iterable[Any]) -> None:
    """Raises ChecksumMismatch unless the payload fields, in wire order, have the header's digest (if it has one)."""
    if header.xxh3 is not None and (found := digest_of(buffers)) != header.xxh3:
        raise ChecksumMismatch(f"payload has xxh3 {found}, its header says {header.xxh3}")


def decode(fields: Sequence[tuple[bytes, Any]], spec: Spec) -> tuple[Header, Block]:
    """Header and block of one entry's fields, in the order read; arrays are views of the given buffers.

    Raises BadEntry (or its subclasses) for anything that is not exactly an entry of this spec.
    """
    if not fields or fields[0][0] != META.encode():
        raise BadEntry(f"the first field is {fields[0][0][:40]!r}, expected 'meta'" if fields else "no fields")
    header = parse_header(bytes(fields[0][1]), spec)
    names = [name for name, _ in fields[1:]]
    expected = [name for name, _ in header.fields()]
    if names != expected:
        raise BadEntry(f"fields {_short(names)}, expected {_short(expected)}")
    verify(header, (value for _, value in fields[1:]))
    values = dict(fields[1:])
    columns = [decode_column(header, tensor, values) for tensor in spec]
    return header, Block(header.first, header.count, columns, list(header.holes))


def _short(names: list[bytes]) -> str:
    return ", ".join(name[:40].decode("ascii", "replace") for name in names[:8])


def decode_column(header: Header, tensor: TensorSpec, values: dict[bytes, Any]) -> Column:
    """One tensor's column from its payload fields; exact sizes are enforced."""
    name = tensor.name.encode()
    data = np.frombuffer(values[name], dtype=np.uint8)
    dtype = numpy_dtype(tensor.dtype)
    if not tensor.is_ragged:
        expected = header.count * tensor.sample_bytes
        if data.nbytes != expected:
            raise BadEntry(f"tensor {tensor.name!r} has {data.nbytes} bytes, expected {expected}")
        return Column(tensor, data.view(dtype).reshape(header.count, *(d or 0 for d in tensor.shape)))
    shapes = header.shapes[tensor.name]
    if shapes is None:
        shapes = read_shapes(values[name + SHAPES_SUFFIX.encode()], header.count, tensor)
    starts = row_starts(shapes, tensor)
    if data.nbytes != int(starts[-1]) * dtype.itemsize:
        raise BadEntry(f"tensor {tensor.name!r} has {data.nbytes} bytes, its shapes ask {starts[-1] * dtype.itemsize}")
    return Column(tensor, data.view(dtype), shapes)


def read_shapes(data: Any, count: int, tensor: TensorSpec) -> NDArray[np.int64]:
    """The ``<name>.shapes`` field: int64 ``[n, ndim]``, each row admitted by the spec."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.nbytes != 8 * count * tensor.wire_ndim:
        raise BadEntry(f"{tensor.name}.shapes has {raw.nbytes} bytes, expected {8 * count * tensor.wire_ndim}")
    shapes = raw.view("<i8").reshape(count, tensor.wire_ndim)
    if not tensor.shape:
        legal = shapes >= 0
    else:
        fixed = np.array([-1 if dim is None else dim for dim in tensor.shape], dtype=np.int64)
        legal = np.where(fixed < 0, shapes >= 0, shapes == fixed)
    if not legal.all():
        raise BadEntry(f"{tensor.name}.shapes has a shape that does not fit {tensor.shape}")
    return shapes


def row_starts(shapes: NDArray[np.int64], tensor: TensorSpec) -> NDArray[np.int64]:
    """Where each ragged sample starts in the flat values, and the end; refuses sums beyond a field's limit."""
    sizes = [1] * len(shapes)
    for index, row in enumerate(shapes.tolist()):
        for dim in row:
            sizes[index] *= dim  # Python integers: a hostile product cannot wrap around
    total = 0
    starts = [0]
    for size in sizes:
        total += size
        starts.append(total)
    if total * numpy_dtype(tensor.dtype).itemsize > MAX_FIELD_BYTES:
        raise BadEntry(f"tensor {tensor.name!r}: its shapes ask {total} elements, over the limit of a field")
    return np.array(starts, dtype=np.int64)


def ragged_rows(column: Column) -> list[NDArray[Any]]:
    """The samples of a ragged column, each in its own shape (bytes: uint8), as views."""
    assert column.shapes is not None
    starts = row_starts(column.shapes, column.spec).tolist()
    return [
        column.values[a:b].reshape(shape)
        for (a, b), shape in zip(pairwise(starts), column.shapes.tolist(), strict=True)
    ]
