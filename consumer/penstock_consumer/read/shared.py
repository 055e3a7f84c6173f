"""The thread that reads one epoch of a shared group: it asks for entries, receives them and fills batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock_common import errors
from penstock_common.errors import (
    BadEntry,
    EpochIncomplete,
    EpochNotFound,
    PenstockError,
    SegmentsUnseen,
    ServerUnavailable,
)
from penstock_common.explain.sentences import producer_hint, why_no_room
from penstock_common.segments.folder import INLINE
from penstock_common.server.background_query import BackgroundQuery
from penstock_common.server.channel import ReplyError
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.damage import damage_of
from penstock_common.stream.entries import (
    fetch_command,
    is_gone,
    last_given,
    read_group_command,
    was_given_since,
)
from penstock_common.stream.feeds import FEED, is_sealed, said_open_shards
from penstock_common.stream.groups.ledger import done_bits, runs
from penstock_common.stream.groups.losses import describe_loss
from penstock_common.stream.groups.roster import load_roster, rejoin
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import (
    ABANDONED,
    Manifest,
    find_manifest,
    find_state_damage,
    load_manifest,
    renewed,
)
from penstock_common.stream.payloads import reader_of
from penstock_common.stream.streams import require_there
from penstock_common.wire.header import Header
from penstock_consumer.read.claims import LeaseClaim
from penstock_consumer.read.dead_letters import DeadLetters, cause_of, crash_notice
from penstock_consumer.read.fetch_plan import FetchPause, FetchPlanner, FetchRequest
from penstock_consumer.read.heartbeat import ClaimedEntry
from penstock_consumer.read.index_walk import ELSEWHERE_S
from penstock_consumer.read.receive import (
    DeliveryCheck,
    ReaderConnection,
    ReceivedEntry,
    Receiver,
    check_identity,
    read_by_id,
)
from penstock_consumer.stages.batch import ArrayPool, Assembler
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped, ReaderQueue

COMPARE_S = 10.0
"""Two clocks drift by a second in some hours, and a server may be another one after an outage."""

LOST_S = 60.0
"""The longest wait for an epoch to be opened again in a partition that lost it. Processes that write look for a minute.
"""


class ServerClock:
    """The difference between the server's clock and this process's, compared now and then."""

    def __init__(self, client: Client, key: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """Compare with the clock of the server that holds ``key``."""
        self._client, self._key, self._clock = client, key, clock
        self._ahead_s = 0.0
        """The seconds by which the server's clock is ahead of this one."""
        self._compared_s = float("-inf")

    def compare(self) -> None:
        """Ask for the server's time if that is due. Raises ServerUnavailable."""
        asked = self._clock()
        if asked - self._compared_s < COMPARE_S:
            return
        server_s = server_ms(self._client, self._key) / 1000
        self._ahead_s, self._compared_s = server_s - (asked + self._clock()) / 2, asked

    def created_s(self, received: Sequence[ReceivedEntry]) -> float | None:
        """Return when the newest of an answer's entries was appended, or None if there is none."""
        if not received:
            return None
        return int(received[-1].entry_id.partition(b"-")[0] or 0) / 1000 - self._ahead_s


@dataclass(slots=True)
class SharedScope:
    """The part of an epoch that a reader in shared order accepts entries of, and the samples that it wants."""

    claim: LeaseClaim
    manifest: Manifest
    partition: PartitionKeys
    is_claimed: bool
    """Whether the entries were delivered before. Then the samples that the group has acknowledged are left out.

    Those of repaired entries are always left out, because a group that had acknowledged them gets the new entry all the
    same. Those of new entries are left out if the server may have lost that it delivered them."""
    deliveries: DeliveryCheck
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """The offsets of the entry asked about last that the group had acknowledged."""

    def check(self, header: Header) -> None:
        """See `receive.ReadScope`. Also checks that the entry is in the right partition."""
        check_identity(header, self.claim.stream, self.manifest)
        if self.claim.stream.partition_of(header.shard).number != self.partition.number:
            raise BadEntry(f"shard {header.shard} belongs to another partition")

    def wanted(self, header: Header, entry_id: bytes) -> NDArray[np.bool_] | None:
        """See `receive.ReadScope`. Returns what the group has not acknowledged."""
        self.acknowledged = []
        is_new = not (self.is_claimed or header.is_repair)
        if is_new and not self.deliveries.doubts(self.partition.number, self.manifest.epoch, entry_id):
            return None
        done = done_bits(
            self.claim.client, self.partition, self.manifest.epoch, self.claim.who.group, header.shard,
            header.first, header.end,
        )  # fmt: skip
        self.acknowledged = runs(np.flatnonzero(done) + header.first)
        for lo, hi in self.claim.leases.kept(self.partition.number, self.manifest.epoch, header.shard):
            done[max(lo - header.first, 0) : max(hi - header.first, 0)] = True
        return ~done if done.any() else None


ACKNOWLEDGED_S = 10.0
"""The longest wait for acknowledgements that a replaced server may have lost. The loop may be in a step then."""
OTHERS_S = 2.0
"""The time that other members have for the same. They look and try again each half a second."""
STATE_LOOKS, STATE_LOOK_S = 10, 0.1
"""The looks at an epoch's state, and the time between them, because abandoning an epoch writes several keys."""


class SharedReceivers:
    """The batches and receivers of one shared reader, and the entries that they received."""

    def __init__(
        self, claim: LeaseClaim, partitions: Sequence[int], manifest: Manifest, batch_size: int, pool: ArrayPool, *,
        views: bool,
    ) -> None:  # fmt: skip
        """``partitions`` are the numbers of those that are read."""
        self.received: list[ReceivedEntry] = []
        """The entries of the answer that is received now."""
        self._claim, self._batch_size, self._pool = claim, batch_size, pool
        self._commit_check = claim.commit_checks[partitions[0]]
        self._segments = reader_of(claim.stream, gives_views=views)
        self.assembler = self.assembler_of(manifest.epoch)
        """The batches of the epoch that is read."""
        self._of_partitions = {
            number: self.new(self.assembler, manifest, claim.stream.partitions[number], is_claimed=False)
            for number in partitions
        }

    def close(self) -> None:
        """Close the files of segments. Views of them stay valid."""
        if self._segments is not None:
            self._segments.close()

    def of(self, partition: int) -> Receiver:
        """Return the receiver of the epoch's new entries in a partition."""
        return self._of_partitions[partition]

    def assembler_of(self, epoch: int) -> Assembler:
        """Return batches of their own for an epoch."""
        return Assembler(self._claim.stream.require_spec(), self._batch_size, self._pool, epoch)

    def new(self, assembler: Assembler, manifest: Manifest, partition: PartitionKeys, *, is_claimed: bool) -> Receiver:
        """Return a receiver of new entries, or of claimed ones, less what the group has acknowledged of them."""
        spec = self._claim.stream.require_spec()
        where = SharedScope(self._claim, manifest, partition, is_claimed, self._claim.deliveries)

        def report(one: ReceivedEntry) -> None:
            if one.lease is not None and where.acknowledged:
                one.lease.acknowledge(where.acknowledged, 0)
            self.received.append(one)

        return Receiver(spec, assembler, where, partition.number, report, self._segments, self._commit_check)


class SharedReader:
    """A reader of partitions on one server, of one epoch of one group, and of what is left of earlier ones.

    Partitions that move to another server get readers of their own, because a server that is silent delays everything
    that is read by the same thread.
    """

    def __init__(
        self,
        claim: LeaseClaim,
        numbers: Sequence[int],
        manifest: Manifest,
        queue: ReaderQueue,
        receivers: SharedReceivers,
        dead_letters: DeadLetters,
        split_off: Callable[[Sequence[int]], object],
        *,
        is_late: bool,
    ) -> None:
        """Take the numbers of the partitions, and a function that starts a reader of some of them.

        ``is_late`` is whether another reader may have asked for entries of the same epoch before.
        """
        self.claim, self.epoch, self.queue = claim, manifest.epoch, queue
        self.has_ended = False
        """Whether this reader brings no more batches."""
        self.loss = ""
        """A notice, if a server lost the epoch as a whole."""
        self._silent: set[str] = set()
        """The members whose entries are waited for, once nothing else is left."""
        self._manifest = manifest
        self._split_off, self._is_late, self._moves = split_off, is_late, claim.client.moves
        self._commit_check = claim.commit_checks[numbers[0]]
        self._commit_check.begin(claim.heartbeat.members)
        self._receivers, self._dead_letters = receivers, dead_letters
        self._take(numbers)
        self._asked, self._pause = deque[tuple[FetchRequest, float]](), FetchPause(claim.client, claim.stream.keys)
        """Each request under way, and when it was sent."""
        self._lost_s: dict[int, float] = {}
        """Partition -> when it was first seen that its server has lost the epoch."""
        self._server_clock = ServerClock(claim.client, self._partitions[0].roster)
        # the server of the first partition has the manifest
        self._news = BackgroundQuery[Manifest](is_elsewhere=0 not in self._numbers)

    def _take(self, numbers: Sequence[int]) -> None:
        """Read these partitions from now on, on a new connection."""
        stream = self.claim.stream
        self._partitions, self._numbers = [stream.partitions[number] for number in numbers], frozenset(numbers)
        self._connection = ReaderConnection(self.claim.client, self.queue, self.claim.notify, stream.named(numbers))
        budget_bytes = self.queue.budget_bytes * len(numbers) // len(stream.partitions)
        self._planner = FetchPlanner(
            len(numbers), budget_bytes, stream.budget_bytes, is_referred=stream.payload != INLINE
        )  # fmt: skip

    def run(self) -> None:
        """Run the thread. Everything ends in the queue, errors too."""
        try:
            self._read()
            self.queue.end()
        except (QueueStopped, errors.UnsupportedVersion, errors.TooManyDeadLetters) as error:
            self._drain()
            self.queue.end(None if isinstance(error, QueueStopped) else error)
        except EpochNotFound as error:
            self._end_released(error)
        except SegmentsUnseen as error:
            self.queue.end(cause_of(self.claim.client, self.claim.stream, error))
        except BaseException as error:
            self.queue.end(error)
        finally:
            self.has_ended = True
            self._connection.close()
            self._receivers.close()  # garbage collection would come later: reader and receivers refer to each other

    # --- the loop ---

    def _read(self) -> None:
        while True:
            try:
                if self._is_late:
                    self._recover()
                self._read_to_the_end()
                return
            except ServerUnavailable as error:
                self._reconnect(error)

    def _read_to_the_end(self) -> None:
        self._server_clock.compare()
        self._planner.restart()
        while True:
            if self._has_moved and not self._asked:
                self._split()
            self._planner.share(self.claim.heartbeat.members)
            if not self._has_moved:  # else what is asked for comes first
                self._fetch_or_ask()
            if self._asked and self._ends_with(self._take_answer()):
                return

    def _fetch_or_ask(self) -> None:
        """Fetch what is claimed, once nothing is asked for. Ask for new entries while nothing is claimed."""
        if self._has_claims():
            self._planner.restart()
            if not self._asked:
                self._fetch_claims()
        elif self.queue.wait_for_space(len(self._asked) * self._planner.request_bytes, 0 if self._asked else 0.2):
            self._ask()

    @property
    def _has_moved(self) -> bool:
        """Return whether partitions may have moved since the last `_split`."""
        return bool(self._moves != self.claim.client.moves)

    def _split(self) -> None:
        """Leave partitions that moved to other servers to other readers. Nothing may be asked for."""
        self._moves = self.claim.client.moves
        if len(self._by_server()) == 1:
            return
        self.claim.client.look_around()  # a redirection tells of one slot, also if a replica took over all of them
        self._moves = self.claim.client.moves
        own, *others = self._by_server()
        if not others:
            return
        for connection in (self._connection, self._commit_check):
            connection.close()
        self._take(own)
        for numbers in others:
            self._split_off(numbers)

    def _by_server(self) -> list[list[int]]:
        """Return the numbers of the partitions on each server. The first partition comes first."""
        servers = self.claim.client.by_server([partition.roster for partition in self._partitions])
        return [[self._partitions[at].number for at in some] for some in servers]

    def _ends_with(self, taken: int) -> bool:
        """Return whether an answer with this many entries brought all that there were."""
        if self._pause.is_told:
            self._look_again()
        elif taken:
            self._pauses()
        elif self._planner.ends_sweep and not self._asked:
            # every partition answered "nothing", to requests made after the manifest was read
            if self._manifest.is_ended and self._is_over():
                return True
            if not self._pauses():
                self._look_again()
        return False

    def _look_again(self) -> None:
        """Read the manifest again, and plan the last requests once the epoch has ended."""
        manifest = self._news.ask(lambda: renewed(self.claim.client, self.claim.stream, self._manifest), ELSEWHERE_S)
        if manifest is None:
            return
        self._manifest = manifest
        self._server_clock.compare()
        if self._manifest.is_ended:
            self._planner.restart()

    def _rejoins(self, partition: PartitionKeys) -> bool:
        """Return whether a partition had lost this member, which is back now."""
        client, group, roster = self.claim.client, self.claim.who.group, load_roster(self.claim.client, partition)
        if self.epoch not in roster.epochs and group in roster.groups:
            return False
        if not rejoin(client, self.claim.who, partition):
            return False
        # where the roster has both, and the entries have no group, another program removed it
        return (
            group in last_given(client, partition, self.epoch)
            or self.epoch not in load_roster(client, partition).epochs
        )

    def _is_lost_in(self, partition: PartitionKeys) -> bool:
        """Return whether a partition alone lost the epoch. Raises EpochIncomplete after `LOST_S`."""
        claim, stream, group = self.claim, self.claim.stream, self.claim.who.group
        roster, manifest = load_roster(claim.client, partition), find_manifest(claim.client, stream, self.epoch)
        if group not in roster.groups:
            return False
        if self.epoch in roster.epochs:  # opened again since, for all groups of the roster
            return group in last_given(claim.client, partition, self.epoch)
        if manifest is None or manifest.state == ABANDONED or claim.is_released(self.epoch):
            return False
        now_s = time.monotonic()
        if now_s - self._lost_s.setdefault(partition.number, now_s) > LOST_S:
            sizes = {shard: manifest.shard_size(shard) for shard in manifest.shards()}
            missing = [(shard, 0, size) for shard, size in sizes.items() if stream.partition_of(shard) == partition]
            lost = describe_loss(claim.client, stream, manifest, missing) or f"partition {partition.number} has lost it"
            raise EpochIncomplete(
                f"group {group!r} cannot read epoch {self.epoch} of {stream.name!r} to its end, and no process opened "
                f"it again ({lost}): `penstock trim {stream.name}` does, then `penstock audit {stream.name} --repair "
                "SOURCE...` makes the samples again",
                missing,
            )
        return True

    def why_waiting(self, seconds: float) -> str:
        """Return why there is no batch, in words for the training loop's user."""
        name = self.claim.stream.name
        if self._silent:
            return (
                f"what {', '.join(sorted(self._silent))} was given of epoch {self.epoch} of {name!r} and did not "
                "acknowledge: it is handed out here once its lease has lapsed"
            )
        client, manifest = self.claim.client.impatient(), self._manifest
        with suppress(PenstockError):  # an explanation neither fails nor waits
            manifest = find_manifest(client, self.claim.stream, self.epoch) or manifest
        done = "" if manifest.sizes is None else f" ({len(manifest.done)} of {len(manifest.sizes)} shards are done)"
        if full := why_no_room(client, self.claim.stream):
            return f"more samples of epoch {self.epoch} of {name!r}{done}; none came for {seconds:.0f} s: {full}"
        if manifest.is_ended:  # so no producer is missing
            at = "is at work" if (doing := self.queue.reader_times.doing) == "reader" else f"waits for the {doing}"
            return f"the rest of epoch {self.epoch} of {name!r}{done}; none came for {seconds:.0f} s: this process {at}"
        if left := self._left_by_writers(client, manifest):
            return (
                f"the end of epoch {self.epoch} of {name!r}, which a writer of its feed has ended: the writers of "
                f"shards {left} have not, and nothing came for {seconds:.0f} s. One that died never will: "
                f"`penstock epochs close {name} {self.epoch}` ends it as committed, and a writer that still runs ends "
                "with ShardMismatch"
            )
        if self._was_given_since(client, seconds):
            return (
                f"more samples of epoch {self.epoch} of {name!r}{done}; none came for {seconds:.0f} s: members of "
                f"group {self.claim.who.group!r} were given what was committed in this time, and no batch is full here"
            )
        return (
            f"more samples of epoch {self.epoch} of {name!r}{done}; none came for {seconds:.0f} s. "
            f"{producer_hint(name, self.epoch, seconds)}"
        )

    def _left_by_writers(self, client: Client, manifest: Manifest) -> str:
        """Return the shards of a sealed epoch of a feed that their writers have not ended, with their ages, or ''."""
        stream = self.claim.stream
        with suppress(PenstockError):  # an explanation neither fails nor waits
            if manifest.kind == FEED and is_sealed(client, stream, self.epoch):
                return said_open_shards(client, stream, manifest)
        return ""

    def _was_given_since(self, client: Client, seconds: float) -> bool:
        """Return whether the group was given an entry that was committed in the last ``seconds``."""
        with suppress(PenstockError):  # an explanation neither fails nor waits
            group, partitions = self.claim.who.group, self.claim.stream.partitions
            return any(was_given_since(client, partition, self.epoch, group, seconds) for partition in partitions)
        return False

    def _pauses(self) -> bool:
        """Return whether the next request waits, so that it finds a few entries together while other members ask."""
        if self._asked or self._manifest.is_ended or len(self.claim.stream.partitions) > 1:
            return False
        if not (pause_s := self._planner.pause_s(self.claim.heartbeat.members)):
            return False
        self._pause.begin(pause_s)
        return True

    def _ask(self) -> None:
        """Send what is to be asked for now."""
        self.claim.heartbeat.raise_error()  # nothing may be read under a name that another process took
        who, partitions = self.claim.who, self._partitions
        if not (requests := self._planner.next_requests(len(self._asked), is_ended=self._manifest.is_ended)):
            return
        asked_s = time.monotonic()
        self._asked.extend([(request, asked_s) for request in requests])
        commands = [
            read_group_command(partitions[number], self.epoch, who.group, who.member, most, block_ms)
            for number, most, block_ms in requests
        ]
        try:
            self._connection.open().send([*self._pause.commands(), *commands])
        except ServerUnavailable as error:
            self._reconnect(error)

    def _take_answer(self) -> int:
        """Receive one answer into batches. Returns the number of entries in it."""
        # a replaced server may have answered without an error
        self.claim.deliveries.look(self._partitions, self._await_acknowledged)
        request, asked_s = self._asked.popleft()
        partition = self._partitions[request.partition]
        received = self._receivers.received
        received.clear()
        broken: ServerUnavailable | None = None
        channel = self._connection.open()
        if self._pause.is_under_way:
            self.queue.reader_times.to("producers")
            self._pause.end(channel)
        self._commit_check.expect(request.most)
        self.queue.reader_times.to("producers" if self._planner.is_waiting else "server")
        before_s = channel.waited_s
        try:
            channel.read_entries(self._receivers.of(partition.number))
        except ReplyError as error:
            if damage := damage_of(self.claim.client, error.error, [partition.entries(self.epoch)]):
                raise damage from None
            if is_gone(error.error) and self._rejoins(partition):
                raise ServerUnavailable("the server came back without this group, which has joined again") from None
            if is_gone(error.error) and self._is_lost_in(partition):
                raise ServerUnavailable(
                    f"the server came back without epoch {self.epoch} in partition {partition.number}: a process that "
                    f"writes {self.claim.stream.name!r} opens it there again, and so does `penstock trim`"
                ) from None
            gone = EpochNotFound(
                f"epoch {self.epoch} of {self.claim.stream.name!r} was released, or its group dropped, or the server "
                f"came back without its newest writes, while it was read ({error.error})"
            )
            raise self.claim.explained(gone, partition) from None
        except ServerUnavailable as error:
            broken = error
        taken = list(received)
        if taken:
            self._pause.received(taken[-1].entry_id)
        created_s = 0.0 if broken is not None else self._server_clock.created_s(taken)
        waited_s = channel.waited_s - before_s
        self.queue.reader_times.received(waited_s, created_s)
        self._book(taken, self._manifest, partition)  # before recovery asks what is held
        self.claim.heartbeat.received(partition.number, asked_s)
        self._emit(self._receivers.assembler)
        if broken is not None:
            raise broken  # no answer: it would not have meant "nothing"
        self._lost_s.pop(partition.number, None)
        self._planner.answered(request, len(taken), waited_s, time.monotonic())
        self._connection.answered()
        return len(taken)

    def _book(self, received: list[ReceivedEntry], manifest: Manifest, partition: PartitionKeys) -> None:
        """Note what arrived: leases of good entries first, because the rest asks the server; then dead letters."""
        odd = []
        for one in received:
            if one.lease is not None and one.lease.unacknowledged:
                self.claim.leases.add(one.lease)
                self._planner.received(one.nbytes)
            else:
                odd.append(one)
        if any(one.lease is not None for one in received):
            self._dead_letters.saw_good()
        if odd:
            self._dead_letters.deal_with(odd, manifest, partition)

    def _emit(self, assembler: Assembler, *, is_alone: bool = False) -> None:
        while (batch := assembler.take(is_alone=is_alone)) is not None:
            self.queue.put(batch)

    # --- what the dead left, and this member's own past ---

    def _drain(self) -> None:
        """Receive what is under way before the end, so that it can be returned at once."""
        with suppress(PenstockError, QueueStopped):
            while self._asked:
                self._take_answer()

    def _has_claims(self, *, suspect: bool = False) -> bool:
        return any(self._is_due(claim, suspect=suspect) for claim in list(self.claim.heartbeat.claims))

    def _is_due(self, claim: ClaimedEntry, *, suspect: bool) -> bool:
        is_here = claim.partition in self._numbers
        return is_here and claim.epoch <= self.epoch and claim.is_suspect == suspect

    def _fetch_claims(self, *, suspect: bool = False) -> None:
        """Fetch claimed entries by id and deliver them in batches of their own. They may be of earlier epochs.

        Suspects come one at a time, and the one that was delivered most often comes last.
        """
        claims = [self.claim.heartbeat.claims.popleft() for _ in range(len(self.claim.heartbeat.claims))]
        due = [claim for claim in claims if self._is_due(claim, suspect=suspect)]
        rising = sorted(due, key=lambda claim: (claim.epoch, claim.deliveries if suspect else 0))
        todo = deque(rising[: 1 if suspect else None])
        later = [claim for claim in claims if claim not in todo]
        try:
            while todo:
                self._fetch_epoch(todo[0].epoch, todo)
        finally:  # what could not be fetched is still claimed
            self.claim.heartbeat.claims.extend((*todo, *later))

    def _fetch_epoch(self, epoch: int, todo: deque[ClaimedEntry]) -> None:
        """Fetch the claims of one epoch, from the left."""
        manifest = self._manifest if epoch == self.epoch else find_manifest(self.claim.client, self.claim.stream, epoch)
        assembler, is_alone = self._receivers.assembler_of(epoch), todo[0].is_suspect
        try:
            while todo and todo[0].epoch == epoch:
                if manifest is not None:
                    self._fetch(todo[0], manifest, assembler)
                else:  # abandoned and released since the claim
                    self.claim.leases.remove(todo[0].partition, epoch, [todo[0].entry_id])
                todo.popleft()
        finally:
            assembler.flush()
            self._emit(assembler, is_alone=is_alone)
            if epoch != self.epoch:
                self.claim.unclosed.add(epoch)

    def _fetch(self, claim: ClaimedEntry, manifest: Manifest, assembler: Assembler) -> None:
        partition = self.claim.stream.partitions[claim.partition]
        receiver = self._receivers.new(assembler, manifest, partition, is_claimed=True)
        received = self._receivers.received
        while not self.queue.wait_for_space(0, 0.2):
            pass
        if claim.is_suspect:  # before its samples are here: if the answer were lost, they would be delivered twice
            self.claim.heartbeat.count_turn(claim)
        while True:
            received.clear()
            try:
                self._connection.open().send([fetch_command(partition, claim.epoch, claim.entry_id)])
                if read_by_id(self._connection, receiver, self.queue.reader_times, partition.entries(claim.epoch)) == 0:
                    received.append(ReceivedEntry(claim.entry_id, 0, None, is_missing=True))
                break
            except ServerUnavailable as error:
                self._reconnect(error)
        if claim.is_suspect:
            self.claim.notify(crash_notice(self.claim.who, claim, received[0].header))
        self._book(list(received), manifest, partition)
        self._emit(assembler, is_alone=claim.is_suspect)

    # --- the end ---

    def _end_released(self, error: EpochNotFound) -> None:
        """End an epoch with what was there. An epoch that this group still holds goes if it was abandoned, or lost."""
        try:
            require_there(self.claim.client, self.claim.stream)
            roster = load_roster(self.claim.client, self.claim.stream.partitions[0])
            self.loss = self.claim.loss_of(self.epoch)
            is_there = not self.loss and not self.claim.is_released(self.epoch)
        except PenstockError as worse:
            worse.__suppress_context__ = True  # it explains the first error, so a traceback needs it alone
            self.queue.end(worse)
            return
        if self.claim.who.group not in roster.groups or is_there:
            self.queue.end(error)
            return
        self._receivers.assembler.flush()
        self._emit(self._receivers.assembler)
        # else the other members acknowledged it
        if not self.loss and roster.groups[self.claim.who.group].read < self.epoch:
            name = self.claim.stream.name
            self.claim.notify(f"epoch {self.epoch} of {name!r} was abandoned and released while it was read")
        self.queue.end()

    def _is_over(self) -> bool:
        """Return True once every unacknowledged sample is held here or by a member that proved to be live."""
        self._receivers.assembler.flush()
        self._emit(self._receivers.assembler)
        self._require_live()
        if self._manifest.state == ABANDONED:  # its acknowledgements are refused, so it does not matter who holds what
            return not self._has_claims()
        self.queue.reader_times.to("server")
        # what was delivered under this name and never arrived, or was acknowledged and lost by the server
        self.claim.heartbeat.recover(self.claim.is_all_acknowledged, self._partitions)
        began_ms: int | None = None
        while True:
            if self._has_claims() or self._has_moved:
                return False
            if self.queue.is_stopped:
                raise QueueStopped
            if self._has_claims(suspect=True):  # handed next when it is fetched: then a death is its own
                if self.queue.wait_until_empty(0.2):
                    self._fetch_claims(suspect=True)
                return False
            others = self.claim.other_holders(self.epoch, self._partitions)
            if not others:
                self._dead_letters.end(self._manifest, is_alone=True)
                return True
            began_ms = began_ms or server_ms(self.claim.client, self._partitions[0].roster)
            self._silent = others - self.claim.live_members(began_ms, self._partitions[0])
            if not self._silent:
                self._dead_letters.end(self._manifest, is_alone=False)
                return True
            self.queue.reader_times.to("producers")  # no other part returns it
            if "~released" in others:
                self.claim.heartbeat.look(self._partitions)
            time.sleep(0.05)

    def _require_live(self) -> None:
        """Raise DamagedKey if no acknowledgement is taken of an epoch that is neither abandoned nor released.

        What is pending of it would be delivered again and again.
        """
        looks = 0
        while self._manifest.state != ABANDONED:
            damage = find_state_damage(self.claim.client, self.claim.stream, self._manifest)
            if damage is None:
                return
            if (looks := looks + 1) > STATE_LOOKS:
                raise damage
            time.sleep(STATE_LOOK_S)
            self._look_again()

    def _reconnect(self, error: ServerUnavailable) -> None:
        """Find what was asked for and not received: it is pending under this name, so it is claimed by id."""
        self._asked.clear()
        self._pause.forget()
        self.claim.client.look_around()  # the answer may have been that a slot moved
        if self._has_moved:
            self._split()
        self._connection.reopen(error, self._recover)

    def _recover(self) -> None:
        self.claim.deliveries.look(self._partitions, self._await_acknowledged)
        self.claim.heartbeat.recover(partitions=self._partitions)

    def _await_acknowledged(self) -> None:
        """Wait, for a limited time, until the server has again what this member and others acknowledged."""
        self.queue.reader_times.to("server")
        began_s, others_s = time.monotonic(), OTHERS_S if self.claim.heartbeat.members > 1 else 0.0
        while (waited_s := time.monotonic() - began_s) < ACKNOWLEDGED_S:
            if all(map(self.claim.is_all_acknowledged, self._partitions)) and waited_s >= others_s:
                return
            if self.queue.is_stopped:
                raise QueueStopped
            time.sleep(0.02)


class SharedReaders:
    """The readers of one epoch of one group, into a prefetch queue. Each server has one, in a thread of its own.

    A server that is away or silent holds up its own partitions only.
    """

    filled = 0
    """A reader in shared order replaces no bad sample."""

    def __init__(
        self,
        claim: LeaseClaim,
        epoch: int,
        queue: PrefetchQueue,
        pool: ArrayPool,
        *,
        batch_size: int,
        views: bool,
    ) -> None:
        self.epoch = epoch
        self._claim, self._queue, self._pool, self._batch_size, self._views = claim, queue, pool, batch_size, views
        self._manifest, self._readable = load_manifest(claim.client, claim.stream, epoch), threading.Event()
        self._dead_letters: list[DeadLetters] = []
        self._readers: list[SharedReader] = []
        self._threads = deque[threading.Thread]()
        for numbers in claim.client.by_server([partition.roster for partition in claim.stream.partitions]):
            self._add(numbers, is_late=False)

    @property
    def bad_entries(self) -> int:
        """Return the number of entries that could not be read."""
        return sum(dead_letters.count for dead_letters in self._dead_letters)

    @property
    def loss(self) -> str:
        """Return a notice, if a server lost the epoch as a whole, else ''."""
        return next((reader.loss for reader in self._readers if reader.loss), "")

    def run(self) -> None:
        """Run the threads. Everything ends in the queue, errors too."""
        first, *others = self._readers
        for reader in others:
            self._start(reader)
        first.run()
        while self._threads:  # a thread that is waited for may start others
            self._threads.popleft().join()

    def why_waiting(self, seconds: float) -> str:
        """Return why there is no batch, in words for the training loop's user."""
        busy = [reader for reader in self._readers if not reader.has_ended]
        return (busy or self._readers)[0].why_waiting(seconds)

    def _add(self, numbers: Sequence[int], *, is_late: bool) -> SharedReader:
        """Return another reader, of these partitions."""
        claim, dead_letters = self._claim, DeadLetters(self._claim, self._readable)
        receivers = SharedReceivers(
            claim, numbers, self._manifest, self._batch_size, self._pool, views=self._views
        )  # fmt: skip
        queue_input = self._queue if len(claim.stream.partitions) == 1 else self._queue.new_input()
        reader = SharedReader(
            claim, numbers, self._manifest, queue_input, receivers, dead_letters, self._split_off, is_late=is_late
        )  # fmt: skip
        self._dead_letters.append(dead_letters)
        self._readers.append(reader)
        return reader

    def _split_off(self, numbers: Sequence[int]) -> None:
        self._start(self._add(numbers, is_late=True))

    def _start(self, reader: SharedReader) -> None:
        thread = threading.Thread(target=reader.run, name="penstock-reader", daemon=True)
        self._threads.append(thread)
        thread.start()
