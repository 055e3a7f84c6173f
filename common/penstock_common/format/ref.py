"""The ``ref`` of an entry's header: the payload's place in a segment file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock_common.errors import BadEntry
from penstock_common.format.limits import MAX_ENTRY_BYTES, MAX_FIELD_BYTES

ALIGN = 64
"""Each payload field begins at a multiple of this, which suits numpy, SIMD loads and devices."""
PAGE = 4096
MAX_SEGMENT_BYTES = 1 << 40
NAME = re.compile(r"[0-9]{1,16}-[0-9]{1,4}-[0-9a-f]{12}\.seg\Z")
"""A segment's file name: epoch, partition, and a token that changes when the file is used again."""


def aligned(offset: int, to: int = ALIGN) -> int:
    """Return the first multiple of ``to`` that is not below ``offset``."""
    return -(-offset // to) * to


@dataclass(frozen=True, slots=True)
class Ref:
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


def parse_ref(value: Any) -> Ref:
    """Parse and bound the ``ref`` of a header. Raises BadEntry."""
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
