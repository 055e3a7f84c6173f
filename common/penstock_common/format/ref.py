"""The ``ref`` of an entry's header: its payload lies in a segment file, at an offset, field after field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock_common.errors import BadEntry
from penstock_common.format.limits import MAX_ENTRY_BYTES, MAX_FIELD_BYTES

ALIGN = 64
"""Of every payload field: what numpy, SIMD loads and devices like best."""
PAGE = 4096
MAX_SEGMENT_BYTES = 1 << 40
NAME = re.compile(r"[0-9]{1,16}-[0-9]{1,4}-[0-9a-f]{12}\.seg\Z")
"""Epoch, partition, and the token of this life of the file."""


def aligned(offset: int, to: int = ALIGN) -> int:
    """The first multiple of ``to`` that is not below ``offset``."""
    return -(-offset // to) * to


@dataclass(frozen=True, slots=True)
class Ref:
    """Where an entry's payload lies: the ``ref`` of its header."""

    file: str
    """A bare name, to be opened in the reader's own folder."""
    at: int
    """Offset in the file of the first payload field, a multiple of 64; each further one follows at the next."""
    sizes: tuple[int, ...]
    """Bytes of the payload fields, in wire order."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """(offset in the file, bytes) of each payload field."""
        at = self.at
        for size in self.sizes:
            yield at, size
            at = aligned(at + size)

    @property
    def end(self) -> int:
        """The offset behind the last field."""
        end = self.at
        for size in self.sizes:
            end = aligned(end) + size
        return end


def parse_ref(value: Any) -> Ref:
    """The ``ref`` of a header, bounded; raises BadEntry."""
    if type(value) is not list or len(value) != 3:
        raise BadEntry("ref is not a list of file, offset and sizes")
    name, at, sizes = value
    if type(name) is not str or not NAME.match(name):
        raise BadEntry(f"ref names {ascii(name)[:80]}, expected the bare name of a segment")
    if type(at) is not int or not PAGE <= at < MAX_SEGMENT_BYTES or at % ALIGN:
        raise BadEntry(f"ref has the offset {ascii(at)[:40]}, expected a multiple of {ALIGN} from {PAGE}")
    if type(sizes) is not list or not all(type(size) is int and 0 <= size <= MAX_FIELD_BYTES for size in sizes):
        raise BadEntry("ref has sizes that are no sizes of fields")
    if sum(sizes) > MAX_ENTRY_BYTES:
        raise BadEntry(f"ref names {sum(sizes)} bytes, at most {MAX_ENTRY_BYTES} are read")
    return Ref(name, at, tuple(sizes))


def with_ref(meta: bytes, ref: Ref) -> bytes:
    """A header's JSON with its ``ref``."""
    sizes = ",".join(map(str, ref.sizes))
    return b'%b,"ref":["%b",%d,[%b]]}' % (meta[:-1], ref.file.encode(), ref.at, sizes.encode())


def without_ref(meta: bytes) -> bytes:
    """The inverse: a header as it would travel with its payload."""
    value = json.loads(meta)
    value.pop("ref", None)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def ref_bytes(name: str, sizes: int) -> int:
    """At most so many bytes does `with_ref` add."""
    return 40 + len(name) + 12 * sizes
