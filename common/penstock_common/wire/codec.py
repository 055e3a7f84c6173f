"""Entries as bytes: a block to the fields of an entry and back. docs/wire-format.md defines them.

The decoder trusts nothing: it bounds every size before it takes memory, and reports every fault as a BadEntry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json import dumps
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, ChecksumMismatch, TooLarge
from penstock_common.wire.block import Block, Column
from penstock_common.wire.compression import CODECS, Compression, pack, unpack
from penstock_common.wire.dtypes import BOOL, item_size, numpy_dtype
from penstock_common.wire.header import STREAM_ID, WIRE_VERSION, Header, layout_of, parse_header
from penstock_common.wire.limits import (
    INLINE_SAMPLES,
    INLINE_SIZES,
    MAX_ENTRY_BYTES,
    MAX_FIELD_BYTES,
    MAX_HOLES,
    MAX_NUMBER,
    MAX_SHARD_SAMPLES,
)
from penstock_common.wire.ragged import read_shapes, row_starts
from penstock_common.wire.spec import META_FIELD, SHAPES_SUFFIX, Spec, TensorSpec

Fields = list[tuple[bytes, "bytes | memoryview"]]


# --- writing ----------------------------------------------------------------------------------------------------------


def encode(
    block: Block, *, stream: str, epoch: int, shard: int, checksum: bool = True, is_repair: bool = False,
    compression: Compression | None = None,
) -> Fields:  # fmt: skip
    """Return the fields of one entry, in order: ``meta`` first, then the tensors as views of the block's arrays.

    Args:
        block: The samples.
        stream: The stream's id.
        epoch: The epoch's number.
        shard: The shard's number.
        checksum: Put the XXH3-64 of the payload into the header.
        is_repair: Mark the entry as written again for lost samples.
        compression: The codecs of tensors. One that does not become smaller stays as it is.

    Raises:
        TooLarge: A field exceeds 512 MB, or the entry 1 GiB.
        ValueError: No reader would accept the block: it has no sample, too many holes, or offsets beyond a shard.
    """
    if not (block.count >= 1 and len(block.holes) <= MAX_HOLES and 0 <= block.first < block.end <= MAX_SHARD_SAMPLES):
        raise ValueError(
            f"a block of {block.count} samples, {len(block.holes)} holes, offsets {block.first}-{block.end}"
        )
    if not (0 <= epoch <= MAX_NUMBER and 0 <= shard <= MAX_NUMBER and STREAM_ID.match(stream)):
        raise ValueError(f"not an identity: stream {stream!r}, epoch {epoch}, shard {shard}")
    inline = block.count <= INLINE_SAMPLES and _sizes_of(block) <= INLINE_SIZES
    payload: Fields = []
    for column in block.columns:
        name = column.spec.name.encode()
        if column.shapes is not None and not inline:
            payload.append((name + SHAPES_SUFFIX.encode(), _bytes_of(column.shapes.astype("<i8", copy=False))))
        payload.append((name, _bytes_of(column.values)))
    _refuse_large(payload)
    codecs = _compressed(block, payload, compression) if compression else ""
    layout = layout_of(tuple([column.spec for column in block.columns]), block.count)
    tensors = _tensors_json(block, inline) if layout is None else layout.json
    holes = f',"holes":{dumps(block.holes, separators=(",", ":"))}' if block.holes else ""
    digest = f',"xxh3":"{digest_of(value for _, value in payload)}"' if checksum else ""
    repair = ',"repair":true' if is_repair else ""
    meta = (
        f'{{"v":{WIRE_VERSION},"stream":"{stream}","epoch":{epoch},"shard":{shard},"first":{block.first},'
        f'"count":{block.count}{holes}{repair}{codecs},"tensors":{tensors}{digest}}}'
    )
    return [(META_FIELD, meta.encode()), *payload]


def _compressed(block: Block, payload: Fields, compression: Compression) -> str:
    """Compress fields of a payload in place, and return what the header says of it."""
    items = {column.spec.name.encode(): column.spec for column in block.columns}
    codecs = {}
    for at, (name, value) in enumerate(payload):
        codec = compression.codec_of(items[name].name) if name in items else ""
        frame = pack(codec, memoryview(value), item_size(items[name].dtype)) if codec else None
        if frame is not None:
            payload[at] = name, frame
            codecs[items[name].name] = codec
    return f',"compression":{dumps(codecs, separators=(",", ":"))}' if codecs else ""


def stored_bytes(header: Header, sizes: Iterable[int]) -> int:
    """Return the payload bytes of an entry as stored, without shapes, of the sizes of all its payload fields."""
    fields = zip(header.fields(), sizes, strict=True)
    return sum(size for (name, _), size in fields if not name.endswith(SHAPES_SUFFIX.encode()))


def meta_bytes(spec: Spec, count: int) -> int:
    """Return an upper bound of the header's bytes for ``count`` samples of fixed-size tensors without holes."""
    layout = layout_of(spec.tensors, count)
    return 512 + (0 if layout is None else len(layout.json))


def _sizes_of(block: Block) -> int:
    return sum(column.shapes.size for column in block.columns if column.shapes is not None)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    # viewed as uint8, because bfloat16 has no buffer format
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _refuse_large(payload: Fields) -> None:
    sizes = [len(value) for _, value in payload]
    if max(sizes) > MAX_FIELD_BYTES or sum(sizes) > MAX_ENTRY_BYTES:
        raise TooLarge(
            f"an entry of {sum(sizes)} bytes (largest tensor {max(sizes)}) is over the limit of {MAX_FIELD_BYTES} "
            f"bytes a tensor and {MAX_ENTRY_BYTES} an entry: write fewer or smaller samples at once"
        )


def _tensors_json(block: Block, inline: bool) -> str:
    tensors: dict[str, dict[str, Any]] = {}
    for column in block.columns:
        spec = column.spec
        tensors[spec.name] = {"dtype": spec.dtype, "shape": [block.count, *spec.shape]}
        if column.shapes is not None and inline:
            tensors[spec.name]["shapes"] = column.shapes.tolist()
    return dumps(tensors, separators=(",", ":"))


# --- the checksum -----------------------------------------------------------------------------------------------------


def digest_of(buffers: Iterable[Any]) -> str:
    """Return the XXH3-64 (seed 0) of the concatenated buffers as 16 lowercase hex digits."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def verify(header: Header, buffers: Iterable[Any]) -> None:
    """Raise ChecksumMismatch if the header has a digest and the payload fields, in wire order, have another."""
    if header.xxh3 is not None and (found := digest_of(buffers)) != header.xxh3:
        raise ChecksumMismatch(f"payload has xxh3 {found}, its header says {header.xxh3}")


# --- reading ----------------------------------------------------------------------------------------------------------


def decode(fields: Sequence[tuple[bytes, Any]], spec: Spec, *, takes_refs: bool = False) -> tuple[Header, Block]:
    """Return the header and the block of one entry. The block's arrays are views of the given buffers.

    Args:
        fields: (name, bytes) in the order read: from the entry, or after ``meta`` from the segment.
        spec: The stream's spec.
        takes_refs: Accept a payload in a segment file.

    Raises:
        BadEntry: This is not exactly an entry of this spec. A subclass says more.
    """
    if not fields or fields[0][0] != META_FIELD:
        raise BadEntry(f"the first field is {fields[0][0][:40]!r}, expected 'meta'" if fields else "no fields")
    header = parse_header(fields[0][1], spec, takes_refs=takes_refs)
    names = [name for name, _ in fields[1:]]
    expected = [name for name, _ in header.fields()]
    if names != expected:
        raise BadEntry(f"fields {_short(names)}; expected {_short(expected)}")
    verify(header, (value for _, value in fields[1:]))
    values = unpacked(header, dict(fields[1:]))
    columns = [decode_column(header, tensor, values) for tensor in spec]
    return header, Block(header.first, header.count, columns, list(header.holes))


def _short(names: list[bytes]) -> str:
    texts = [name[:40].decode("latin-1") for name in names[:8]]  # a hostile name may hold terminal escapes
    return ", ".join(text if text.isascii() and text.isprintable() else ascii(text) for text in texts) or "none"


def require_codecs(header: Header) -> None:
    """Raise MissingExtra unless the packages are installed that decompress an entry."""
    for codec in (header.compression or {}).values():
        CODECS[codec].load()


def unpacked(header: Header, values: dict[bytes, Any]) -> dict[bytes, Any]:
    """Return payload fields without compression, once the sum of their sizes by the header's shapes is bounded.

    ``values`` may lack fields of fixed-size tensors that are not compressed. Raises BadEntry, MissingExtra.
    """
    if header.compression is None:
        return values
    require_codecs(header)
    sizes = {tensor.name: _expected(header, tensor, values)[0] for tensor in header.spec}
    if sum(sizes.values()) > MAX_ENTRY_BYTES:
        raise BadEntry(f"an entry of {sum(sizes.values())} bytes, at most {MAX_ENTRY_BYTES} are read")
    frames = {name: values[name.encode()] for name in header.compression}
    found = {name.encode(): unpack(header.compression[name], name, frames[name], sizes[name]) for name in frames}
    return {**values, **found}


def _expected(header: Header, tensor: TensorSpec, values: dict[bytes, Any]) -> tuple[int, NDArray[np.int64] | None]:
    """Return a tensor's bytes without compression, and the shapes of a ragged one. Raises BadEntry."""
    if not tensor.is_ragged:
        return header.count * tensor.sample_bytes, None
    shapes = header.shapes[tensor.name]
    if shapes is None:
        shapes = read_shapes(values[tensor.name.encode() + SHAPES_SUFFIX.encode()], header.count, tensor)
    return int(row_starts(shapes, tensor)[-1]) * item_size(tensor.dtype), shapes


def decode_column(header: Header, tensor: TensorSpec, values: dict[bytes, Any]) -> Column:
    """Return one tensor's column from its payload fields. Raises BadEntry for a wrong size, or a bool not 0 or 1."""
    data = np.frombuffer(values[tensor.name.encode()], dtype=np.uint8)
    expected, shapes = _expected(header, tensor, values)
    if data.nbytes != expected:
        raise BadEntry(f"tensor {tensor.name!r} has {data.nbytes} bytes, expected {expected}")
    check_values(tensor, data)
    flat = data.view(numpy_dtype(tensor.dtype))
    return Column(tensor, flat if tensor.is_ragged else flat.reshape(header.count, *_sizes(tensor)), shapes)


def _sizes(tensor: TensorSpec) -> list[int]:
    return [dim or 0 for dim in tensor.shape]


def check_values(tensor: TensorSpec, data: NDArray[np.uint8]) -> None:
    """Raise BadEntry if a bool tensor holds a byte other than 0 and 1; every other dtype has no invalid bytes.

    Readers that receive payloads into arrays of their own call this, too.
    """
    if tensor.dtype == BOOL and data.max(initial=0) > 1:
        raise BadEntry(f"tensor {tensor.name!r} is bool and has a byte {data.max()}, expected 0 or 1")
