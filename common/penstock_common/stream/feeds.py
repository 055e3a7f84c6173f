"""Feeds: epochs without a plan, whose writers take shards as they come.

The first writer that rotates seals the epoch, and the last one that finishes sizes it. `close_epoch` lets an operator
end an epoch as it is. ``manifest`` has planned epochs.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import NamedTuple

from penstock_common.errors import EpochAbandoned
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.entries import index_ends, said_ages, shard_ages
from penstock_common.stream.manifest import (
    ABANDONED,
    OPEN,
    EpochNumberTaken,
    Manifest,
    UnreplicatedWrites,
    begin_next_epoch,
    begun_shards,
    change_manifest,
    find_manifest,
    load_manifest,
    open_epoch,
    retained_epochs,
)
from penstock_common.stream.streams import Stream, read_counters

_CLOSE_AS_COMMITTED = load_script("close_as_committed")
_FINISH_FEED_SHARD = load_script("finish_feed_shard")
_RETAKE_SHARD = load_script("retake_shard")
_TAKE_SHARD = load_script("take_shard")

FEED = "feed"


class FeedShard(NamedTuple):
    """A shard of a feed that a writer took."""

    manifest: Manifest
    shard: int
    token: str
    """A random token. The manifest maps it to the shard, and each index record of the writer repeats it."""


def join_feed(client: Client, stream: Stream) -> FeedShard:
    """Take a shard of an open, unsealed epoch of the feed. Opens the next epoch if there is none."""
    following = read_counters(client, stream)[0]  # before the look: what is opened later has a higher number
    for epoch, state in retained_epochs(client, stream).items():
        if state != OPEN:
            continue
        manifest = find_manifest(client, stream, epoch)
        if manifest is not None and manifest.kind == FEED:
            manifest = open_epoch(client, stream, epoch, kind=FEED)  # its opener may have died half-way
            if (taken := _take_shard(client, stream, manifest)) is not None:
                return taken
    begun = begin_next_epoch(client, stream, following, FEED)  # None if another writer of the feed was faster
    if begun is not None:
        with suppress(EpochNumberTaken):
            opened = open_epoch(client, stream, following, kind=FEED, again=begun)
            if (taken := _take_shard(client, stream, opened)) is not None:
                return taken
    return join_feed(client, stream)


def _take_shard(client: Client, stream: Stream, manifest: Manifest) -> FeedShard | None:
    """Take the next shard of an open epoch, or return None once it is sealed.

    A call that is repeated after a lost reply gets the same shard: one without a writer would keep the epoch open.
    """
    token = secrets.token_hex(6)
    shard = int(run_script(client, _TAKE_SHARD, [stream.keys.manifest(manifest.epoch)], [token, manifest.id]))
    return FeedShard(manifest, shard, token) if shard >= 0 else None


def retake_shard(client: Client, stream: Stream, manifest: Manifest, shard: int, token: str) -> bool:
    """Register a writer's shard again at a server that may have come back with an older state.

    Without this the epoch would be completed without the shard. If another writer has taken the number since, the first
    to commit keeps it.

    Returns:
        False if the epoch no longer takes the shard.
    """
    keys = [stream.keys.manifest(manifest.epoch)]
    return bool(run_script(client, _RETAKE_SHARD, keys, [manifest.id, token, shard]))


def is_sealed(client: Client, stream: Stream, epoch: int) -> bool:
    """Return whether the epoch's writers should finish their shards and go on to the next epoch."""
    return bool(client.hexists(stream.keys.manifest(epoch), "sealed"))


def finish_feed_shard(
    client: Client,
    stream: Stream,
    manifest: Manifest,
    shard: int,
    size: int,
    unreplicated: UnreplicatedWrites | None = None,
) -> None:
    """End a writer's shard and seal the epoch, which is produced once all its writers have done so.

    ``unreplicated`` is as in `finish_shard`.
    """
    change_manifest(client, stream, _FINISH_FEED_SHARD, manifest, [shard, size, *(unreplicated or ())])


def said_open_shards(client: Client, stream: Stream, manifest: Manifest) -> str:
    """Return the shards that their writers have not ended, with their ages, or '' if there is none."""
    left = [shard for shard in begun_shards(client, stream, manifest) if shard not in manifest.done]
    return said_ages(shard_ages(client, stream, manifest.epoch, left))


def close_epoch(client: Client, stream: Stream, epoch: int) -> int:
    """Declare an epoch produced as it is, after its producers died, and return its number of samples.

    Shards are sized by what is committed. Raises EpochAbandoned.
    """
    manifest = load_manifest(client, stream, epoch)
    if manifest.state == ABANDONED:
        raise EpochAbandoned(f"epoch {epoch} of {stream.name!r} is abandoned; there is nothing to close")
    if manifest.is_ended:
        return manifest.samples or 0
    manifest = open_epoch(client, stream, epoch, kind=manifest.kind)  # its opener may have died half-way
    sizes = list(index_ends(client, stream, epoch, begun_shards(client, stream, manifest)).values())
    change_manifest(client, stream, _CLOSE_AS_COMMITTED, manifest, [stream.id, *sizes], keys=[stream.keys.meta])
    return sum(sizes)
