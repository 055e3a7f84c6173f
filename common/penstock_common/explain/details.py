"""Details of a stream that its snapshot does not have, for people: shards, entries and reasons of bad samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock_common.errors import DamagedKey, PenstockError
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.explain.servers import PartitionsAway
from penstock_common.explain.snapshot import StreamSnapshot
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import count_entries
from penstock_common.stream.manifest import begun_shards, find_manifest
from penstock_common.stream.mending.bad import kinds_of_bad
from penstock_common.stream.payloads import PayloadStorage, plane_of
from penstock_common.stream.streams import Stream, load_stream, look_at_each, read_counters


@dataclass(frozen=True, slots=True)
class EpochDetails:
    """The shards, entries and bad samples of one retained epoch."""

    shards_done: int
    shards: int
    entries: int
    reasons: list[dict[str, Any]]
    """The most frequent reasons of bad samples: `kinds_of_bad`."""


@dataclass(frozen=True, slots=True)
class StreamDetails:
    """One stream, its snapshot, and the details of its epochs."""

    stream: Stream
    snapshot: StreamSnapshot
    released: str
    """The ranges of epochs that are gone."""
    payload: PayloadStorage
    epochs: dict[int, EpochDetails]
    """Epoch -> details, for the epochs of the snapshot that are still retained."""


def read_all_details(client: Client, names: Iterable[str]) -> tuple[list[StreamDetails], dict[str, PenstockError]]:
    """Return these streams, and name -> error for those that are damaged, or have partitions on a silent server."""
    return look_at_each(names, lambda name: read_details(client, name), (DamagedKey, PartitionsAway))


def read_details(client: Client, name: str) -> StreamDetails:
    """Return one stream with its details. Raises StreamNotFound."""
    snapshot = StreamMonitor(client, name).snapshot()
    stream = load_stream(client, name)
    epochs = {}
    for seen in snapshot.epochs:
        manifest = find_manifest(client, stream, seen.epoch)
        if manifest is not None:
            epochs[seen.epoch] = EpochDetails(
                shards_done=len(manifest.done),
                shards=len(begun_shards(client, stream, manifest)),
                entries=count_entries(client, stream, seen.epoch),
                reasons=kinds_of_bad(client, stream, seen.epoch) if seen.bad else [],
            )
    _, _, released = read_counters(client, stream)
    return StreamDetails(stream, snapshot, released, plane_of(stream), epochs)
