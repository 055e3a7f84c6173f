"""How far a production is: values only, read from manifests, shard indexes and quarantine.

Who shows them is the command's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_ends
from penstock_common.stream.manifest import Manifest, begun_shards
from penstock_common.stream.mending.bad import read_reason
from penstock_common.stream.streams import Stream
from penstock_common.stream.watching.inspection import held_bytes

RUNNING_SHARDS = 64
"""Jobs run in order, so those begun are among the first unfinished ones; looking at more costs and shows nothing."""


@dataclass(frozen=True)
class EpochProgress:
    """One epoch."""

    epoch: int
    state: str
    samples: int | None
    """Planned; None while nobody knows."""
    done: int = 0
    """Committed, bad ones included."""
    bad: int = 0
    sample_bytes: float = 0.0
    """Payload of a good sample on average; 0 while it is not known."""

    @property
    def nbytes(self) -> int:
        """Payload bytes committed, about."""
        return round((self.done - self.bad) * self.sample_bytes)


@dataclass(frozen=True)
class Progress:
    """The whole production at one moment."""

    epochs: tuple[EpochProgress, ...]
    """Those begun, in order."""
    samples: int | None
    """Planned over all epochs."""
    waits: str = ""
    """Why nothing moves, if nothing does."""
    pids: tuple[int, ...] = ()
    """Local workers alive."""
    new_bad: tuple[str, ...] = ()
    """Reasons of bad samples that were found since the last look, a few of them."""
    workers: int = 0
    """Listening to the queue, wherever they are."""
    waiting: int = 0
    """Writers of the stream that wait for room."""

    @property
    def done(self) -> int:
        """Samples committed, bad ones included."""
        return sum(epoch.done for epoch in self.epochs)

    @property
    def bad(self) -> int:
        """Samples that could not be made."""
        return sum(epoch.bad for epoch in self.epochs)


@dataclass(frozen=True)
class Summary:
    """What a finished production made."""

    stream: str
    epochs: tuple[int, ...]
    samples: int
    """Bad ones included."""
    bad: int
    nbytes: int
    seconds: float
    workers: tuple[str, ...] = field(default=())
    """Names of the worker processes that took part."""


def look(client: Client, stream: Stream, manifest: Manifest, before: EpochProgress | None = None) -> EpochProgress:
    """How far an epoch is; ``before``, the look before this, knows what a sample weighs where some went since."""
    held = held_bytes(client, stream, manifest.epoch)
    done = sum(manifest.done.values())
    running = [s for s in begun_shards(client, stream, manifest) if s not in manifest.done][:RUNNING_SHARDS]
    for partition in stream.partitions:
        mine = [shard for shard in running if stream.partition_of(shard) == partition]
        done += sum(index_ends(client, partition, manifest.epoch, mine).values()) if mine else 0
    bad = sum(int(client.hlen(partition.quarantine(manifest.epoch))) for partition in stream.partitions)
    # held was asked first: it is no more than what was made, and less once retention removes some of it
    weight = held / (done - bad) if done > bad else 0.0
    sample_bytes = max(weight, before.sample_bytes if before is not None else 0.0)
    return EpochProgress(manifest.epoch, manifest.state, manifest.samples, done, bad, sample_bytes)


def bad_reasons(client: Client, stream: Stream, epoch: int, limit: int) -> list[str]:
    """Why some samples of an epoch could not be made."""
    reasons: list[str] = []
    for partition in stream.partitions:
        for _, value in client.hscan_iter(partition.quarantine(epoch), count=limit):
            reasons.append(read_reason(value))
            if len(reasons) == limit:
                return reasons
    return reasons
