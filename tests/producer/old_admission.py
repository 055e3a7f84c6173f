"""The decision about space as it was before it became a rule; the new one must agree with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from penstock_common.errors import PenstockError, TooLarge
from penstock_common.segments.plane import INLINE
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.ledger import owed_samples
from penstock_common.stream.groups.missing import missing_members, told_missing
from penstock_common.stream.groups.roster import Roster, load_roster, server_ms
from penstock_common.stream.manifest import Manifest, find_manifest
from penstock_common.stream.servers.suitability import largest_block, readable_bytes
from penstock_common.stream.streams import Stream
from penstock_common.stream.watching.waiters import RENEW_S, Why, end_wait, note_wait
from penstock_producer.write.alarm import explain_holds, idle_groups
from penstock_producer.write.cleaner import SILENT_MS
from penstock_producer.write.quota import LOOK_EVERY_S, QuotaState, explain_memory, explain_quota, pause_s
from penstock_producer.write.resources import SharedResources
from penstock_producer.write.retention import pending_groups

NOTE_AFTER_S = 0.5
"""A wait this long is noted on the roster; shorter ones are the ordinary course of a full budget."""


class OldAdmissionControl:
    """Decides for one shard whether its next block may be written."""

    def __init__(
        self,
        client: Client,
        stream: Stream,
        manifest: Manifest,
        shard: int,
        clock: Callable[[], float],
        resources: SharedResources,
    ) -> None:
        self._client, self._stream, self._manifest, self._shard = client, stream, manifest, shard
        self._partition = stream.partition_of(shard)
        self._cleaner, self._server_memory = resources.cleaners.of(shard), resources.server_memory
        self._order, self._clock = resources.order, clock
        self._share_of = self._partition.number if len(stream.partitions) > 1 else None
        self._state = QuotaState(0, 0, stream.partition_budget, False, partition=self._share_of)
        self.server_is_full = False
        """Set when the server refused a write at its maxmemory: then one more round of waiting comes first."""
        self.full_folder = ""
        """Set when a folder of segments had no room: the same."""
        self._was_refused = False
        self._refused_s: float | None = None
        """Since when server or folder have refused one try after another: each try looks like an end of the wait."""
        self._tries = False
        self._closed_s: float | None = None
        """Since when there is no room; until the low mark is reached, or the rule gives way."""
        self._last_wait_s = 0.0
        self._lacking_folder = ""
        self._noted_s: float | None = None
        self._is_next_now, self._looked_s = False, -LOOK_EVERY_S
        self._freed = 0
        """For the block that went last: the writer learns of it with that block's answer."""

    def admit(self, block_bytes: int, held_bytes: int) -> bool:
        """Whether the block may go; frees what may be freed before it says no."""
        if block_bytes > largest_block(self._stream.partition_budget):
            raise TooLarge(
                f"a block of {readable_bytes(block_bytes)} does not fit a quarter of the budget of "
                f"{readable_bytes(self._stream.partition_budget)} a partition of {self._stream.name!r}: "
                "raise budget_bytes, or write smaller samples"
            )
        self._freed = 0
        was_tried = self.server_is_full or self._refused_s is not None
        is_out = was_tried and self._server_memory.is_used_up()  # it would refuse the next try as well
        is_refused, self.server_is_full = is_out or self.server_is_full or bool(self.full_folder), False
        self._lacking_folder, self.full_folder = self.full_folder, ""
        self._was_refused = is_refused
        if is_refused and self._refused_s is None:
            self._refused_s = self._clock()
        elif self._tries and not is_refused:
            self._refused_s = None  # the last try went well
        self._tries = False
        if self._is_enough(block_bytes, held_bytes) and not is_refused:
            return self._go_on(block_bytes)
        self._closed_s = self._clock() if self._closed_s is None else self._closed_s
        self._freed = freed = self._cleaner.free_bytes(max(self._state.missing_bytes, block_bytes))
        if not is_refused and freed and self._is_enough(block_bytes, held_bytes - freed):
            return self._go_on(block_bytes)
        self._note()
        return False

    def admit_next(self, block_bytes: int, held_bytes: int) -> bool:
        """Whether the block may go at once, by what is known: nothing is waited for, and nothing has to be freed.

        ``held_bytes``: as known before the one before it went, and that one.
        """
        is_hindered = self._waited_s is not None or self.server_is_full or bool(self.full_folder)
        is_fitting = block_bytes <= largest_block(self._stream.partition_budget)
        if is_hindered or not is_fitting or not self._is_enough(block_bytes, held_bytes - self._freed):
            return False
        self._freed = 0
        return self._go_on(block_bytes)

    def pause_s(self) -> float:
        """How long to wait before it is worth asking again."""
        return pause_s(self._waited_s or 0.0, self._last_wait_s)

    def end_wait(self) -> None:
        """The wait is over, whether it led to anything or not."""
        if self._noted_s is not None:
            self._noted_s = None
            with suppress(PenstockError):  # a note that stays is soon stale
                end_wait(self._client, self._partition, self._manifest.epoch, self._shard)

    @property
    def _waited_s(self) -> float | None:
        began = [at for at in (self._closed_s, self._refused_s) if at is not None]
        return self._clock() - min(began) if began else None

    def _is_enough(self, block_bytes: int, held_bytes: int) -> bool:
        """Asks the rule; whether the shard is next only if it matters."""
        waited_s = self._waited_s
        is_inline = self._stream.payload == INLINE  # payloads in segments take no memory of the server's
        left = self._server_memory.left_bytes(block_bytes, anew=waited_s is not None) if is_inline else None
        for is_next in (self._is_next_now, True):
            if is_next and not self._is_next():
                break
            self._state = QuotaState(
                held_bytes,
                block_bytes,
                self._stream.partition_budget,
                is_next,
                waited_s=waited_s,
                left_bytes=left,
                partition=self._share_of,
            )
            if self._state.is_enough:
                return True
        return False

    def _go_on(self, block_bytes: int) -> bool:
        if (waited := self._waited_s) is not None:
            self._closed_s, self._last_wait_s = None, waited
        self._tries = True
        self._server_memory.spend(block_bytes)
        return True

    def _note(self) -> None:
        """Says on the roster that this writer waits: at first after a moment, then every second."""
        waited, now = self._waited_s or 0.0, self._clock()
        if waited < NOTE_AFTER_S or (self._noted_s is not None and now - self._noted_s < RENEW_S):
            return
        self._noted_s = now
        note_wait(
            self._client, self._partition, self._manifest.epoch, self._shard, waited_s=waited,
            need_bytes=self._state.block_bytes, held_bytes=self._state.held_bytes,
            why=self._lacking, is_next=self._is_next(),  # server or folder may have refused before the rule asked that
        )  # fmt: skip

    def _is_next(self) -> bool:
        """Whether this shard is the one the reserve is for: asked now and then, since every block wants to know.

        Once it is, it stays so until it is done: epochs and shards only rise.
        """
        now = self._clock()
        if not self._is_next_now and now - self._looked_s >= LOOK_EVERY_S:
            self._is_next_now, self._looked_s = self._order.is_next(self._manifest.epoch, self._shard), now
        return self._is_next_now

    @property
    def _lacking(self) -> Why:
        if self._lacking_folder:
            return "folder"
        return "memory" if self._is_memory_short else "budget"

    @property
    def _is_memory_short(self) -> bool:
        return self._was_refused or self._state.is_memory_short

    def why(self) -> str:
        """For what the shard waits, and what helps."""
        if self._lacking_folder:
            return (
                f"there is no space left in {self._lacking_folder} for segments of {self._stream.name!r}: free some, "
                "or give the stream a smaller budget_bytes"
            )
        if self._is_memory_short:
            return explain_memory(self._stream.name, self._state, self._server_memory.memory)
        roster = load_roster(self._client, self._partition)
        now_ms = server_ms(self._client)
        idle = idle_groups(roster, now_ms)
        # who waits for this very shard is behind only because of it
        blockers = [name for name in self._blockers(roster) if not (self._is_next_now and name in idle)]
        is_circle = self._is_next_now and not blockers
        unsettled = {name: nbytes for name, nbytes in idle.items() if nbytes} if is_circle else {}
        gone = told_missing(missing_members(self._client, self._partition, roster, idle, now_ms)) if is_circle else ""
        is_kept = bool(roster.pinned or any(till > now_ms for _, till in roster.replays.values()))
        reason = explain_quota(self._stream.name, self._state, blockers, bool(roster.groups), unsettled, gone, is_kept)
        remedy = explain_holds(self._stream.name, roster, blockers, now_ms, SILENT_MS)
        return f"{reason}; {remedy}" if remedy else reason

    def _blockers(self, roster: Roster) -> list[str]:
        """The groups that owe most of what is held; one that owes less than half as much holds up nobody."""
        owed: Counter[str] = Counter()
        for epoch in roster.epochs:
            manifest = find_manifest(self._client, self._stream, epoch)
            if manifest is not None:
                owing = {name: roster.groups[name] for name in pending_groups(roster, epoch)}
                owed.update(owed_samples(self._client, self._stream, manifest, owing))
        most = max(owed.values(), default=0)
        return sorted(group for group, count in owed.items() if count > 0 and count > most / 2)
