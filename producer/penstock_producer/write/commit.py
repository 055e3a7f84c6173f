"""The committer: appends a shard's blocks exactly once, whatever happens to it or to another run of the same job.

One block is being committed while the next is packed and sent. The server refuses a block that is not next (decision
21) and says what is committed. Nothing is sent again before the committer knows what is committed. What a server may
still lose is kept in ``unconfirmed``, and sent again to one that lost it (decision 30).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import (
    BudgetFull,
    EpochAbandoned,
    EpochNotFound,
    PenstockError,
    ServerUnavailable,
    ShardMismatch,
    Unauthorized,
)
from penstock_common.printable import shortened
from penstock_common.server.channel import Channel, Reply
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Refused, parse_id
from penstock_common.stream.entries import (
    IndexRecord,
    ShardProgress,
    commit_commands,
    commit_keys,
    index_records,
    is_indexed,
    is_out_of_memory,
    is_sealed,
    look_commands,
    raise_errors,
    read_commit,
    read_look,
)
from penstock_common.stream.feeds import retake_shard
from penstock_common.stream.groups.losses import note_sent_again, utc
from penstock_common.stream.manifest import (
    ABANDONED,
    Manifest,
    UnreplicatedWrites,
    find_manifest,
    open_again,
    state_damage,
)
from penstock_common.stream.servers.durability import Durability, bear_shortfall, touch_command, unconfirmed_notice
from penstock_common.stream.streams import Stream, is_released, require_there
from penstock_common.waiting import Outage, Wait
from penstock_common.wire.block import Block, sizes_of
from penstock_common.wire.codec import Fields
from penstock_common.wire.spec import Spec
from penstock_producer.write.admission import AdmissionControl
from penstock_producer.write.completion import find_forged, first_fault, read_index
from penstock_producer.write.payloads import FolderFull, ShardPayloads
from penstock_producer.write.resources import SharedResources
from penstock_producer.write.unconfirmed import ANSWER_MS, KeptBlock, UnconfirmedBlocks

P = ParamSpec("P")
T = TypeVar("T")


def _with_whole_channel(method: Callable[P, T]) -> Callable[P, T]:
    """Close the connection after Ctrl-C within a method: the next request would read an answer that is under way."""

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        except Exception:
            raise
        except BaseException:
            committer: Any = args[0]
            committer._channel.close()
            raise

    return call


class ShardTaken(ShardMismatch):
    """Another writer has the shard, because the server lost the note that this one took it."""


@dataclass(slots=True)
class SentBlock:
    """A block whose transaction was sent and not yet answered."""

    block: Block
    bad: Mapping[int, str]
    replies: int
    """The number of replies to its transaction."""
    nbytes: int
    """The payload bytes as they are stored."""
    segment: str
    """The segment that holds its payload, or ''. It may be sealed once the transaction is answered."""
    sealed: list[str]
    """The segments that the request reports as full, after the transaction."""
    level: Durability
    """The level that the request asks for at its end. It has no commands if it asks for none."""
    must_reach: Durability
    """The level of the server that it was sent to. Its answer may come after the map names another server."""

    entry_id: bytes = b""
    """The id of the entry that the transaction appended, once it is answered."""

    def appended(self, outcome: Sequence[Any]) -> None:
        """Note what EXEC answered to the block's XADD. A block of holes only has none, and its script answers no id."""
        if isinstance(outcome[0], bytes):
            self.entry_id = outcome[0]

    def take_replies(self) -> int:
        """Return the number of replies that are still to come, once. The caller must read or abandon that many."""
        due, self.replies = self.replies, 0
        return due


class Committer:
    """Appends to one shard of one epoch."""

    def __init__(
        self, resources: SharedResources, stream: Stream, manifest: Manifest, shard: int, *, checksum: bool,
        room_wait_s: float | None, should_stop: Callable[[], bool], token: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin to append to one shard, after what is committed of it.

        Args:
            resources: Resources that the shards of one writer share: its control connection, and where lines go.
            stream: Stream to write to, as it is now.
            manifest: Manifest of the epoch.
            shard: Number of the shard.
            checksum: Whether entries carry a checksum.
            room_wait_s: Longest wait for quota, in seconds; None waits as long as it takes.
            clock: Monotonic clock.
            should_stop: Asked during a wait for quota; True ends it with BudgetFull.
            token: Name of a feed's writer. Runs of a planned shard have none, so each continues where another ended.
        """
        stream.compression.require(stream.spec)  # the first sample may have fixed the spec
        client, notify = resources.client, resources.notify
        self._client, self._stream, self._manifest, self._shard = client, stream, manifest, shard
        self._partition, self._token = stream.partition_of(shard), token
        self._roster, self._keys = self._partition.roster, commit_keys(self._partition, manifest.epoch, shard)
        self._notify, self._clock = notify, clock
        self._resources = resources
        self._admission = AdmissionControl(client, stream, manifest, shard, clock, resources)
        self._room_wait_s, self._should_stop = room_wait_s, should_stop
        self._sent: SentBlock | None = None
        self._wait: Wait | None = None
        """The wait for quota. It lasts until a block is committed, even if the server refuses blocks in between."""
        self._payloads = ShardPayloads(client, stream, manifest, shard, checksum=checksum)
        self._durability = Durability.parse(stream.durability)
        self._unconfirmed = UnconfirmedBlocks(self._durability, resources.replicas, self._roster, clock)
        self._outage = Outage(notify, doing="writing", clock=clock)
        self._own: dict[int, IndexRecord] = {}
        """The records of the blocks that this run committed, by their ends."""
        self._answered = 0
        """The offset after the last sample that the server said to be committed."""
        self._is_taken = False
        """Whether the epoch continued without this writer's shard."""
        self._was_cut = False
        """Whether a connection broke. What was committed before this writer sent it may then be its own."""
        self.unreplicated: UnreplicatedWrites | None = None
        """The entries that no replica had when the shard was found whole, if its durability is `auto`."""
        self._left_out: dict[int, int] = {}
        """First offset of a block -> its samples that another run had committed."""
        self._progress: ShardProgress
        """The shard as the server had it at the last answer."""
        try:
            self._begin()
        except ServerUnavailable as error:
            self._come_back(error)
        self._found = 0 if token else self._progress.end
        """The offset after what earlier runs had committed when this one began."""

    @property
    def position(self) -> int:
        """The offset after the last one known to be committed. In another writer's shard, the offset after this
        writer's last sample.
        """
        return self._answered if self._is_anothers else self._progress.end

    @property
    def left_out(self) -> int:
        """The samples that were not sent, because another run of the shard had committed their offsets."""
        return sum(self._left_out.values())

    @property
    def _is_anothers(self) -> bool:
        return self._is_taken or self._progress.writer not in (None, self._token)

    def blocks_to_move(self) -> list[tuple[Block, Mapping[int, str]]]:
        """Return what was sent to a shard that is another writer's, for this writer's next shard.

        Raises ShardMismatch where the server lost samples that it had committed there, and that are not kept.
        """
        kept, sent = self._unconfirmed.all(), self._sent
        if self._answered:
            records = index_records(self._client, self._partition, self._manifest.epoch, self._shard)
            if any(record.writer == self._token and record.end >= self._answered for record in records):
                raise self._not_whole("behind this writer's records is another one")
            if self._unconfirmed.first != 0:
                raise self._lost(0, "is not this writer's any more")
        if sent is not None and not (kept and sent.block.end <= kept[-1].block.end):
            kept.append(KeptBlock(sent.block, sent.bad))
        return [(one.block, one.bad) for one in kept]

    def place(self, count: int) -> NDArray[np.uint8] | None:
        """Return memory of a segment for at most ``count`` samples, or None if the block may be made anywhere."""
        return self._payloads.place(count)

    def reserve(self, spec: Spec, count: int) -> NDArray[np.uint8]:
        """Wait for quota, and return memory for the columns of ``count`` samples, which the caller fills and commits.

        It is memory of a segment if the stream has segments. Raises TooLarge, and what `commit` raises.
        """
        nbytes = sum(sizes_of(spec, count))
        is_full = False
        while True:
            # asked once, because only the next answer shows that the folder refused
            if is_full or not self._admission.admit(nbytes, self._progress.held_bytes):
                self.commit_all()  # a wait asks the server, which must not owe other answers then
                self._wait_for_admission(nbytes)
            try:
                return self._payloads.reserve(spec, count)
            except FolderFull as error:
                self._admission.note_full_folder(str(error))
                is_full = True

    def drop_reserved(self, block: Block) -> None:
        """Drop a reserved block. Its place in the segment stays taken, and no index names it."""
        self._payloads.drop_reserved(block)

    @_with_whole_channel
    def commit(self, block: Block, bad: Mapping[int, str] | None = None) -> None:
        """Send the block once what was sent before is committed. ``bad`` gives a reason for each of its holes.

        Raises EpochAbandoned, ShardMismatch if the shard has lost committed samples, BudgetFull after waiting
        ``room_wait_s`` for quota, and ServerUnavailable if the server does not come back.
        """
        before = self._sent
        if before is not None and self._may_follow(before, block) and self._follow(before, block, bad or {}):
            return
        self._drain()
        if self._unconfirmed.must_wait(block.nbytes):
            self._confirm()
        self._send(block, bad or {})

    def _may_follow(self, before: SentBlock, block: Block) -> bool:
        """Return True if the block may be sent before the one ahead of it is answered."""
        is_next = block.count > 0 and block.first == before.block.end
        is_next = is_next and not self._unconfirmed.must_wait(before.block.nbytes + block.nbytes)
        return is_next and self._admission.admit_next(block.nbytes, self._progress.held_bytes + before.block.nbytes)

    def _follow(self, before: SentBlock, block: Block, bad: Mapping[int, str]) -> bool:
        """Send the block. If the one before it was refused, this one is refused, too, because it does not come next.

        Returns False if the caller must `_drain`, which sends the block before again unless it is committed.
        """
        fields = self._stored(block)
        if fields is None:
            return False
        try:
            sent = self._execute(block, bad, fields)
            if self._collect(before) or self._collect(sent):  # another run may have committed exactly the block before
                self._has_committed()
                self._sent = sent if sent.replies else None
                return True
        except ServerUnavailable as error:
            before.take_replies()  # its answers will not come, so the index is read
            self._reconnect(error)
        except Unauthorized:
            self._take_back(before, sent)
            raise
        except BaseException:
            self._channel.close()  # with answers under way: no other request can use it
            raise
        return False

    @_with_whole_channel
    def commit_all(self) -> None:
        """Wait until everything sent is committed and as safe as the stream's durability says.

        Raises DurabilityLost if the job must stop first.
        """
        self._drain()
        self._confirm()
        self._payloads.seal_now()

    def _drain(self) -> None:
        while self._sent is not None:
            sent = self._sent
            try:
                if self._collect(sent):
                    self._has_committed()
                    return
            except ServerUnavailable as error:
                self._reconnect(error)
            except Unauthorized:
                self._take_back(sent)
                raise
            self._send(sent.block, sent.bad)

    def _take_back(self, *refused: SentBlock) -> None:
        """Remove the entries of blocks whose script the server refused in its middle, for want of a right."""
        for sent in refused:
            with suppress(PenstockError):  # without the right to remove them, `penstock audit` names them
                with suppress(Unauthorized):
                    self._collect(sent)
                at = self._partition, self._manifest.epoch
                is_stray = sent.entry_id and not is_indexed(
                    self._client, *at, self._shard, sent.block.end, sent.entry_id
                )
                if is_stray:
                    self._client.xdel(self._partition.entries(self._manifest.epoch), sent.entry_id)

    def _has_committed(self) -> None:
        self._sent = self._wait = None
        self._outage.over()

    @_with_whole_channel
    def require_whole(self, end: int) -> None:
        """Raise unless the shard holds what its writers committed up to ``end``. Call it once every commit is answered.

        Raises ShardMismatch if records were lost or another program wrote them, ShardTaken if the shard is another
        writer's, and StreamDeleted if the stream is gone.
        """
        where = self._partition, self._manifest.epoch, self._shard
        while True:
            try:
                records = read_index(self._channel, self._client, *where)
                break
            except ServerUnavailable:
                self._channel.close()
                try:
                    self._resume()  # a connection that was closed is not an outage
                except ServerUnavailable as error:
                    self._come_back(error)
                self._restore(max(self._answered, self._found))
        if self._is_anothers or (records and all(record.writer != self._token for record in records)):
            raise self._taken()
        fault = first_fault(records, end, self._token)
        if fault:  # it may have been repaired since, which is rare
            records = list(index_records(self._client, *where))
            fault = first_fault(records, end, self._token)
        if not fault:
            # those that this run did not commit
            others = [record for record in records if self._own.get(record.end) != record]
            forged = find_forged(self._client, self._stream, self._manifest, self._shard, others) if others else None
            fault = "" if forged is None else f"the record {forged.end}-0 names an entry that is not its own"
        if fault:
            require_there(self._client, self._stream)  # a deletion removes the index, too
            raise self._not_whole(fault)
        self.unreplicated = self._unreplicated_in(records)

    def _unreplicated_in(self, records: Sequence[IndexRecord]) -> UnreplicatedWrites | None:
        """Return the entries that `auto` wrote and no replica confirmed, if there are some."""
        ids = [r.entry_id for r in records if r.entry_id and r.end > self._unconfirmed.confirmed]
        if not self._durability.is_auto or not ids:
            return None
        times = [parse_id(entry_id)[0] for entry_id in ids]
        server = self._client.node_of(self._roster).server
        return UnreplicatedWrites(self._partition.number, min(times), max(times), server)

    def _not_whole(self, fault: str) -> ShardMismatch:
        epoch, name = self._manifest.epoch, self._stream.name
        return ShardMismatch(
            f"the index of shard {self._shard} of epoch {epoch} of {name!r} is not what its writers committed "
            f"({fault}): the server lost data, or somebody else wrote there; see `penstock audit {name}`, then abandon "
            f"the epoch (`penstock epochs abandon {name} {epoch}`) and produce it again"
        )

    def finish(self) -> None:
        """End the shard once everything is committed; the connection goes to the next shard."""
        self._note_settled(self._answered)
        self._resources.give_channel(self._channel)
        self.close()

    def close(self) -> None:
        """Close the connection. What was sent and not answered may or may not be committed."""
        self._channel.close()
        self._payloads.close()
        if self._sent is None:  # else the cleaner finds out
            with suppress(PenstockError):
                self._payloads.seal_now()

    def _send(self, block: Block, bad: Mapping[int, str]) -> None:
        """Wait for quota, and send the part of the block that is not committed yet."""
        while True:
            self._restore(min(block.first, self._answered))
            rest = self._missing_part(block)
            if rest is None:
                self._sent = None
                return
            try:
                self._wait_for_admission(rest.nbytes)
                rest = self._missing_part(block)  # another run may have continued while this one waited
                fields = [] if rest is None else self._stored(rest)
                if fields is None:  # the disk is full: one more round of waiting
                    continue
                if rest is not None:
                    self._sent = self._execute(rest, {o: why for o, why in bad.items() if o >= rest.first}, fields)
                    return
            except ServerUnavailable as error:
                self._reconnect(error)

    def _missing_part(self, block: Block) -> Block | None:
        end = self._progress.end
        self._require_writable()
        if end < block.first:
            raise self._lost_behind(block.first)
        if end > block.first and not self._was_cut:  # a broken connection may have committed it unanswered
            self._left_out[block.first] = min(end, block.end) - block.first
        if end >= block.end:
            return None
        return block if end == block.first else block.tail(end)

    def _restore(self, upto: int) -> None:
        """Send again what the server has lost, up to an offset, since it said that it was committed.

        Raises ShardMismatch if it lost more than is kept.
        """
        is_said, lost = False, list[bytes]()
        while self._progress.end < upto:
            self._require_writable()
            kept = self._unconfirmed.at(self._progress.end)
            if kept is None:
                raise self._lost_behind(upto)
            if not is_said:
                is_said = True
                self._notify(
                    f"the server came back without samples {self._progress.end}-{upto - 1} of shard {self._shard} of "
                    f"epoch {self._manifest.epoch} of {self._stream.name!r}: sending them again"
                )
            entries = kept.entries[:]
            with self._payloads.keeping_newest():
                self._send(kept.block, kept.bad)
                self._drain()
            if self._progress.end >= kept.block.end and not self._is_anothers:
                lost += entries
        if self._token and lost:
            note_sent_again(self._client, self._stream, self._manifest, self._shard, self._token, lost)

    def _lost_behind(self, begin: int) -> ShardMismatch:
        found = self._progress.end
        return self._lost(found, f"is committed up to {found}, the next block starts at {begin}", begin)

    def _lost(self, first: int, fault: str, begin: int = 0) -> ShardMismatch:
        """Return the error for samples from ``first`` on that the server confirmed and has lost."""
        end, server = max(begin, self._answered), self._client.node_of(self._roster).server
        remedy = "write those again that you have" if self._token else "abandon the epoch and produce it again"
        return ShardMismatch(
            f"shard {self._shard} of epoch {self._manifest.epoch} of {self._stream.name!r} {fault}: the server lost "
            f"data, and with it {end - first} samples that it had confirmed (offsets {first}-{end - 1}, noticed at "
            f"{utc(int(time.time() * 1000))}, at {server}); {remedy}",
            (first, end),
        )

    def _require_writable(self) -> None:
        if not self._progress.state:
            self._open_again_here()
        if self._progress.state != self._manifest.live_state.encode():
            if damage := state_damage(self._partition, self._manifest, self._progress.state):
                raise damage
            self._refuse_state(self._progress.state.decode())
        if self._is_anothers:
            raise self._taken()

    def _open_again_here(self) -> None:
        """Open the epoch again if the partition's server alone lost it."""
        found = find_manifest(self._client, self._stream, self._manifest.epoch)
        if found is not None and found.id == self._manifest.id and found.state != ABANDONED:
            with suppress(EpochNotFound):  # it is released at this moment
                open_again(self._client, self._stream, found)
                self._progress = self._look()

    def _taken(self) -> ShardTaken:
        return ShardTaken(
            f"shard {self._shard} of epoch {self._manifest.epoch} of {self._stream.name!r} is another writer's: the "
            "server lost data and gave the shard out again"
        )

    def _refuse_state(self, state: str) -> NoReturn:
        """Raise the error for an epoch that takes no more samples, or is not the planned one."""
        require_there(self._client, self._stream)
        word, _, manifest_id = state.partition(":")
        name = f"epoch {self._manifest.epoch} of {self._stream.name!r}"
        if manifest_id == self._manifest.id or not self._is_epoch_lost():
            raise EpochAbandoned(f"{name} takes no more samples (it is {word or 'released'})")
        is_new = "; another one has its number since" if manifest_id else ""
        error = ShardTaken if self._token else EpochAbandoned
        raise error(f"{name} is gone: the server came back from before it was opened{is_new}; start again")

    def _is_epoch_lost(self) -> bool:
        """Return True if the epoch is neither there nor released; a release takes the manifest last."""
        found = find_manifest(self._client, self._stream, self._manifest.epoch)
        is_there = found is not None and found.id == self._manifest.id
        return not is_there and not is_released(self._client, self._stream, self._manifest.epoch)

    def _stored(self, block: Block) -> Fields | None:
        """Return the entry's fields, or None if the disk is full, so that the next try waits."""
        try:
            return self._payloads.fields_of(block)
        except FolderFull as error:
            self._admission.note_full_folder(str(error))
            return None

    def _execute(self, block: Block, bad: Mapping[int, str], fields: Fields) -> SentBlock:
        """Send the block's transaction."""
        said = {offset: json.dumps({"why": shortened(why, 500)}) for offset, why in bad.items()}
        segment, nbytes = self._payloads.segment_of(block), self._payloads.nbytes_of(block, fields)
        sealed, seal = self._payloads.seal_behind(segment, "" if self._sent is None else self._sent.segment)
        where = self._keys, self._manifest, self._shard
        commands = commit_commands(*where, block, fields, bad=said, nbytes=nbytes, segment=segment, writer=self._token)
        must_reach = self._unconfirmed.level(is_elsewhere=self._is_elsewhere)
        level = self._unconfirmed.question(must_reach, block.nbytes)
        self._channel.send([*commands, *seal, *level.commands(ANSWER_MS)])
        return SentBlock(block, bad, len(commands), nbytes, segment, sealed, level, must_reach)

    def _collect(self, sent: SentBlock) -> bool:
        """Read the answers. Returns False if the block has to be sent again, because another run committed or memory
        was short.
        """
        due = sent.take_replies()
        if not due:  # they were read before: it was refused, and sending it again was interrupted
            return False
        behind = bool(sent.sealed)
        answers = self._channel.read_all(due + behind + len(sent.level.commands()))
        replies, safety = answers[:due], answers[due + behind :]
        if behind:
            self._payloads.sealed(sent.sealed, answers[due])
        refused = [reply for reply in replies if isinstance(reply, Refused)]
        if any(is_out_of_memory(reply) for reply in refused):
            self._admission.note_full_server()
            return False
        outcome = replies[-1] if due > 1 else replies  # a block of holes only is sent without MULTI
        if isinstance(outcome, list):
            sent.appended(outcome)
            if is_sealed(outcome[-1]):
                self._payloads.leave_segment()
                return False
            raise_errors(outcome, self._client, self._keys)
            live_state = self._manifest.live_state
            is_committed, self._progress = read_commit(outcome[-1], sent.block, live_state, self._token, self._roster)
            if is_committed:
                self._note_committed(sent, safety)
            return is_committed
        raise_errors(replies, self._client, self._keys)
        raise PenstockError(f"EXEC answered {outcome!r:.80}, expected a list")

    def _note_committed(self, sent: SentBlock, safety: Sequence[Reply]) -> None:
        """Keep a block that is committed until it is as safe as the durability says, and take the answers on that."""
        end = self._progress.end
        self._answered = max(self._answered, end)
        block = sent.block
        said = sent.nbytes, tuple(block.holes), sent.segment, self._token
        self._own[block.end] = IndexRecord(block.end, sent.entry_id, block.first, block.count, *said)
        self._unconfirmed.committed(block, sent.bad, sent.must_reach, sent.entry_id)
        self._note_safety(sent.level, end, safety)

    def _note_safety(self, level: Durability, end: int, safety: Sequence[Reply]) -> str:
        """Take the answers to the question behind an offset. Returns what is missing, or ''."""
        lacking = level.shortfall(safety, self._client)
        if safety:
            self._unconfirmed.answered(end, is_confirmed=not lacking)
        first = self._unconfirmed.first
        self._note_settled(self._answered if first is None else first)
        return lacking

    def _note_settled(self, end: int) -> None:
        """Note the offset below which nothing could be sent again: what is lost there is lost."""
        if end:
            self._resources.loss_detector.committed(self._manifest, self._shard, end, self._token)

    def _look(self) -> ShardProgress:
        self._channel.send(look_commands(self._partition, self._manifest.epoch, self._shard))
        replies = self._channel.read_all(3)
        return read_look(replies, self._client, self._partition, self._manifest.epoch, self._shard)

    def _wait_for_admission(self, nbytes: int) -> None:
        try:
            while not self._admission.admit(nbytes, self._progress.held_bytes):
                self._wait = wait = self._wait or Wait(self._notify, clock=self._clock, server=self._client.where)
                wait.because("room", self._admission.why)
                self._payloads.seal_now()  # files that may be used again are space, too
                is_over = self._room_wait_s is not None and wait.seconds > self._room_wait_s
                if is_over or self._should_stop():
                    raise BudgetFull(self._admission.why())
                time.sleep(self._admission.pause_s())
                self._progress = self._look()
        finally:
            self._admission.end_wait()

    def _reconnect(self, error: ServerUnavailable) -> None:
        self._was_cut = True
        self._channel.close()
        self._come_back(error)

    def _begin(self) -> None:
        """Read what is committed, on the connection of an earlier shard or on a new one."""
        spare = self._resources.take_channel(self._client.node_of(self._roster).where)
        if spare is not None:
            with suppress(ServerUnavailable):  # the server may have closed it; a new one shows an outage
                return self._begin_on(spare)
        return self._begin_on(open_channel(self._client, self._roster))

    @property
    def _is_elsewhere(self) -> bool:
        """Return whether the map names another server than the one that this connection leads to."""
        node = self._client.node_of(self._roster)
        return (node.where, node.server) != (self._channel.where, self._server)

    def _begin_on(self, channel: Channel) -> None:
        self._channel = channel
        self._resources.use(channel)
        self._server = self._client.node_of(self._roster).server
        try:
            # first, so that lost samples are reported before a writer writes them again
            self._resources.loss_detector.check()
            self._progress = self._look()
        except BaseException:
            channel.close()
            raise

    def _resume(self) -> None:
        """Begin again, on a server that may have forgotten that this writer has the shard."""
        self._begin()
        if self._token:
            self._is_taken = not retake_shard(self._client, self._stream, self._manifest, self._shard, self._token)

    def _come_back(self, error: ServerUnavailable) -> None:
        """Begin again as soon as the server answers. The outage counts until the next commit."""
        while True:
            self._outage.bear(error)
            try:
                self._resume()
                break
            except ServerUnavailable as again:
                error = again

    def _confirm(self) -> None:
        """Return once what is committed is as safe as the stream's durability says.

        `auto` waits for a limited time for a replica that followed before. Raises DurabilityLost if the job must stop.
        """
        wait, roster = Wait(self._notify, clock=self._clock), self._roster
        while True:
            try:
                self._restore(max(self._answered, self._found))
                level, end = self._unconfirmed.level(is_elsewhere=self._is_elsewhere), self._progress.end
                if not level.commands() or self._unconfirmed.confirmed >= end:
                    return
                # the connection may have written nothing yet, and WAIT would say nothing then
                self._channel.send([touch_command(roster), *level.commands()])
                replies = self._channel.read_all(1 + len(level.commands()))
                raise_errors(replies[:1], self._client, [roster])
                lacking = self._note_safety(level, end, replies[1:])
                self._outage.over()
            except ServerUnavailable as error:
                self._reconnect(error)
                continue
            if lacking and not bear_shortfall(wait, self._durability, lacking, self._should_stop):
                self._resources.replicas.lost(roster)
                self._notify(unconfirmed_notice(self._stream.name, self._client.node_of(roster).server))
