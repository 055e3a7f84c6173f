"""Scanning the records of a segment file. Each is bounded before use, and no payload is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock_common.errors import BadEntry, BadSegment
from penstock_common.segments.folder import OpenSegment
from penstock_common.wire.header import PAGE, Header, parse_header
from penstock_common.wire.segment import RECORD_BYTES, parse_info, parse_record


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record of a segment file."""

    meta: bytes
    """The entry's header, with its ``ref``."""
    header: Header


def scan(opened: OpenSegment) -> Iterator[ScannedRecord]:
    """Yield the records of a file in the order written.

    They end at the first place where no record of the file's token begins. A file that was truncated between two
    records therefore looks like one with fewer records. Compare the number with the expected one.

    Raises:
        BadSegment: A record is damaged.
    """
    info, at = parse_info(opened.head), len(opened.head)
    while at < opened.nbytes:
        first = os.pread(opened.fd, PAGE, at)
        record = parse_record(first[:RECORD_BYTES], info.token)
        if record is None:
            return
        meta = first[RECORD_BYTES : RECORD_BYTES + record.meta_bytes]
        if len(meta) < record.meta_bytes:
            meta = os.pread(opened.fd, record.meta_bytes, at + RECORD_BYTES)
        try:
            record.check(meta)
            header = parse_header(meta, info.spec, takes_refs=True)
        except (BadEntry, BadSegment) as error:
            raise BadSegment(f"{opened.name} at {at}: {error}") from None
        ref, end = header.ref, at + record.nbytes
        if ref is None or ref.file != opened.name or not at + RECORD_BYTES + len(meta) <= ref.at <= ref.end <= end:
            raise BadSegment(f"{opened.name} at {at}: a record whose payload lies elsewhere")
        if end > opened.nbytes:
            raise BadSegment(f"{opened.name} at {at}: a record of {record.nbytes} bytes, and the file ends before")
        if (header.stream, header.epoch) != (info.stream, info.epoch):
            raise BadSegment(f"{opened.name} at {at}: a record of stream {header.stream}, epoch {header.epoch}")
        yield ScannedRecord(meta, header)
        at = end
