"""Makes room: carries out retention's plans on one partition, by ids alone. Any number may run at once.

Every step may be repeated: XDEL says what it really removed, a begun release is finished by whoever finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from penstock_common.stream.commands import Client
from penstock_common.stream.entries import Record, index_ends, index_records, trim_entries
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.ledger import group_bits
from penstock_common.stream.manifest import Manifest, begun_shards, ended_ms, find_manifest, retained_epochs
from penstock_common.stream.release import release_epoch, unlink_epoch
from penstock_common.stream.roster import Roster, expire_silent, load_roster, server_ms
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify
from penstock_producer.retention import EpochFacts, is_replayed, plan_release, plan_trim, trimming_groups

SLACK_SHARE = 0.1
"""How much more than needed is freed at once, so that a full budget is not planned for at every block."""
SILENT_MS = 600_000
"""An undeclared group that vanished stops holding data after this long (design.md 5.6)."""
EXPIRE_EVERY_S = 10.0
CHUNK = 250
"""Ids per script call: bounds how long the server is busy with one."""


class Janitor:
    """Frees bytes of one partition of a stream."""

    def __init__(
        self,
        client: Client,
        stream: Stream,
        partition: PartitionKeys,
        notify: Notify,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify, self._clock, self._expired_s = notify, clock, -EXPIRE_EVERY_S
        self._client = client
        self._stream = stream
        self._partition = partition
        self._floors: dict[tuple[int, int], int] = {}
        """(epoch, shard) -> offset below which everything is known to be gone."""

    def make_room(self, need_bytes: int) -> int:
        """Tries to free that many payload bytes and a little more; returns what was freed."""
        self._expire()
        roster = load_roster(self._client, self._partition)
        # groups join the first partition first, so its roster says what is settled, and its generation who has joined
        first = load_roster(self._client, self._stream.partitions[0])
        need = need_bytes + int(self._stream.partition_budget * SLACK_SHARE)
        now_ms = server_ms(self._client)
        states = retained_epochs(self._client, self._stream)
        for epoch, manifest_id in {**roster.retiring, **first.retiring}.items():
            unlink_epoch(self._client, self._stream, epoch, manifest_id)
        facts = [EpochFacts(e, states.get(e, "abandoned"), roster.epoch_bytes.get(e, 0)) for e in roster.epochs]
        freed = 0
        for epoch in plan_release(facts, first, now_ms, need):
            if release_epoch(self._client, self._stream, epoch, first.generation):
                freed += roster.epoch_bytes.get(epoch, 0)
        for epoch in roster.epochs:
            if freed >= need:
                break
            if not is_replayed(roster, epoch, now_ms):
                freed += self._trim(roster, epoch, need - freed)
        return freed

    def _expire(self) -> None:
        """Now and then: lets go what vanished trainers held."""
        if self._clock() - self._expired_s < EXPIRE_EVERY_S:
            return
        self._expired_s = self._clock()
        for group in expire_silent(self._client, self._partition, SILENT_MS):
            self._notify(f"group {group!r} was not seen for {SILENT_MS // 60_000} minutes: nothing is kept for it now")

    def _trim(self, roster: Roster, epoch: int, need: int) -> int:
        """Removes entries of one epoch that every group has settled."""
        groups = trimming_groups(roster, epoch)
        manifest = find_manifest(self._client, self._stream, epoch)
        if not groups or manifest is None:
            return 0
        mine = [
            s
            for s in begun_shards(self._client, self._stream, manifest)
            if self._stream.partition_of(s) == self._partition
        ]
        freed = 0
        for shard, end in index_ends(self._client, self._partition, epoch, mine).items():
            if freed >= need or self._floors.get((epoch, shard), 0) >= end:
                continue
            freed += self._trim_shard(roster, groups, (epoch, shard), end, need - freed)
        return freed

    def _trim_shard(self, roster: Roster, groups: list[str], of: tuple[int, int], end: int, need: int) -> int:
        """Removes settled entries of one shard, in pages as far as anything is settled."""
        of = (manifest.epoch, shard)
        floor = self._floors.get(of, 0)
        bits = [
            group_bits(
                self._client, self._partition, manifest, group, roster.groups[group], shard, floor, end, may_go=True
            )
            for group in groups
        ]
        settled = np.flatnonzero(np.logical_and.reduce(bits))
        if not len(settled):
            return 0
        # an entry that ends later is not settled, or ends in holes and waits for the next look
        upto = floor + int(settled[-1]) + 1
        freed, base, is_unbroken = 0, floor, True
        for page in _pages(index_records(self._client, self._partition, *of, after=floor, upto=upto)):
            plan = plan_trim(page, bits, need - freed, base)
            freed += self._drop(roster, of[0], plan)
            dropped = {record.end for record in plan}
            for record in page:
                is_unbroken = is_unbroken and (not record.entry_id or record.end in dropped)
                floor = record.end if is_unbroken else floor
            if freed >= need:
                break
        self._floors[of] = floor
        return freed

    def _drop(self, roster: Roster, epoch: int, plan: list[Record]) -> int:
        if not plan:
            return 0
        return trim_entries(self._client, self._partition, roster.generation, epoch, plan)


def _pages(records: Iterator[Record]) -> Iterator[list[Record]]:
    while page := list(islice(records, CHUNK)):
        yield page
