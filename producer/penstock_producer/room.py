"""Room for one shard: asks the pure rule, lets the janitor free what may go, and knows the sentence for a wait."""

from __future__ import annotations

import time
from collections import Counter

from penstock_common.errors import TooLarge
from penstock_common.stream.commands import Client
from penstock_common.stream.ledger import owed_samples
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest, retained_epochs
from penstock_common.stream.roster import Roster, load_roster
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify
from penstock_producer.backpressure import Room, largest_block, reason_to_wait
from penstock_producer.janitor import Janitor
from penstock_producer.retention import owing_groups

LOOK_EVERY_S = 0.1


class RoomKeeper:
    """Decides for one shard whether its next block may be written."""

    def __init__(self, client: Client, stream: Stream, manifest: Manifest, shard: int, notify: Notify) -> None:
        self._client, self._stream, self._manifest, self._shard = client, stream, manifest, shard
        self._partition = stream.partition_of(shard)
        self._janitor = Janitor(client, stream, self._partition, notify)
        self._room = Room(0, 0, stream.partition_budget, False)
        self.server_is_full = False
        """Set when the server refused a write at its maxmemory: then one more round of waiting comes first."""
        self._was_refused = False
        self._is_next_now, self._looked_s = False, -LOOK_EVERY_S

    def has_room(self, block_bytes: int, held_bytes: int) -> bool:
        """Whether the block may go; frees what may be freed before it says no."""
        budget = self._stream.partition_budget
        if block_bytes > largest_block(budget):
            raise TooLarge(
                f"a block of {block_bytes} bytes does not fit a quarter of the budget of {budget} bytes a partition of "
                f"{self._stream.name!r}: raise budget_bytes, or write smaller samples"
            )
        self._room = Room(held_bytes, block_bytes, budget, False)
        if self._room.is_enough and not self.server_is_full:
            return True
        self._room = Room(held_bytes, block_bytes, budget, self._is_next())
        if self._room.is_enough and not self.server_is_full:
            return True
        freed = self._janitor.make_room(max(self._room.missing_bytes, block_bytes))
        self._was_refused = self.server_is_full
        if self.server_is_full:
            self.server_is_full = False
            return False
        self._room = Room(held_bytes - freed, block_bytes, budget, self._room.is_next)
        return self._room.is_enough

    def _is_next(self) -> bool:
        """Whether this shard is the one the reserve is for: asked now and then, since every block wants to know.

        Once it is, it stays so until it is done: epochs and shards only rise.
        """
        now = time.monotonic()
        if not self._is_next_now and now - self._looked_s >= LOOK_EVERY_S:
            self._is_next_now, self._looked_s = self._is_lowest(), now
        return self._is_next_now

    def _is_lowest(self) -> bool:
        """Whether no earlier shard of this partition, in this or an older epoch, is unfinished."""
        for epoch, state in retained_epochs(self._client, self._stream).items():
            if epoch > self._manifest.epoch:
                break
            if state in ("produced", "abandoned"):
                continue
            manifest = find_manifest(self._client, self._stream, epoch)
            if manifest is None:
                continue
            for shard in begun_shards(self._client, self._stream, manifest):
                if self._stream.partition_of(shard) == self._partition and shard not in manifest.done:
                    return epoch == self._manifest.epoch and shard == self._shard
        return True

    def why(self) -> str:
        """For what the shard waits, and what helps."""
        if self._was_refused:
            return (
                "the server is at its maxmemory, though the budget of "
                f"{self._stream.name!r} is not used up: remove other keys, or raise maxmemory"
            )
        roster = load_roster(self._client, self._partition)
        return reason_to_wait(self._stream.name, self._room, self._blockers(roster), bool(roster.groups))

    def _blockers(self, roster: Roster) -> list[str]:
        """The groups that owe most of what is held; one that owes less than half as much holds up nobody."""
        owed: Counter[str] = Counter()
        for epoch in roster.epochs:
            manifest = find_manifest(self._client, self._stream, epoch)
            if manifest is not None:
                owed.update(owed_samples(self._client, self._stream, manifest, owing_groups(roster, epoch)))
        most = max(owed.values(), default=0)
        return sorted(group for group, count in owed.items() if count > 0 and count > most / 2)
