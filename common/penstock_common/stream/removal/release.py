"""The release of an epoch: first its state, in every partition, so that nothing late enters; then its keys by UNLINK.

The producer's retention plan decides which epochs may go. The operator's `penstock delete` works the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redis.exceptions import WatchError

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Call, Client, run_script, run_scripts
from penstock_common.stream.groups.losses import forget_losses
from penstock_common.stream.groups.roster import fetch_rosters
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import begun_shards, find_manifest
from penstock_common.stream.ranges import add_to_ranges
from penstock_common.stream.streams import Stream

_RETIRE_EPOCH = load_script("retire_epoch")

CHUNK = 512
"""Keys in one UNLINK."""


def release_epoch(client: Client, stream: Stream, epoch: int, generation: str = "") -> bool:
    """Set the epoch's state to gone and remove it. False if the roster is no longer of that generation."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        return False
    if not retire_epoch(client, stream.partitions[0], epoch, manifest.id, generation):
        return False
    unlink_epoch(client, stream, epoch, manifest.id)  # its answer is enough: a half retired epoch must be completed
    return True


def retire_epoch(client: Client, partition: PartitionKeys, epoch: int, manifest_id: str, generation: str = "") -> bool:
    """Do the first step in one partition: nothing is written or acknowledged any more. False if the roster changed."""
    keys = [partition.roster, partition.state(epoch)]
    return int(run_script(client, _RETIRE_EPOCH, keys, [generation, epoch, manifest_id])) >= 0


def unlink_epoch(client: Client, stream: Stream, epoch: int, manifest_id: str) -> None:
    """Do the second step of a release, also of one that a dead process began, in whichever partition it was."""
    manifest = find_manifest(client, stream, epoch)
    ours = manifest if manifest is not None and manifest.id == manifest_id else None
    calls: list[Call] = [([p.roster, p.state(epoch)], ["", epoch, manifest_id]) for p in stream.partitions]
    run_scripts(client, _RETIRE_EPOCH, calls)
    shards = begun_shards(client, stream, ours) if ours is not None else range(0)
    _, told = fetch_rosters(client, stream)
    with client.pipeline(transaction=False) as pipe:
        for partition, reply in zip(stream.partitions, told, strict=True):
            groups = [name[2:].decode() for name in reply if name[:2] == b"g:"]
            _unlink(pipe, _keys_of(stream, partition, epoch, groups, shards))
        pipe.execute()
    if ours is not None:
        _remember_released(client, stream, epoch)
        forget_losses(client, stream, epoch)
        client.hdel(stream.keys.epochs, str(epoch))
        client.unlink(stream.keys.manifest(epoch))
    with client.pipeline(transaction=False) as pipe:
        for partition in stream.partitions:
            pipe.hdel(partition.roster, f"x:{epoch}")
        pipe.execute()


def _remember_released(client: Client, stream: Stream, epoch: int) -> None:
    """Add one number to the ranges in meta, also while other processes do so."""
    while True:
        try:
            _add_released(client, stream, epoch)
            return
        except WatchError:  # another process did, or the connection broke: the next try is right in both cases
            continue


def _add_released(client: Client, stream: Stream, epoch: int) -> None:
    """Add the number once. Raises WatchError if it has to be tried again."""
    with client.pipeline() as pipe:
        pipe.watch(stream.keys.meta)
        stream_id, released = pipe.hmget(stream.keys.meta, "id", "released")
        if stream_id != stream.id.encode():
            return  # deleted since: its meta must not come back
        pipe.multi()
        pipe.hset(stream.keys.meta, "released", add_to_ranges((released or b"").decode(), epoch))
        pipe.execute()


def _keys_of(
    stream: Stream, partition: PartitionKeys, epoch: int, groups: Sequence[str], shards: Iterable[int]
) -> list[str]:
    keys = [partition.entries(epoch), partition.segments(epoch), partition.quarantine(epoch)]
    for shard in shards:
        if stream.partition_of(shard) == partition:
            keys += [partition.index(epoch, shard), partition.repairs(epoch, shard)]
            keys += [partition.ledger(epoch, group, shard) for group in groups]
    for group in groups:
        keys += [partition.dead(epoch, group), partition.positions(epoch, group)]
    return [*keys, partition.state(epoch)]


def _unlink(pipe: Client, keys: list[str]) -> None:
    for start in range(0, len(keys), CHUNK):
        pipe.unlink(*keys[start : start + CHUNK])
