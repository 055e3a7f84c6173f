"""What ordered reading expects of an entry that it asked for by id, and how it lets go of one it no longer wants.

Used by ``reader``'s receivers; no Redis here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry
from penstock_common.server.channel import SKIP, Skip
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream
from penstock_common.wire.header import Header
from penstock_consumer.ordered.canonical import Take
from penstock_consumer.receiving.receive import check_identity


@dataclass(slots=True)
class Expected:
    """What the next entry must be, by the index."""

    stream: Stream
    manifest: Manifest
    take: Take | None = None

    def check(self, header: Header) -> None:
        """Raises BadEntry where the entry is another one than the index says."""
        check_identity(header, self.stream, self.manifest)
        assert self.take is not None
        shard, record = self.take.piece.shard, self.take.piece.record
        if (header.shard, header.first, header.end, tuple(header.holes)) != (
            shard, record.first, record.end, record.holes,
        ):  # fmt: skip
            raise BadEntry(
                f"entry of shard {header.shard} offsets {header.first}-{header.end - 1}, where the index has shard "
                f"{shard} offsets {record.first}-{record.end - 1}"
            )

    def wanted(self, header: Header) -> NDArray[np.int64] | None:
        """The rows that were planned."""
        assert self.take is not None
        return None if self.take.is_whole else self.take.rows


class Discard:
    """Receives entries that are not wanted after all."""

    def begin(self, entry_id: bytes) -> None:
        """An entry starts."""

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Read and dropped."""
        return SKIP

    def value(self, name: bytes, data: bytes) -> None:
        """Never asked for."""

    def end(self) -> None:
        """The entry is complete."""

    def missing(self, entry_id: bytes) -> None:
        """It is gone."""
