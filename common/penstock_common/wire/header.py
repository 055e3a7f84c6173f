"""Entry headers: the ``meta`` field, one compact JSON object, parsed with every number bounded.

A header's ``ref`` names a payload's place in a segment file, and its layout describes tensors of fixed size.
``codec`` reads the payload fields. The reader checks whether an identity is inside the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from json import JSONDecoder, dumps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, UnsupportedVersion
from penstock_common.wire.compression import CODECS
from penstock_common.wire.limits import (
    MAX_ENTRY_BYTES,
    MAX_FIELD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HOLES,
    MAX_NUMBER,
    MAX_SHARD_SAMPLES,
)
from penstock_common.wire.ragged import inline_shapes
from penstock_common.wire.spec import SHAPES_SUFFIX, Spec, TensorSpec

ALIGN = 64
"""Each payload field begins at a multiple of this, which suits numpy, SIMD loads and devices."""
FILE_PAGE = 4096
"""The bytes of a segment's head, or a multiple of them. Its records follow."""
MAX_SEGMENT_BYTES = 1 << 40
NAME = re.compile(r"[0-9]{1,16}-[0-9]{1,4}-[0-9a-f]{12}\.seg\Z")
"""A segment's file name: epoch, partition, and a token that changes when the file is used again."""


def aligned(offset: int, to: int = ALIGN) -> int:
    """Return the first multiple of ``to`` that is not below ``offset``."""
    return -(-offset // to) * to


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """The place of an entry's payload in a segment file."""

    file: str
    """A file name without a folder: the reader opens it in its own folder of segments."""
    at: int
    """The offset of the first payload field, a multiple of 64. Each further field begins at the next multiple."""
    sizes: tuple[int, ...]
    """The bytes of each payload field, in wire order."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the file, bytes) of each payload field."""
        at = self.at
        for size in self.sizes:
            yield at, size
            at = aligned(at + size)

    @property
    def end(self) -> int:
        """The offset after the last field."""
        end = self.at
        for size in self.sizes:
            end = aligned(end) + size
        return end


def parse_ref(value: Any) -> SegmentRef:
    """Parse and bound the ``ref`` of a header. Raises BadEntry."""
    if type(value) is not list or len(value) != 3:
        raise BadEntry("ref is not a list of file, offset and sizes")
    name, at, sizes = value
    if type(name) is not str or not NAME.match(name):
        raise BadEntry(f"ref names {ascii(name)[:80]}, expected the bare name of a segment")
    if type(at) is not int or not FILE_PAGE <= at < MAX_SEGMENT_BYTES or at % ALIGN:
        raise BadEntry(f"ref has the offset {ascii(at)[:40]}, expected a multiple of {ALIGN} from {FILE_PAGE}")
    if type(sizes) is not list or not all(type(size) is int and 0 <= size <= MAX_FIELD_BYTES for size in sizes):
        raise BadEntry("ref has sizes that are no sizes of fields")
    if sum(sizes) > MAX_ENTRY_BYTES:
        raise BadEntry(f"ref names {sum(sizes)} bytes, at most {MAX_ENTRY_BYTES} are read")
    return SegmentRef(name, at, tuple(sizes))


def with_ref(meta: bytes, ref: SegmentRef) -> bytes:
    """Return a header's JSON with a ``ref`` added."""
    sizes = ",".join(map(str, ref.sizes))
    return b'%b,"ref":["%b",%d,[%b]]}' % (meta[:-1], ref.file.encode(), ref.at, sizes.encode())


def without_ref(meta: bytes) -> bytes:
    """Return a header's JSON without its ``ref``, as an entry with its payload has it."""
    value = json.loads(meta)
    value.pop("ref", None)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def ref_bytes(name: str, sizes: int) -> int:
    """Return the most bytes that `with_ref` adds."""
    return 40 + len(name) + 12 * sizes


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """The header's ``tensors`` of blocks of one size: made once by writers, recognised byte for byte by readers."""

    json: str
    """The header's ``tensors``, as `codec.encode` writes them."""
    fields: tuple[tuple[bytes, int], ...]
    """(name, bytes) of each payload field, in order."""
    is_allowed: bool
    """Whether the sizes are within the limits of the wire format."""


@lru_cache(maxsize=256)
def layout_of(tensors: tuple[TensorSpec, ...], count: int) -> FixedLayout | None:
    """Return the layout of blocks of ``count`` samples, or None where a tensor is ragged."""
    if any(tensor.is_ragged for tensor in tensors):
        return None
    said = {t.name: {"dtype": t.dtype, "shape": [count, *t.shape]} for t in tensors}
    text = dumps(said, separators=(",", ":"))
    fields = tuple((t.name.encode(), count * t.sample_bytes) for t in tensors)
    sizes = [size for _, size in fields]
    is_allowed = max(sizes) <= MAX_FIELD_BYTES and sum(sizes) <= MAX_ENTRY_BYTES
    return FixedLayout(text, fields, is_allowed)


WIRE_VERSION = 1
STREAM_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_DIGEST = re.compile(r"[0-9a-f]{16}\Z")
_INTEGER = rb"(?:0|[1-9]\d{0,15})"
_USUAL = re.compile(
    rb'\{"v":1,"stream":"([A-Za-z0-9._-]{1,64})","epoch":(%b),"shard":(%b),"first":(%b),"count":(%b),"tensors":(\{.*\})'
    rb'(?:,"xxh3":"([0-9a-f]{16})")?(?:,"ref":(\["[0-9a-z.-]*",%b,\[(?:%b(?:,%b)*)?\]\]))?\}' % ((_INTEGER,) * 7)
)
"""The form of nearly every header: no holes, no repair."""


@dataclass(slots=True)
class Header:
    """The parsed header of an entry."""

    stream: str
    """The stream's random id, which differs when a stream is made again under the same name."""
    epoch: int
    shard: int
    first: int
    """The offset in the shard of the first sample or hole of this entry."""
    count: int
    """The number of samples present, at least 1."""
    holes: tuple[int, ...]
    """Offsets in ``[first, end)`` without a sample, ascending."""
    shapes: dict[str, NDArray[np.int64] | None]
    """Ragged tensor to its samples' shapes ``[n, ndim]``; None where a field of their own holds them."""
    spec: Spec
    xxh3: str | None
    ref: SegmentRef | None = None
    """The payload's place in a segment file; None where the entry holds it."""
    is_repair: bool = False
    """Whether a repair wrote it for lost samples. A group may have acknowledged some of them already."""
    layout: FixedLayout | None = field(default=None, compare=False)
    """The layout of a block of fixed-size tensors; None where a tensor is ragged or the header is unusual."""
    compression: dict[str, str] | None = None
    """Compressed tensor -> codec; None where no tensor is compressed."""
    end: int = field(init=False)
    """The offset after the last sample or hole of this entry."""

    def __post_init__(self) -> None:
        self.end = self.first + self.count + len(self.holes)

    def fields(self) -> Sequence[tuple[bytes, int | None]]:
        """Return the payload fields that this header announces, in order: (name, bytes or None if unknown)."""
        if self.layout is not None:
            return self.layout.fields
        return self._announced(self.compression or ())

    def unpacked_fields(self) -> Sequence[tuple[bytes, int | None]]:
        """Return the payload fields as they are without compression, as `fields` does."""
        return self._announced(())

    def _announced(self, unknown: Container[str]) -> Sequence[tuple[bytes, int | None]]:
        announced: list[tuple[bytes, int | None]] = []
        for tensor in self.spec:
            name = tensor.name.encode()
            if not tensor.is_ragged:
                announced.append((name, None if tensor.name in unknown else self.count * tensor.sample_bytes))
                continue
            if self.shapes[tensor.name] is None:
                announced.append((name + SHAPES_SUFFIX.encode(), 8 * self.count * tensor.wire_ndim))
            announced.append((name, None))
        return announced


def parse_header(data: bytes | bytearray | memoryview, spec: Spec, *, takes_refs: bool = False) -> Header:
    """Parse and bound a header that was written for a stream of this spec.

    Args:
        data: The ``meta`` field.
        spec: The stream's spec.
        takes_refs: Accept a payload in a segment file, because this reader sees the stream's folder.

    Raises:
        BadEntry: The header is damaged, or belongs to another spec.
        UnsupportedVersion: A later version of Penstock wrote it.
    """
    usual = _USUAL.fullmatch(data) if len(data) <= MAX_HEADER_BYTES else None
    if usual is not None and (known := _recognised(usual, spec, takes_refs)) is not None:
        return known
    value = _object(data)
    version = _number(value, "v", 1, MAX_NUMBER)
    if version != WIRE_VERSION:
        raise UnsupportedVersion(
            f"entry of wire format v{version}, this process knows v{WIRE_VERSION}: update penstock"
        )
    if "ref" in value and not takes_refs:
        raise UnsupportedVersion("entry uses 'ref', reserved in wire format v1: update penstock")
    if "compression" in value:
        _refuse_unknown_codecs(value["compression"])
    stream = value.get("stream")
    if type(stream) is not str or not STREAM_ID.match(stream):
        raise BadEntry(f"stream is {_shown(stream)}, expected an id of at most 64 letters, digits, '.', '_', '-'")
    digest = value.get("xxh3")
    if "xxh3" in value and (type(digest) is not str or not _DIGEST.match(digest)):
        raise BadEntry(f"xxh3 is {_shown(digest)}, expected 16 lowercase hex digits")
    first = _number(value, "first", 0, MAX_SHARD_SAMPLES - 1)
    count = _number(value, "count", 1, MAX_SHARD_SAMPLES)
    header = Header(
        stream,
        _number(value, "epoch", 0, MAX_NUMBER),
        _number(value, "shard", 0, MAX_NUMBER),
        first,
        count,
        _holes(value.get("holes", []), first, count),
        _tensors(value.get("tensors"), count, spec),
        spec,
        digest,
        parse_ref(value["ref"]) if "ref" in value else None,
        value.get("repair") is True,
        compression=_codecs(value["compression"], spec) if "compression" in value else None,
    )
    _bound_sizes(header)
    if header.ref is not None:
        _check_ref(header, header.ref)
    return header


def _recognised(usual: re.Match[bytes], spec: Spec, takes_refs: bool) -> Header | None:
    """Return a header that equals, byte for byte, what `codec.encode` writes for its numbers: the fast path.

    None for any other header. One that must be refused is parsed in full, which says why.
    """
    stream, *numbers, tensors, digest, ref = usual.groups()
    if ref is not None and not takes_refs:
        return None
    epoch, shard, first, count = map(int, numbers)
    if max(epoch, shard) > MAX_NUMBER or count < 1 or first + count > MAX_SHARD_SAMPLES:
        return None
    layout = layout_of(spec.tensors, count)
    if layout is None or layout.json.encode() != tensors or not layout.is_allowed:
        return None
    header = Header(
        stream.decode(), epoch, shard, first, count, (), {}, spec, digest.decode() if digest else None,
        parse_ref(_decoded(ref)) if ref else None, layout=layout,
    )  # fmt: skip
    if header.ref is not None:
        _check_ref(header, header.ref)
    return header


def _refuse_unknown_codecs(value: Any) -> None:
    if type(value) is not dict:
        raise UnsupportedVersion("entry uses 'compression' in a form that this process does not know: update penstock")
    for name, codec in value.items():
        if type(codec) is not str or codec not in CODECS:
            raise UnsupportedVersion(
                f"tensor {_shown(name)} uses 'compression' {_shown(codec)}, this process knows {', '.join(CODECS)}: "
                "update penstock"
            )


def _codecs(value: dict[str, str], spec: Spec) -> dict[str, str]:
    if not value or any(name not in spec.names for name in value):
        raise BadEntry(f"compression names {_shown(list(value))}; the stream's spec is {spec!s:.200}")
    return value


def _check_ref(header: Header, ref: SegmentRef) -> None:
    fields = header.fields()
    if len(fields) != len(ref.sizes):
        raise BadEntry(f"ref has the sizes of {len(ref.sizes)} fields, the header announces {len(fields)}")
    for (name, size), found in zip(fields, ref.sizes, strict=True):
        if size is not None and size != found:
            raise BadEntry(f"field {name.decode()!r} has {found} bytes in ref, expected {size}")


def _object(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    if len(data) > MAX_HEADER_BYTES:
        raise BadEntry(f"header of {len(data)} bytes, at most {MAX_HEADER_BYTES} are read")
    value = _decoded(data)
    if type(value) is not dict:
        raise BadEntry("header is not a JSON object")
    return value


def _decoded(data: bytes | bytearray | memoryview) -> Any:
    try:
        # decoded as UTF-8 here, because json.loads also accepts UTF-16 and UTF-32
        return _JSON.decode(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"header is not JSON: {str(error)[:80]}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is duplicated")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_JSON = JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _shown(value: Any) -> str:
    """Return a hostile value as short ASCII text for an error message. It never fails."""
    try:
        return ascii(value)[:80]
    except RecursionError:
        return "nested too deeply"


def _number(value: dict[str, Any], key: str, low: int, high: int) -> int:
    found = value.get(key)
    if type(found) is not int or not low <= found <= high:  # type(): a bool is an int to isinstance, and 1.0 == 1
        raise BadEntry(f"{key} is {_shown(found)}, expected an integer from {low} to {high}")
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
    if type(value) is not dict or len(value) != len(spec.tensors) or any(t.name not in value for t in spec.tensors):
        found = _shown(list(value)) if type(value) is dict else "no object"
        raise BadEntry(f"tensors are {found}; the stream's spec is {spec!s:.200}")
    shapes: dict[str, NDArray[np.int64] | None] = {}
    for tensor in spec.tensors:
        said = value[tensor.name]
        expected = [count, *tensor.shape]
        if type(said) is not dict or said.get("dtype") != tensor.dtype or said.get("shape") != expected:
            raise BadEntry(f"tensor {tensor.name!r} is {_shown(said)}; expected {tensor.dtype} {expected}")
        if any(type(dim) is not int and dim is not None for dim in said["shape"]):  # 3.0 == 3 and True == 1 in Python
            raise BadEntry(f"tensor {tensor.name!r}: a size is not an integer")
        if tensor.is_ragged:
            shapes[tensor.name] = inline_shapes(said["shapes"], count, tensor) if "shapes" in said else None
        elif "shapes" in said:
            raise BadEntry(f"tensor {tensor.name!r} is not ragged, yet has shapes")
    return shapes


def _bound_sizes(header: Header) -> None:
    """Raise BadEntry for sizes over the limits: readers allocate memory by them before the bytes arrive."""
    total = 0
    for name, size in header.unpacked_fields():
        if size is not None and size > MAX_FIELD_BYTES:
            raise BadEntry(f"field {name.decode()} of {size} bytes, at most {MAX_FIELD_BYTES} are read")
        total += size or 0
    if total > MAX_ENTRY_BYTES:
        raise BadEntry(f"an entry of {total} bytes, at most {MAX_ENTRY_BYTES} are read")
