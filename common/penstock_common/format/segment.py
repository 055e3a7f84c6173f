"""Segment files: blocks of one epoch and partition one after the other, as a file that can be read by itself.

The layout only, bytes to values and back; files, locks and folders are ``segments``'. docs/segments.md is the rule.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from penstock_common.errors import BadSegment
from penstock_common.format.header import STREAM_ID
from penstock_common.format.limits import MAX_ENTRY_BYTES, MAX_HEADER_BYTES, MAX_NUMBER
from penstock_common.format.ref import ALIGN, NAME, PAGE, Ref, aligned
from penstock_common.format.spec import Spec

FILE_MAGIC = b"PENSTOCK"
RECORD_MAGIC = b"PSRC"
VERSION = 1
MAX_INFO_BYTES = 1 << 20

_FILE = struct.Struct("<8sIIQ")
"""Magic, version, bytes of JSON, XXH3-64 of them."""
_RECORD = struct.Struct("<4sIQQQ")
"""Magic, bytes of meta, bytes of the whole record, token, XXH3-64 of meta."""
RECORD_BYTES = ALIGN


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a segment file says of itself in its first page."""

    stream: str
    """Id of the stream."""
    name: str
    """Of the stream, for people."""
    epoch: int
    partition: int
    token: str
    """Random, 12 hex digits: another one each time the file is used again."""
    spec: Spec

    @property
    def file(self) -> str:
        """The file's name while it has this token."""
        return f"{self.epoch}-{self.partition}-{self.token}.seg"


def pack_info(info: SegmentInfo) -> bytes:
    """The head of a file: whole pages."""
    text = json.dumps(
        {
            "stream": info.stream, "name": info.name, "epoch": info.epoch, "partition": info.partition,
            "token": info.token, "spec": info.spec.as_json(),
        },
        separators=(",", ":"),
    ).encode()  # fmt: skip
    head = _FILE.pack(FILE_MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text
    return head.ljust(aligned(len(head), PAGE), b"\0")


def info_bytes(first: bytes) -> int:
    """How long the head is, from its first bytes; raises BadSegment where this is no segment of this version."""
    if len(first) < _FILE.size or first[:8] != FILE_MAGIC:
        raise BadSegment("the file does not begin like a segment")
    _, version, length, _ = _FILE.unpack_from(first)
    if version != VERSION:
        raise BadSegment(f"a segment of version {version}, this process knows {VERSION}: update penstock")
    if length > MAX_INFO_BYTES:
        raise BadSegment(f"the head has {length} bytes, at most {MAX_INFO_BYTES} are read")
    return aligned(_FILE.size + length, PAGE)


def parse_info(head: bytes) -> SegmentInfo:
    """The head of a file; raises BadSegment."""
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
    except (ValueError, KeyError, TypeError) as error:
        raise BadSegment(f"the head says {error}") from None
    if not (STREAM_ID.match(info.stream) and 0 <= info.epoch <= MAX_NUMBER and NAME.match(info.file)):
        raise BadSegment("the head names no stream, epoch or token")
    return info


def place_record(start: int, meta_bytes: int, sizes: Sequence[int]) -> tuple[int, int]:
    """(offset of the first payload field, end of the record) of a record that begins at ``start``.

    ``meta_bytes`` is an upper bound: blanks fill the rest.
    """
    at = aligned(start + RECORD_BYTES + meta_bytes)
    return at, aligned(Ref("", at, tuple(sizes)).end)


def pack_record(meta: bytes, nbytes: int, token: str) -> bytes:
    """What stands before a record's payload, up to the end of its meta; ``nbytes`` is the whole record's."""
    head = _RECORD.pack(RECORD_MAGIC, len(meta), nbytes, int(token, 16), xxhash.xxh3_64_intdigest(meta))
    return head.ljust(RECORD_BYTES, b"\0") + meta


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What stands before a record's payload."""

    meta_bytes: int
    nbytes: int
    """Of the whole record: the next one begins behind it."""
    digest: int

    def check(self, meta: bytes) -> None:
        """Raises BadSegment unless this is the record's meta."""
        if len(meta) != self.meta_bytes or xxhash.xxh3_64_intdigest(meta) != self.digest:
            raise BadSegment("a record's meta is damaged")


def parse_record(head: bytes, token: str) -> RecordHead | None:
    """None where no record of this life of the file begins: what follows is of an earlier one, or nothing."""
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
