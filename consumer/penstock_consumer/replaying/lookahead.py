"""Blocks in files on a disk: which of them come next is known, so the disk is asked for them before they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from penstock_common.errors import BadEntry
from penstock_common.segments.reading import AHEAD_BYTES, SegmentReader
from penstock_common.server.channel import SKIP, Skip
from penstock_common.wire.header import parse_header
from penstock_common.wire.limits import MAX_HEADER_BYTES
from penstock_common.wire.spec import META, Spec

_META = META.encode()
T = TypeVar("T")


def looked_ahead(blocks: Iterator[T], nbytes: Callable[[T], int]) -> Iterator[tuple[T, bool]]:
    """Each block twice, in the same order: with False when the disk is to be asked for it, with True when it is due.

    In between lie others of `AHEAD_BYTES`, or all that are left.
    """
    waiting: deque[T] = deque()
    ahead = 0
    for block in blocks:
        yield block, False
        waiting.append(block)
        ahead += nbytes(block)
        while ahead > AHEAD_BYTES:
            ahead -= nbytes(waiting[0])
            yield waiting.popleft(), True
    for block in waiting:
        yield block, True


class ReadaheadSink:
    """An EntrySink that asks the disk for what an entry refers to, and has no opinion of it: whoever reads it has."""

    def __init__(self, spec: Spec, segments: SegmentReader) -> None:
        self._spec, self._segments = spec, segments

    def begin(self, entry_id: bytes) -> None:
        """See EntrySink."""

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """The header only."""
        return None if name == _META and nbytes <= MAX_HEADER_BYTES else SKIP

    def value(self, name: bytes, data: bytes) -> None:
        """Of an entry's first fields, or of any."""
        try:
            ref = parse_header(data, self._spec, takes_refs=True).ref
        except BadEntry:
            return
        if ref is not None:
            self._segments.expect(ref)

    def end(self) -> None:
        """See EntrySink."""

    def missing(self, entry_id: bytes) -> None:
        """See EntrySink."""
