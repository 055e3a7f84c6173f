"""Whose turn it is: the last quarter of a budget is for the lowest unfinished shard of the oldest unfinished epoch.

What one writer knows of it is remembered, since each of many small shards asks. What follows from it is ``room``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import (
    ABANDONED,
    PRODUCED,
    Manifest,
    begun_shards,
    find_manifest,
    first_unfinished,
    retained_epochs,
)
from penstock_common.stream.streams import Stream

LOOK_EVERY_S = 0.1
"""How often it is asked, at most, which epochs there are, and whether a shard that was not next is next now."""
EPOCHS_KNOWN = 1000
"""Times partitions, of which it is remembered up to where they are complete."""


def unfinished_shards(
    client: Client, stream: Stream, upto: int, states: dict[int, str] | None = None
) -> Iterator[tuple[Manifest, int]]:
    """The begun or planned shards of the epochs up to that one that are not complete, in the order room is given.

    ``states`` are the epochs' as they were a moment ago; None asks.
    """
    for epoch, state in (retained_epochs(client, stream) if states is None else states).items():
        if epoch > upto:
            return
        manifest = None if state in (PRODUCED, ABANDONED) else find_manifest(client, stream, epoch)
        if manifest is not None:
            yield from ((manifest, s) for s in begun_shards(client, stream, manifest) if s not in manifest.done)


class Turns:
    """As one writer sees them."""

    def __init__(self, client: Client, stream: Stream, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._stream, self._clock = client, stream, clock
        self._complete: dict[tuple[int, int], int] = {}
        """Epoch and number of a partition -> a shard there before which all are complete: they stay so."""
        self._states: dict[int, str] = {}
        """Of the epochs that there were when it was asked."""
        self._asked_s = -LOOK_EVERY_S

    def is_next(self, epoch: int, shard: int) -> bool:
        """Whether no earlier shard of its partition, in this or an older epoch, is unfinished."""
        partition = self._stream.partition_of(shard)
        if any(self._stream.partition_of(older) == partition for older in self._older(epoch)):
            return False
        earlier = range(self._first_open(epoch, shard), shard, len(self._stream.partitions))
        first = first_unfinished(self._client, self._stream, epoch, earlier)
        self._note(epoch, shard if first is None else first)
        return first is None

    def end(self, epoch: int, shard: int) -> None:
        """The shard was completed by this writer."""
        if self._first_open(epoch, shard) == shard:
            self._note(epoch, shard + len(self._stream.partitions))

    def _older(self, epoch: int) -> Iterator[int]:
        if self._clock() - self._asked_s >= LOOK_EVERY_S:
            self._states, self._asked_s = retained_epochs(self._client, self._stream), self._clock()
        return (shard for _, shard in unfinished_shards(self._client, self._stream, epoch - 1, self._states))

    def _first_open(self, epoch: int, shard: int) -> int:
        """Of the shard's partition: those before it are known to be complete."""
        number = self._stream.partition_of(shard).number
        return self._complete.get((epoch, number), number)

    def _note(self, epoch: int, shard: int) -> None:
        place = epoch, self._stream.partition_of(shard).number
        if place not in self._complete and len(self._complete) >= EPOCHS_KNOWN:
            self._complete.clear()
        self._complete[place] = shard
