"""Admission control for one shard: ask the rule, have the cleaner free bytes, explain a wait.

The rule itself, and the values it needs, are in ``quota``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from penstock_common.errors import BudgetFull, PenstockError, TooLarge
from penstock_common.explain.backlog import idle_groups, missing_members
from penstock_common.explain.sentences import explain_holds, explain_missing, explain_spare
from penstock_common.printable import readable_bytes
from penstock_common.segments.folder import INLINE
from penstock_common.stream.commands import server_ms
from penstock_common.stream.groups.ledger import unacknowledged_samples
from penstock_common.stream.groups.roster import RENEW_S, Roster, end_wait, load_roster, note_wait
from penstock_common.stream.manifest import find_manifest
from penstock_common.stream.payloads import plane_of
from penstock_common.stream.servers.suitability import largest_block
from penstock_common.waiting import Wait
from penstock_producer.write.cleaner import GROUP_SILENT_MS
from penstock_producer.write.explain import explain_memory, explain_quota
from penstock_producer.write.quota import (
    LACKING,
    Admission,
    AdmissionWait,
    QuotaState,
    decide_admission,
    find_refusal,
    pause_s,
)
from penstock_producer.write.resources import ORDER_LOOK_S, SharedResources
from penstock_producer.write.target import ShardTarget

NOTE_AFTER_S = 0.5
"""A wait this long is noted on the roster. Shorter waits are usual while a budget is full."""


class AdmissionControl:
    """The decision for one shard whether its next block may be written.

    The decision is `quota.decide_admission`, and the wait is a `quota.AdmissionWait`. This class asks the server for
    what they need, has the cleaner free bytes, and notes a long wait on the roster.
    """

    def __init__(self, target: ShardTarget, clock: Callable[[], float], resources: SharedResources) -> None:
        stream, partition = target.stream, target.partition
        self._target, self._resources = target, resources
        self._clock = clock
        self._share_of = partition.number if len(stream.partitions) > 1 else None
        self._state = QuotaState(0, 0, resources.partition_budget, False, partition=self._share_of)
        self._decision = Admission.ADMITTED
        self._wait = AdmissionWait()
        self._is_server_full = False
        """The server refused a write at its maxmemory, and no block was admitted or refused since."""
        self._full_folder = ""
        """The folder of segments that had no space, until the next block is admitted or refused."""
        self._named_folder = ""
        """The folder that the last refusal was about."""
        self._noted_s: float | None = None
        self._is_next_now, self._looked_s = False, -ORDER_LOOK_S
        self._freed = 0
        """Bytes freed for the last block: the writer learns of them with that block's answer."""

    def note_full_server(self) -> None:
        """Record that the server refused a write at its maxmemory: the next block waits one round."""
        self._is_server_full = True

    def note_full_folder(self, path: str) -> None:
        """Record that a folder of segments had no space: the next block waits one round."""
        self._full_folder = path

    def admit(self, block_bytes: int, held_bytes: int) -> bool:
        """Return True if the block may be written now; free what may be freed before returning False.

        Args:
            block_bytes: Payload bytes of the block.
            held_bytes: Payload bytes that the partition holds, as last read.

        Raises:
            TooLarge: The block is larger than a quarter of the partition's budget, so it might wait for ever.
        """
        stream = self._target.stream
        if block_bytes > largest_block(self._resources.partition_budget):
            self._resources.read_budget()
        if block_bytes > largest_block(budget := self._resources.partition_budget):
            raise TooLarge(
                f"a block of {readable_bytes(block_bytes)} does not fit a quarter of the budget of "
                f"{readable_bytes(budget)} a partition of {stream.name!r}: "
                f"raise budget_bytes (--budget) to {4 * block_bytes * len(stream.partitions)}, or write smaller samples"
            )
        self._freed = 0
        refusal = self._take_refusal()
        self._wait = self._wait.begun(self._clock(), is_refused=refusal is not None)
        if self._decide(block_bytes, held_bytes, refusal):
            return self._go_on(block_bytes)
        self._wait = self._wait.delayed(self._clock())
        wanted = max(self._state.missing_bytes, block_bytes)
        self._freed = freed = self._resources.cleaner.free_bytes(self._target.partition, wanted)
        if refusal is None and freed and self._decide(block_bytes, held_bytes - freed):
            return self._go_on(block_bytes)
        self._note()
        return False

    def admit_next(self, block_bytes: int, held_bytes: int) -> bool:
        """Return True if the block may be sent before the one ahead of it is answered.

        That needs no wait in progress, no refusal, and enough quota without freeing anything.

        Args:
            block_bytes: Payload bytes of the block.
            held_bytes: Payload bytes that the partition held before the block ahead, and that block's.
        """
        if self._wait.is_waiting or self._is_server_full or self._full_folder:
            return False
        is_fitting = block_bytes <= largest_block(self._resources.partition_budget)
        if not is_fitting or not self._decide(block_bytes, held_bytes - self._freed):
            return False
        self._freed = 0
        return self._go_on(block_bytes)

    def pause_s(self) -> float:
        """Return the seconds to wait before asking again."""
        return pause_s(self._wait.waited_s(self._clock()) or 0.0, self._wait.last_wait_s)

    def end_wait(self) -> None:
        """Remove the note of the wait from the roster, whether the block was admitted or not."""
        if self._noted_s is not None:
            self._noted_s = None
            with suppress(PenstockError):  # a note that stays is soon stale
                end_wait(self._target.client, self._target.partition, self._target.epoch, self._target.number)

    def _take_refusal(self) -> Admission | None:
        """Return what refused the last try, and forget it; None if nothing did."""
        was_tried = self._is_server_full or self._wait.refused_s is not None
        is_used_up = was_tried and self._resources.server_memory.is_used_up()  # it would refuse the next try as well
        refusal = find_refusal(self._full_folder, is_server_full=self._is_server_full or is_used_up)
        self._named_folder, self._full_folder, self._is_server_full = self._full_folder, "", False
        return refusal

    def _decide(self, block_bytes: int, held_bytes: int, refusal: Admission | None = None) -> bool:
        """Apply the rule. Ask whether the shard is next only if the answer matters."""
        waited_s = self._wait.waited_s(self._clock())
        is_inline = self._target.stream.payload == INLINE  # payloads in segments take no memory of the server
        left = self._resources.server_memory.left_bytes(block_bytes, anew=waited_s is not None) if is_inline else None
        self._state = QuotaState(
            held_bytes,
            block_bytes,
            self._resources.partition_budget,
            self._is_next_now,
            waited_s=waited_s,
            left_bytes=left,
            partition=self._share_of,
        )
        self._decision = decide_admission(self._state, refusal)
        if self._decision is Admission.ADMITTED:
            return True
        if not self._state.is_enough and not self._is_next_now and self._is_next():
            self._state = replace(self._state, is_next=True)
            self._decision = decide_admission(self._state, refusal)
        return self._decision is Admission.ADMITTED

    def _go_on(self, block_bytes: int) -> bool:
        self._wait = self._wait.admitted(self._clock())
        self._resources.server_memory.spend(block_bytes)
        return True

    def _note(self) -> None:
        """Note the wait on the roster, for the first time after a moment, then every second. Take a budget that was
        raised since.
        """
        now = self._clock()
        waited = self._wait.waited_s(now) or 0.0
        if waited < NOTE_AFTER_S or (self._noted_s is not None and now - self._noted_s < RENEW_S):
            return
        self._noted_s, target = now, self._target
        note_wait(
            target.client, target.partition, target.epoch, target.number, waited_s=waited,
            need_bytes=self._state.block_bytes, held_bytes=self._state.held_bytes,
            why=LACKING[self._decision], is_next=self._is_next(),  # after a refusal the rule may not have asked that
        )  # fmt: skip
        self._resources.read_budget()

    def _is_next(self) -> bool:
        """Return True if the reserve is for this shard; ask the server every `ORDER_LOOK_S` at most.

        A shard that is next stays next until it is complete, because epochs and shards only rise.
        """
        now = self._clock()
        if not self._is_next_now and now - self._looked_s >= ORDER_LOOK_S:
            self._is_next_now, self._looked_s = (
                self._resources.order.is_next(self._target.epoch, self._target.number),
                now,
            )
        return self._is_next_now

    def why(self) -> str:
        """Return the sentence that says what the shard waits for, and what helps."""
        target, name = self._target, self._target.stream.name
        if self._decision is Admission.FOLDER_FULL:
            spare = explain_spare(plane_of(target.stream).spare_bytes)
            return (
                f"there is no space left in {self._named_folder} for segments of {name!r}: free some, "
                f"or give the stream a smaller budget_bytes{spare and '. '}{spare}"
            )
        if LACKING[self._decision] == "memory":
            return explain_memory(name, self._state, self._resources.server_memory.memory)
        roster = load_roster(target.client, target.partition)
        now_ms = server_ms(target.client, target.partition.roster)
        idle = idle_groups(roster, now_ms)
        # a group that waits for this shard is behind only because of it
        blockers = [name for name in self._blockers(roster) if not (self._is_next_now and name in idle)]
        is_deadlock = self._is_next_now and not blockers
        unacknowledged = {name: nbytes for name, nbytes in idle.items() if nbytes} if is_deadlock else {}
        gone = (
            explain_missing(missing_members(target.client, target.partition, roster, idle, now_ms))
            if is_deadlock
            else ""
        )
        is_kept = bool(roster.pinned or any(till > now_ms for _, till in roster.replays.values()))
        is_read = any(group.holds for group in roster.groups.values())
        reason = explain_quota(name, self._state, blockers, is_read, unacknowledged, gone, is_kept)
        remedy = explain_holds(name, roster, blockers, now_ms, GROUP_SILENT_MS)
        return f"{reason}; {remedy}" if remedy else reason

    def _blockers(self, roster: Roster) -> list[str]:
        """Return the groups with more than half as many unacknowledged samples as the slowest group."""
        counts, target = Counter[str](), self._target
        for epoch in roster.epochs:
            manifest = find_manifest(target.client, target.stream, epoch)
            if manifest is not None:
                counts.update(
                    unacknowledged_samples(target.client, target.stream, manifest, roster.unacknowledged_by(epoch))
                )
        most = max(counts.values(), default=0)
        return sorted(group for group, count in counts.items() if count > 0 and count > most / 2)


class QuotaWait:
    """The wait of one shard for quota, as its user is told of it.

    It lasts until a block is committed, even if the server refuses blocks in between.
    """

    def __init__(
        self,
        resources: SharedResources,
        clock: Callable[[], float],
        most_s: float | None,
        should_stop: Callable[[], bool],
    ) -> None:
        """Begin with no wait.

        Args:
            resources: Where lines go, and the server that is asked.
            clock: Monotonic clock.
            most_s: Longest wait in seconds; None waits as long as it takes.
            should_stop: True ends a wait with BudgetFull.
        """
        self._resources, self._clock, self._most_s = resources, clock, most_s
        self.should_stop = should_stop
        """The function that is asked whether the program ends."""
        self._wait: Wait | None = None

    def pause(self, admission: AdmissionControl) -> None:
        """Say why it waits, if a line is due, and sleep until it is time to ask again. Raises BudgetFull at the end."""
        server = self._resources.client.where
        self._wait = wait = self._wait or Wait(self._resources.notify, clock=self._clock, server=server)
        wait.because("room", admission.why)
        if self.should_stop() or (self._most_s is not None and wait.seconds > self._most_s):
            raise BudgetFull(admission.why())
        time.sleep(admission.pause_s())

    def over(self) -> None:
        """Note that a block was committed."""
        self._wait = None
