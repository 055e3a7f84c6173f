"""Releasing an epoch: its state first, in every partition, so that nothing late slips in; then its keys by UNLINK.

Which epochs may go is the producer's retention plan; the operator's `penstock delete` goes the same way.
"""

from __future__ import annotations

from redis.exceptions import WatchError

from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.link.commands import Client, run_script
from penstock_common.stream.lua.epochs import RETIRE
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest
from penstock_common.stream.ranges import add_to_ranges
from penstock_common.stream.streams import Stream

CHUNK = 512


def release_epoch(client: Client, stream: Stream, epoch: int, generation: str = "") -> bool:
    """Sets the epoch's state to gone and removes it; False if the roster is no longer of that generation."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        return False
    for partition in stream.partitions:
        if not retire_epoch(client, partition, epoch, manifest.id, generation):
            return False
        generation = ""  # the first partition's word is enough; a half retired epoch must go on
    unlink_epoch(client, stream, epoch, manifest.id)
    return True


def retire_epoch(client: Client, partition: PartitionKeys, epoch: int, manifest_id: str, generation: str = "") -> bool:
    """First step, in one partition: nothing is written or acknowledged any more. False if the roster has changed."""
    keys = [partition.roster, partition.state(epoch)]
    return int(run_script(client, RETIRE, keys, [generation, epoch, manifest_id])) >= 0


def unlink_epoch(client: Client, stream: Stream, epoch: int, manifest_id: str) -> None:
    """Second step of a release, also for one that was begun by someone who died, in whichever partition he was."""
    manifest = find_manifest(client, stream, epoch)
    ours = manifest if manifest is not None and manifest.id == manifest_id else None
    for partition in stream.partitions:
        retire_epoch(client, partition, epoch, manifest_id)
        _unlink(client, _keys_of(client, stream, partition, epoch, ours))
    if ours is not None:
        _remember_released(client, stream, epoch)
        client.hdel(stream.keys.epochs, str(epoch))
        _unlink(client, [stream.keys.manifest(epoch)])
    for partition in stream.partitions:
        client.hdel(partition.roster, f"x:{epoch}")


def _remember_released(client: Client, stream: Stream, epoch: int) -> None:
    """Adds one number to the ranges in meta, also when others do so at the same time."""
    while True:
        try:
            _add_released(client, stream, epoch)
            return
        except WatchError:  # others did, or the connection broke: looked at anew it is right in any case
            continue


def _add_released(client: Client, stream: Stream, epoch: int) -> None:
    """Raises WatchError where it has to be done again."""
    with client.pipeline() as pipe:
        pipe.watch(stream.keys.meta)
        stream_id, released = pipe.hmget(stream.keys.meta, "id", "released")
        if stream_id != stream.id.encode():
            return  # deleted meanwhile: its meta must not come back
        pipe.multi()
        pipe.hset(stream.keys.meta, "released", add_to_ranges((released or b"").decode(), epoch))
        pipe.execute()


def _keys_of(
    client: Client, stream: Stream, partition: PartitionKeys, epoch: int, manifest: Manifest | None
) -> list[str]:
    groups = list(load_roster(client, partition).groups)
    shards = begun_shards(client, stream, manifest) if manifest else range(0)
    keys = [partition.entries(epoch), partition.segments(epoch), partition.quarantine(epoch)]
    for shard in shards:
        if stream.partition_of(shard) == partition:
            keys += [partition.index(epoch, shard), partition.repairs(epoch, shard)]
            keys += [partition.ledger(epoch, group, shard) for group in groups]
    for group in groups:
        keys += [partition.dead(epoch, group), partition.positions(epoch, group)]
    return [*keys, partition.state(epoch)]


def _unlink(client: Client, keys: list[str]) -> None:
    for start in range(0, len(keys), CHUNK):
        client.unlink(*keys[start : start + CHUNK])
