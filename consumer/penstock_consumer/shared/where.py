"""What a shared reader checks entries against, and which of their samples it wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry
from penstock_common.wire.header import Header
from penstock_common.stream.groups.ledger import settled_bits
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_consumer.receiving.receive import check_identity
from penstock_consumer.shared.place import Place


@dataclass(slots=True)
class Where:
    """What a receiver checks identities against."""

    place: Place
    manifest: Manifest
    partition: PartitionKeys
    settled_for: str | None
    """The group whose settled samples are left out: for entries that were delivered before. Of repaired ones they
    always are: a group that had settled them is given the new entry all the same."""

    def check(self, header: Header) -> None:
        """See `receive.Place`: also, whether it lies in the right partition."""
        check_identity(header, self.place.stream, self.manifest)
        if self.place.stream.partition_of(header.shard) != self.partition:
            raise BadEntry(f"shard {header.shard} belongs to another partition")

    def wanted(self, header: Header) -> NDArray[np.bool_] | None:
        """See `receive.Place`: what the group has not settled."""
        if self.settled_for is None and not header.is_repair:
            return None
        settled = settled_bits(
            self.place.client, self.partition, self.manifest.epoch, self.place.who.group, header.shard,
            header.first, header.end,
        )  # fmt: skip
        for lo, hi in self.place.holdings.kept(self.partition.number, self.manifest.epoch, header.shard):
            settled[max(lo - header.first, 0) : max(hi - header.first, 0)] = True
        return ~settled if settled.any() else None
