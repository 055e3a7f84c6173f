"""Payloads that are gone because nobody was owed them any more: no fault of the entry, and no dead letter.

A segment is used again once every group has settled what lies in it; a member that stood still meanwhile, and has the
entry's header already, finds another payload there, or none.
"""

from __future__ import annotations

import numpy as np

from penstock_common.errors import BadEntry, PenstockError, SegmentGone, UncommittedEntry
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import fetch_fields
from penstock_common.stream.groups.ledger import settled_bits
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream, require_there
from penstock_common.wire.header import Header


def is_settled(
    client: Client, partition: PartitionKeys, manifest: Manifest, group: str, error: BadEntry | None,
    header: Header | None,
) -> bool:  # fmt: skip
    """Whether an entry's payload is gone and the group has settled all of it, or its epoch is over.

    A released epoch has no index either: it says nothing about an entry that was received before.
    """
    if not isinstance(error, SegmentGone | UncommittedEntry) or header is None:
        return False
    state: bytes | None = client.get(partition.state(manifest.epoch))
    if isinstance(error, UncommittedEntry):
        return state is None or state.startswith(b"gone:")
    if state != manifest.live_state.encode():
        return True
    bits = settled_bits(client, partition, manifest.epoch, group, header.shard, header.first, header.end)
    bits[np.array(header.holes, dtype=np.int64) - header.first] = True
    return bool(bits.all())


def is_removed(client: Client, partition: PartitionKeys, epoch: int, entry_id: bytes, error: BadEntry) -> bool:
    """Whether an entry's payload is gone because the entry is."""
    return isinstance(error, SegmentGone) and fetch_fields(client, partition, epoch, entry_id) is None


def cause_of(client: Client, stream: Stream, error: PenstockError) -> PenstockError:
    """The same, or what took the whole stream along."""
    try:
        require_there(client, stream)
    except PenstockError as worse:
        return worse
    return error
