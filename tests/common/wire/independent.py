"""A reader of wire format v1 written from docs/wire-format.md alone: struct, xxhash and zstandard, no numpy, nothing of
Penstock. It does not know Blosc2, as a reader may not, unless it is given a function for it.

It proves that the document suffices. Keep it so: when it must change, the document must have changed first.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash
import zstandard

ITEM: dict[str, tuple[int, str]] = {
    "bool": (1, "B"),
    "int8": (1, "b"),
    "int16": (2, "h"),
    "int32": (4, "i"),
    "int64": (8, "q"),
    "uint8": (1, "B"),
    "uint16": (2, "H"),
    "uint32": (4, "I"),
    "uint64": (8, "Q"),
    "float16": (2, "e"),
    "float32": (4, "f"),
    "float64": (8, "d"),
    "bfloat16": (2, "H"),
    "complex64": (8, "ff"),
    "complex128": (16, "dd"),
    "bytes": (1, "B"),
}
FIELD_LIMIT, ENTRY_LIMIT, HEADER_LIMIT, SHARD_LIMIT = 512_000_000, 1_073_741_824, 1_048_576, 1 << 20
NUMBER_LIMIT = (1 << 53) - 1

Spec = dict[str, Any]
Codecs = Mapping[str, Callable[[bytes, int], bytes]]
"""Codec -> (frame, size) -> the bytes. It raises ValueError for a frame of another size or form."""


class Refused(Exception):
    """A bad entry. ``kind`` is one of the three kinds that the document distinguishes."""

    def __init__(self, why: str, kind: str = "BadEntry") -> None:
        self.kind = kind
        super().__init__(why)


@dataclass
class Tensor:
    """One tensor of one sample."""

    dtype: str
    shape: list[int]
    raw: bytes
    """The sample's bytes as they are on the wire."""

    def values(self) -> list[Any]:
        """Return the elements in C order as Python numbers."""
        size, code = ITEM[self.dtype]
        numbers: list[Any] = list(struct.unpack(f"<{len(self.raw) // size * len(code)}{code[0]}", self.raw))
        if self.dtype == "bool":
            return [number == 1 for number in numbers]
        if self.dtype == "bfloat16":
            return [struct.unpack("<f", struct.pack("<I", number << 16))[0] for number in numbers]
        if len(code) == 2:
            return [complex(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return numbers


@dataclass
class Entry:
    """The header and the content of an entry."""

    header: dict[str, Any]
    offsets: list[int]
    samples: list[dict[str, Tensor]]


def need(condition: Any, why: str) -> None:
    """Refuse the entry unless the condition holds."""
    if not condition:
        raise Refused(why)


def integer(value: Any, low: int, high: int) -> int:
    """Return the value, if it is an integer from low to high."""
    need(type(value) is int and low <= value <= high, f"not an integer from {low} to {high}")
    return int(value)


def unpack_zstd(frame: bytes, size: int) -> bytes:
    """Return what a frame holds, once its claims are compared."""
    try:
        head = zstandard.get_frame_parameters(frame)
        if head.content_size != size or head.dict_id or head.window_size > max(size, 1024):
            raise ValueError("the frame claims another size, a dictionary, or a larger window")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


ZSTD: Codecs = {"zstd": unpack_zstd}


def read(fields: list[tuple[bytes, bytes]], spec: Spec, codecs: Codecs = ZSTD) -> Entry:
    """Read one entry from its fields in order. ``spec`` is the JSON form from the stream's meta."""
    need(fields and fields[0][0] == b"meta", "meta is not the first field")
    header = read_header(fields[0][1], codecs=codecs)
    count = header["count"]
    plan = [(name, dtype, shape, announced(header, name, dtype, shape)) for name, (dtype, shape) in spec.items()]
    need(set(header["tensors"]) == set(spec), "not the spec's tensors")
    bound_sizes(plan, count)
    expected = [
        field
        for name, dtype, shape, inline in plan
        for field in ([f"{name}.shapes", name] if is_ragged(dtype, shape) and inline is None else [name])
    ]
    need([name.decode("latin-1") for name, _ in fields[1:]] == expected, "not the fields the header announces")
    check_digest(header, [value for _, value in fields[1:]])
    payload = dict(fields[1:])
    decompress(payload, header, plan, codecs)
    columns = {name: samples_of(payload, name, dtype, shape, inline, count) for name, dtype, shape, inline in plan}
    samples = [{name: column[i] for name, column in columns.items()} for i in range(count)]
    return Entry(header, offsets_of(header), samples)


def read_ref(data: bytes, spec: Spec) -> tuple[str, int, list[int]]:
    """Return file, offset and sizes of a header's ``ref``. Raises Refused. The rest of the header counts as inline."""
    header = read_header(data, sees_files=True)
    ref, count = header.get("ref"), header["count"]
    need(type(ref) is list and len(ref) == 3, "ref is no list of three")
    assert isinstance(ref, list)
    file, at, sizes = ref
    need(type(file) is str and re.fullmatch(r"[0-9]{1,16}-[0-9]{1,4}-[0-9a-f]{12}\.seg", file), "no name of a segment")
    need(integer(at, 4096, (1 << 40) - 1) % 64 == 0, "the offset is no multiple of 64")
    need(type(sizes) is list, "no sizes")
    plan = [(name, dtype, shape, announced(header, name, dtype, shape)) for name, (dtype, shape) in spec.items()]
    fields: list[int | None] = []
    for name, dtype, shape, inline in plan:
        if name in (header["compression"] or ()):
            fields.append(None)
        elif not is_ragged(dtype, shape):
            fields.append(count * ITEM[dtype][0] * prod(size or 0 for size in shape))
        else:
            fields += [None] if inline is not None else [8 * count * ndim_of(dtype, shape), None]
    need(len(sizes) == len(fields), "not the fields that the header announces")
    for size, known in zip(sizes, fields, strict=True):
        integer(size, 0, FIELD_LIMIT)
        need(known in (None, size), "another size")
    need(sum(sizes) <= ENTRY_LIMIT, "too large an entry")
    return file, at, sizes


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose keys are all different."""
    need(len({key for key, _ in pairs}) == len(pairs), "a key stands twice")
    return dict(pairs)


def no_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are not JSON."""
    raise Refused(f"{name} is not JSON")


def read_header(data: bytes, *, sees_files: bool = False, codecs: Codecs = ZSTD) -> dict[str, Any]:
    """Return the header with its numbers bounded. Missing holes become [], and a missing xxh3 None."""
    need(len(data) <= HEADER_LIMIT, "header too large")
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {error}") from None
    need(type(header) is dict, "not an object")
    if (
        integer(header.get("v"), 1, NUMBER_LIMIT) != 1
        or ("ref" in header and not sees_files)
        or not is_known(header.get("compression", {}), codecs)
    ):
        raise Refused("newer than v1", "UnsupportedVersion")
    stream = header.get("stream")
    need(type(stream) is str and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", stream), "no stream id")
    integer(header.get("epoch"), 0, NUMBER_LIMIT)
    integer(header.get("shard"), 0, NUMBER_LIMIT)
    first, count = integer(header.get("first"), 0, SHARD_LIMIT - 1), integer(header.get("count"), 1, SHARD_LIMIT)
    holes = header.setdefault("holes", [])
    need(type(holes) is list and len(holes) <= 1024, "holes is not a short list")
    end = first + count + len(holes)
    need(end <= SHARD_LIMIT, "beyond the shard")
    for before, hole in zip([first - 1, *holes], holes, strict=False):
        need(integer(hole, first, end - 1) > before, "holes do not rise")
    if "xxh3" in header:
        need(type(header["xxh3"]) is str and re.fullmatch(r"[0-9a-f]{16}", header["xxh3"]), "no digest")
    header.setdefault("xxh3", "absent")
    need(type(header.get("tensors")) is dict, "no tensors")
    packed = header.setdefault("compression", None)
    need(packed is None or (packed and set(packed) <= set(header["tensors"])), "compression of no tensor")
    return dict(header)


def is_known(compression: Any, codecs: Codecs) -> bool:
    """Return whether this reader knows every codec."""
    return type(compression) is dict and all(type(one) is str and one in codecs for one in compression.values())


def announced(header: dict[str, Any], name: str, dtype: str, shape: list[int | None]) -> list[list[int]] | None:
    """Check one tensor's object, and return its inline shapes or None."""
    said = header["tensors"].get(name)
    need(type(said) is dict and said.get("dtype") == dtype, "another dtype, or none")
    found = said.get("shape")
    need(type(found) is list and all(size is None or type(size) is int for size in found), "no shape")
    need(found == [header["count"], *shape], "another shape")
    if "shapes" not in said:
        return None
    need(is_ragged(dtype, shape), "shapes on a fixed tensor")
    shapes: list[list[int]] = said["shapes"]
    need(type(shapes) is list and len(shapes) == header["count"], "not one shape a sample")
    for one in shapes:
        need(type(one) is list and all(type(size) is int for size in one), "a shape is no list of integers")
    return shapes


def is_ragged(dtype: str, shape: list[int | None]) -> bool:
    """Return whether samples differ in shape."""
    return dtype == "bytes" or None in shape


def bound_sizes(plan: list[tuple[str, str, list[int | None], list[list[int]] | None]], count: int) -> None:
    """Bound the fields whose size the header gives."""
    sizes = []
    for _, dtype, shape, inline in plan:
        if not is_ragged(dtype, shape):
            sizes.append(count * ITEM[dtype][0] * prod(size or 0 for size in shape))
        elif inline is None:
            sizes.append(count * 8 * ndim_of(dtype, shape))
    need(max(sizes, default=0) <= FIELD_LIMIT and sum(sizes) <= ENTRY_LIMIT, "too large")


def ndim_of(dtype: str, shape: list[int | None]) -> int:
    """Return the number of sizes in a ragged sample's shape."""
    return 1 if dtype == "bytes" else len(shape)


def check_digest(header: dict[str, Any], values: list[bytes]) -> None:
    """Compare the checksum, if there is one."""
    digest = xxhash.xxh3_64_hexdigest(b"".join(values))
    if header["xxh3"] not in ("absent", digest):
        raise Refused(f"digest is {digest}", "ChecksumMismatch")


def decompress(
    payload: dict[bytes, bytes],
    header: dict[str, Any],
    plan: list[tuple[str, str, list[Any], list[list[int]] | None]],
    codecs: Codecs,
) -> None:
    """Replace frames by what they hold, once all sizes are known and bounded."""
    packed = header["compression"]
    if packed is None:
        return
    sizes = {}
    for name, dtype, shape, inline in plan:
        shapes = shapes_of(payload, name, dtype, shape, inline, header["count"])
        sizes[name] = sum(ITEM[dtype][0] * prod(one) for one in shapes)
        need(sizes[name] <= FIELD_LIMIT, "too large a payload")
    need(sum(sizes.values()) <= ENTRY_LIMIT, "too large an entry")
    for name in packed:
        frame, size = payload[name.encode()], sizes[name]
        need(len(frame) < size, "the frame is no shorter than what it holds")
        try:
            data = codecs[packed[name]](frame, size)
        except ValueError as error:
            raise Refused(f"no frame of {size} bytes: {error}") from None
        need(len(data) == size, "the frame holds another size")
        payload[name.encode()] = data


def shapes_of(
    payload: dict[bytes, bytes], name: str, dtype: str, shape: list[Any], inline: list[list[int]] | None, count: int
) -> list[list[int]]:
    """Return the shape of each of the n samples, bounded."""
    if not is_ragged(dtype, shape):
        return [shape] * count
    shapes = (
        shapes_field(payload[f"{name}.shapes".encode()], ndim_of(dtype, shape), count) if inline is None else inline
    )
    for one in shapes:
        check_shape(one, [None] if dtype == "bytes" else shape, ITEM[dtype][0])
    return shapes


def samples_of(
    payload: dict[bytes, bytes], name: str, dtype: str, shape: list[Any], inline: list[list[int]] | None, count: int
) -> list[Tensor]:
    """Return one tensor's n samples."""
    data, item = payload[name.encode()], ITEM[dtype][0]
    shapes = shapes_of(payload, name, dtype, shape, inline, count)
    sizes = [item * prod(one) for one in shapes]
    need(sum(sizes) == len(data), "payload has another size")
    need(dtype != "bool" or max(data, default=0) <= 1, "a bool is neither 0 nor 1")
    samples, start = [], 0
    for one, size in zip(shapes, sizes, strict=True):
        samples.append(Tensor(dtype, list(one), bytes(data[start : start + size])))
        start += size
    return samples


def shapes_field(data: bytes, ndim: int, count: int) -> list[list[int]]:
    """Return the shapes of a ``.shapes`` field."""
    need(len(data) == 8 * ndim * count, "shapes field has another size")
    return [list(row) for row in struct.iter_unpack(f"<{ndim}q", data)]


def check_shape(found: list[int], wanted: list[int | None], item: int) -> None:
    """Bound one ragged sample's shape."""
    need(len(found) == len(wanted), "another number of dimensions")
    for size, want in zip(found, wanted, strict=True):
        need(size >= 0 and want in (None, size), "a size does not fit")
    need(item * prod(size or 1 for size in found) <= FIELD_LIMIT, "a sample is too large")


def offsets_of(header: dict[str, Any]) -> list[int]:
    """Return the offset of each sample."""
    holes = set(header["holes"])
    end = header["first"] + header["count"] + len(holes)
    return [offset for offset in range(header["first"], end) if offset not in holes]
