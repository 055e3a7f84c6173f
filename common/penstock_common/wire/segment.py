"""The layout of segment files: blocks of one epoch and partition in a file that can be read alone.

Only bytes to values and back: ``segments`` has files, locks and folders. docs/segment-format.md defines the layout.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from penstock_common.errors import BadSegment
from penstock_common.wire.header import ALIGN, FILE_PAGE, NAME, STREAM_ID, SegmentRef, aligned
from penstock_common.wire.limits import MAX_ENTRY_BYTES, MAX_HEADER_BYTES, MAX_NUMBER
from penstock_common.wire.spec import Spec

FILE_MAGIC = b"PENSTOCK"
RECORD_MAGIC = b"PSRC"
SEGMENT_VERSION = 1
MAX_INFO_BYTES = 1 << 20

_FILE = struct.Struct("<8sIIQ")
"""Magic, version, bytes of JSON, XXH3-64 of them."""
_RECORD = struct.Struct("<4sIQQQ")
"""Magic, bytes of meta, bytes of the whole record, token, XXH3-64 of meta."""
RECORD_BYTES = ALIGN
_BLANK = bytes(ALIGN)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The head of a segment file."""

    stream: str
    """The stream's id."""
    name: str
    """The stream's name, for people."""
    epoch: int
    partition: int
    token: str
    """12 random hex digits, which change when the file is used again."""
    spec: Spec

    @property
    def file(self) -> str:
        """The name of the file while it has this token."""
        return f"{self.epoch}-{self.partition}-{self.token}.seg"


def pack_info(info: SegmentInfo) -> bytes:
    """Return the head of a file, in whole pages."""
    text = json.dumps(
        {
            "stream": info.stream, "name": info.name, "epoch": info.epoch, "partition": info.partition,
            "token": info.token, "spec": info.spec.as_json(),
        },
        separators=(",", ":"),
    ).encode()  # fmt: skip
    head = _FILE.pack(FILE_MAGIC, SEGMENT_VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text
    return head.ljust(aligned(len(head), FILE_PAGE), b"\0")


def info_bytes(first: bytes) -> int:
    """Return the head's length, from its first bytes. Raises BadSegment for a file of another kind or version."""
    if len(first) < _FILE.size or first[:8] != FILE_MAGIC:
        raise BadSegment("the file does not begin like a segment")
    _, version, length, _ = _FILE.unpack_from(first)
    if version != SEGMENT_VERSION:
        raise BadSegment(f"a segment of version {version}, this process knows {SEGMENT_VERSION}: update penstock")
    if length > MAX_INFO_BYTES:
        raise BadSegment(f"the head has {length} bytes, at most {MAX_INFO_BYTES} are read")
    return aligned(_FILE.size + length, FILE_PAGE)


def parse_info(head: bytes) -> SegmentInfo:
    """Parse the head of a file. Raises BadSegment."""
    size = info_bytes(head)
    _, _, length, digest = _FILE.unpack_from(head)
    text = head[_FILE.size : _FILE.size + length]
    if len(head) < size or xxhash.xxh3_64_intdigest(text) != digest:
        raise BadSegment("the head is damaged or cut off")
    try:
        value = json.loads(text)
        info = SegmentInfo(
            str(value["stream"]), str(value["name"]), int(value["epoch"]), int(value["partition"]),
            str(value["token"]), Spec.from_json(value["spec"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadSegment(f"the head says {error}") from None
    if not (STREAM_ID.match(info.stream) and 0 <= info.epoch <= MAX_NUMBER and NAME.match(info.file)):
        raise BadSegment("the head names no stream, epoch or token")
    return info


def place_record(start: int, meta_bytes: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return (offset of the first payload field, end) of a record that begins at ``start``.

    ``meta_bytes`` is an upper bound of the header's length: blanks fill the rest.
    """
    at = aligned(start + RECORD_BYTES + meta_bytes)
    return at, aligned(SegmentRef("", at, tuple(sizes)).end)


def pack_record(meta: bytes, nbytes: int, token: str) -> bytes:
    """Return the bytes before a record's payload: its head and its meta. ``nbytes`` is the whole record's size."""
    head = _RECORD.pack(RECORD_MAGIC, len(meta), nbytes, int(token, 16), xxhash.xxh3_64_intdigest(meta))
    return head.ljust(RECORD_BYTES, b"\0") + meta


def record_parts(
    file: str, start: int, ref: SegmentRef, meta: bytes, payload: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Return the bytes of a record that begins at ``start`` in a file of this name, as parts that follow each other.

    Its payload fields begin at the offset in ``ref``. Blanks fill the bytes before and after each field.
    """
    before = pack_record(meta, aligned(ref.end) - start, file[-16:-4])
    parts: list[bytes | memoryview] = [before.ljust(ref.at - start, b"\0")]
    for value in payload:
        parts += [value, _BLANK[: -memoryview(value).nbytes % ALIGN]]
    return parts


def rest_of(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of parts once the first ``done`` bytes of them are read or written."""
    for number, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[number + 1 :]]
        done -= part.nbytes
    return []


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The parsed head of a record."""

    meta_bytes: int
    nbytes: int
    """The bytes of the whole record: the next one begins after it."""
    digest: int

    def check(self, meta: bytes) -> None:
        """Raise BadSegment unless ``meta`` is this record's."""
        if len(meta) != self.meta_bytes or xxhash.xxh3_64_intdigest(meta) != self.digest:
            raise BadSegment("a record's meta is damaged")


def parse_record(head: bytes, token: str) -> RecordHead | None:
    """Parse the head of a record, or return None where no record of this token begins: the file ends here.

    Raises BadSegment.
    """
    if len(head) < _RECORD.size:
        return None
    magic, meta_bytes, nbytes, life, digest = _RECORD.unpack_from(head)
    if magic != RECORD_MAGIC or life != int(token, 16):
        return None
    if (
        meta_bytes > MAX_HEADER_BYTES
        or nbytes % ALIGN
        or not RECORD_BYTES + meta_bytes <= nbytes <= 2 * MAX_ENTRY_BYTES
    ):
        raise BadSegment(f"a record of {nbytes} bytes with {meta_bytes} of meta")
    return RecordHead(meta_bytes, nbytes, digest)
