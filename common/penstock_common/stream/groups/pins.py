"""Pins: an operator's mark that keeps an epoch whatever retention says. It is a field of every partition's roster.

The producer plans what a pin keeps. The roster has the lease of a replay.
"""

from __future__ import annotations

from penstock_common.errors import ReplayTruncated
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.streams import Stream

_PIN_EPOCH = load_script("pin_epoch")


def pin_epoch(client: Client, stream: Stream, epoch: int) -> bool:
    """Keep the epoch from release and trimming until it is unpinned. False if it was pinned before.

    Raises EpochNotFound, and ReplayTruncated if retention already removed entries of it, so that the epoch is no longer
    complete.
    """
    load_manifest(client, stream, epoch)
    made: list[PartitionKeys] = []
    for partition in stream.partitions:
        answer: bytes = run_script(client, _PIN_EPOCH, [partition.roster], [epoch])
        if answer in (b"gone", b"trimmed"):
            for one in made:
                client.hdel(one.roster, f"p:{epoch}")
            done = "released" if answer == b"gone" else "trimmed"
            raise ReplayTruncated(
                f"epoch {epoch} of {stream.name!r} is {done} already, so there is nothing whole to pin; pin an epoch "
                "before every group has read it, or while there is room"
            )
        if answer == b"pinned":
            made.append(partition)
    return bool(made)


def unpin_epoch(client: Client, stream: Stream, epoch: int) -> bool:
    """Leave the epoch to retention again. Returns whether it was pinned."""
    load_manifest(client, stream, epoch)
    return sum(int(client.hdel(partition.roster, f"p:{epoch}")) for partition in stream.partitions) > 0
