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
    EpochAbandoned,
    EpochNotFound,
    PenstockError,
    ServerUnavailable,
    ShardMismatch,
    Unauthorized,
)
from penstock_common.printable import shortened
from penstock_common.server.channel import Reply
from penstock_common.stream.commands import Refused, parse_id
from penstock_common.stream.entries import (
    IndexRecord,
    commit_commands,
    index_records,
    is_indexed,
    is_out_of_memory,
    is_sealed,
    raise_errors,
    read_commit,
)
from penstock_common.stream.feeds import retake_shard
from penstock_common.stream.groups.losses import note_sent_again, utc
from penstock_common.stream.manifest import (
    ABANDONED,
    UnreplicatedWrites,
    find_manifest,
    open_again,
    state_damage,
)
from penstock_common.stream.servers.durability import Durability, bear_shortfall, touch_command, unconfirmed_notice
from penstock_common.stream.streams import is_released, require_there
from penstock_common.waiting import Wait
from penstock_common.wire.block import Block, sizes_of
from penstock_common.wire.codec import Fields
from penstock_common.wire.spec import Spec
from penstock_producer.write.admission import AdmissionControl, QuotaWait
from penstock_producer.write.completion import find_forged, first_fault, read_index
from penstock_producer.write.payloads import FolderFull, ShardPayloads
from penstock_producer.write.resources import SharedResources
from penstock_producer.write.target import KnownProgress, ShardConnection, ShardTarget
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
            committer._connection.close()
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
        self, target: ShardTarget, resources: SharedResources, *, checksum: bool, room_wait_s: float | None,
        should_stop: Callable[[], bool], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Begin to append to one shard, after what is committed of it.

        Args:
            target: Shard to write to.
            resources: Resources that the shards of one writer share, and where lines go.
            checksum: Whether entries carry a checksum.
            room_wait_s: Longest wait for quota, in seconds; None waits as long as it takes.
            should_stop: Asked during a wait for quota; True ends it with BudgetFull.
            clock: Monotonic clock.
        """
        stream = target.stream
        stream.compression.require(stream.spec)  # the first sample may have fixed the spec
        self._target, self._resources, self._clock = target, resources, clock
        self._connection = ShardConnection(target, resources, clock)
        self._admission = AdmissionControl(target, clock, resources)
        self._quota_wait = QuotaWait(resources, clock, room_wait_s, should_stop)
        self._sent: SentBlock | None = None
        self._payloads = ShardPayloads(target, checksum=checksum)
        durability = Durability.parse(stream.durability)
        self._unconfirmed = UnconfirmedBlocks(durability, resources.replicas, target.partition.roster, clock)
        self._progress = KnownProgress(target.token)
        self.unreplicated: UnreplicatedWrites | None = None
        """The entries that no replica had when the shard was found whole, if its durability is `auto`."""
        try:
            self._progress.take(self._connection.open())
        except ServerUnavailable as error:
            self._come_back(error)

    @property
    def position(self) -> int:
        """The offset after the last one known to be committed. In another writer's shard, the offset after this
        writer's last sample.
        """
        return self._progress.position

    @property
    def left_out(self) -> int:
        """The samples that were not sent, because another run of the shard had committed their offsets."""
        return self._progress.left_out

    def blocks_to_move(self) -> list[tuple[Block, Mapping[int, str]]]:
        """Return what was sent to a shard that is another writer's, for this writer's next shard.

        Raises ShardMismatch where the server lost samples that it had committed there, and that are not kept.
        """
        kept, sent, target, answered = self._unconfirmed.all(), self._sent, self._target, self._progress.answered
        if answered:
            records = index_records(target.client, target.partition, target.epoch, target.number)
            if any(record.writer == target.token and record.end >= answered for record in records):
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
            self._connection.close()  # with answers under way: no other request can use it
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
                at = self._target.client, self._target.partition, self._target.epoch, self._target.number
                if sent.entry_id and not is_indexed(*at, sent.block.end, sent.entry_id):
                    self._target.client.xdel(self._target.partition.entries(self._target.epoch), sent.entry_id)

    def _has_committed(self) -> None:
        self._sent = None
        self._quota_wait.over()
        self._connection.over()

    @_with_whole_channel
    def require_whole(self, end: int) -> None:
        """Raise unless the shard holds what its writers committed up to ``end``. Call it once every commit is answered.

        Raises ShardMismatch if records were lost or another program wrote them, ShardTaken if the shard is another
        writer's, and StreamDeleted if the stream is gone.
        """
        target = self._target
        while True:
            try:
                records = read_index(self._connection.channel, target)
                break
            except ServerUnavailable:
                self._connection.close()
                try:
                    self._resume()  # a connection that was closed is not an outage
                except ServerUnavailable as error:
                    self._come_back(error)
                self._restore(self._progress.committed)
        if self._progress.is_anothers or (records and all(record.writer != target.token for record in records)):
            raise self._taken()
        fault = first_fault(records, end, target.token)
        if fault:  # it may have been repaired since, which is rare
            records = list(index_records(target.client, target.partition, target.epoch, target.number))
            fault = first_fault(records, end, target.token)
        if not fault:
            others = self._progress.of_others(records)
            forged = find_forged(target, others) if others else None
            fault = "" if forged is None else f"the record {forged.end}-0 names an entry that is not its own"
        if fault:
            require_there(target.client, target.stream)  # a deletion removes the index, too
            raise self._not_whole(fault)
        self.unreplicated = self._unreplicated_in(records)

    def _unreplicated_in(self, records: Sequence[IndexRecord]) -> UnreplicatedWrites | None:
        """Return the entries that `auto` wrote and no replica confirmed, if there are some."""
        ids = [r.entry_id for r in records if r.entry_id and r.end > self._unconfirmed.confirmed]
        if not self._unconfirmed.durability.is_auto or not ids:
            return None
        times = [parse_id(entry_id)[0] for entry_id in ids]
        return UnreplicatedWrites(self._target.partition.number, min(times), max(times), self._target.server)

    def _not_whole(self, fault: str) -> ShardMismatch:
        name = self._target.stream.name
        return ShardMismatch(
            f"the index of {self._target} is not what its writers committed ({fault}): the server lost data, or "
            f"somebody else wrote there; see `penstock audit {name}`, then abandon the epoch "
            f"(`penstock epochs abandon {name} {self._target.epoch}`) and produce it again"
        )

    def finish(self) -> None:
        """End the shard once everything is committed; the connection goes to the next shard."""
        self._note_settled(self._progress.answered)
        self._connection.give_back()
        self.close()

    def close(self) -> None:
        """Close the connection. What was sent and not answered may or may not be committed."""
        self._connection.close()
        self._payloads.close()
        if self._sent is None:  # else the cleaner finds out
            with suppress(PenstockError):
                self._payloads.seal_now()

    def _send(self, block: Block, bad: Mapping[int, str]) -> None:
        """Wait for quota, and send the part of the block that is not committed yet."""
        while True:
            self._restore(min(block.first, self._progress.answered))
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
        self._require_writable()
        if self._progress.end < block.first:
            raise self._lost_behind(block.first)
        return self._progress.missing_part(block)

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
                self._resources.notify(
                    f"the server came back without samples {self._progress.end}-{upto - 1} of {self._target}: sending "
                    "them again"
                )
            entries = kept.entries[:]
            with self._payloads.keeping_newest():
                self._send(kept.block, kept.bad)
                self._drain()
            if self._progress.end >= kept.block.end and not self._progress.is_anothers:
                lost += entries
        target = self._target
        if target.token and lost:
            note_sent_again(target.client, target.stream, target.manifest, target.number, target.token, lost)

    def _lost_behind(self, begin: int) -> ShardMismatch:
        found = self._progress.end
        return self._lost(found, f"is committed up to {found}, the next block starts at {begin}", begin)

    def _lost(self, first: int, fault: str, begin: int = 0) -> ShardMismatch:
        """Return the error for samples from ``first`` on that the server confirmed and has lost."""
        end = max(begin, self._progress.answered)
        remedy = "write those again that you have" if self._target.token else "abandon the epoch and produce it again"
        return ShardMismatch(
            f"{self._target} {fault}: the server lost data, and with it {end - first} samples that it had confirmed "
            f"(offsets {first}-{end - 1}, noticed at {utc(int(time.time() * 1000))}, at {self._target.server}); "
            f"{remedy}",
            (first, end),
        )

    def _require_writable(self) -> None:
        if not self._progress.state:
            self._open_again_here()
        target = self._target
        if self._progress.state != target.manifest.live_state.encode():
            if damage := state_damage(target.partition, target.manifest, self._progress.state):
                raise damage
            self._refuse_state(self._progress.state.decode())
        if self._progress.is_anothers:
            raise self._taken()

    def _open_again_here(self) -> None:
        """Open the epoch again if the partition's server alone lost it."""
        target = self._target
        found = find_manifest(target.client, target.stream, target.epoch)
        if found is not None and found.id == target.manifest.id and found.state != ABANDONED:
            with suppress(EpochNotFound):  # it is released at this moment
                open_again(target.client, target.stream, found)
                self._progress.take(self._connection.look())

    def _taken(self) -> ShardTaken:
        return ShardTaken(f"{self._target} is another writer's: the server lost data and gave the shard out again")

    def _refuse_state(self, state: str) -> NoReturn:
        """Raise the error for an epoch that takes no more samples, or is not the planned one."""
        target = self._target
        require_there(target.client, target.stream)
        word, _, manifest_id = state.partition(":")
        name = f"epoch {target.epoch} of {target.stream.name!r}"
        if manifest_id == target.manifest.id or not self._is_epoch_lost():
            raise EpochAbandoned(f"{name} takes no more samples (it is {word or 'released'})")
        is_new = "; another one has its number since" if manifest_id else ""
        error = ShardTaken if target.token else EpochAbandoned
        raise error(f"{name} is gone: the server came back from before it was opened{is_new}; start again")

    def _is_epoch_lost(self) -> bool:
        """Return True if the epoch is neither there nor released; a release takes the manifest last."""
        target = self._target
        found = find_manifest(target.client, target.stream, target.epoch)
        is_there = found is not None and found.id == target.manifest.id
        return not is_there and not is_released(target.client, target.stream, target.epoch)

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
        target = self._target
        commands = commit_commands(
            target.commit_keys, target.manifest, target.number, block, fields, bad=said, nbytes=nbytes, segment=segment,
            writer=target.token,
        )  # fmt: skip
        must_reach = self._unconfirmed.level(is_elsewhere=self._connection.is_elsewhere)
        level = self._unconfirmed.question(must_reach, block.nbytes)
        self._connection.channel.send([*commands, *seal, *level.commands(ANSWER_MS)])
        return SentBlock(block, bad, len(commands), nbytes, segment, sealed, level, must_reach)

    def _collect(self, sent: SentBlock) -> bool:
        """Read the answers. Returns False if the block has to be sent again, because another run committed or memory
        was short.
        """
        due = sent.take_replies()
        if not due:  # they were read before: it was refused, and sending it again was interrupted
            return False
        target, behind = self._target, bool(sent.sealed)
        answers = self._connection.channel.read_all(due + behind + len(sent.level.commands()))
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
            raise_errors(outcome, target.client, target.commit_keys)
            is_committed, progress = read_commit(
                outcome[-1], sent.block, target.manifest.live_state, target.token, target.partition.roster
            )
            self._progress.take(progress)
            if is_committed:
                self._note_committed(sent, safety)
            return is_committed
        raise_errors(replies, target.client, target.commit_keys)
        raise PenstockError(f"EXEC answered {outcome!r:.80}, expected a list")

    def _note_committed(self, sent: SentBlock, safety: Sequence[Reply]) -> None:
        """Keep a block that is committed until it is as safe as the durability says, and take the answers on that."""
        block = sent.block
        said = sent.nbytes, tuple(block.holes), sent.segment, self._target.token
        self._progress.note_committed(IndexRecord(block.end, sent.entry_id, block.first, block.count, *said))
        self._unconfirmed.committed(block, sent.bad, sent.must_reach, sent.entry_id)
        self._note_safety(sent.level, self._progress.end, safety)

    def _note_safety(self, level: Durability, end: int, safety: Sequence[Reply]) -> str:
        """Take the answers to the question behind an offset. Returns what is missing, or ''."""
        lacking = level.shortfall(safety, self._target.client)
        if safety:
            self._unconfirmed.answered(end, is_confirmed=not lacking)
        first = self._unconfirmed.first
        self._note_settled(self._progress.answered if first is None else first)
        return lacking

    def _note_settled(self, end: int) -> None:
        """Note the offset below which nothing could be sent again: what is lost there is lost."""
        if end:
            target = self._target
            self._resources.loss_detector.committed(target.manifest, target.number, end, target.token)

    def _wait_for_admission(self, nbytes: int) -> None:
        try:
            while not self._admission.admit(nbytes, self._progress.held_bytes):
                self._payloads.seal_now()  # files that may be used again are space, too
                self._quota_wait.pause(self._admission)
                self._progress.take(self._connection.look())
        finally:
            self._admission.end_wait()

    def _reconnect(self, error: ServerUnavailable) -> None:
        self._progress.note_cut()
        self._connection.close()
        self._come_back(error)

    def _resume(self) -> None:
        """Begin again, on a server that may have forgotten that this writer has the shard."""
        self._progress.take(self._connection.open())
        target = self._target
        if target.token:
            at = target.client, target.stream, target.manifest, target.number
            self._progress.note_taken(is_taken=not retake_shard(*at, target.token))

    def _come_back(self, error: ServerUnavailable) -> None:
        """Begin again as soon as the server answers. The outage counts until the next commit."""
        while True:
            self._connection.bear(error)
            try:
                self._resume()
                break
            except ServerUnavailable as again:
                error = again

    def _confirm(self) -> None:
        """Return once what is committed is as safe as the stream's durability says.

        `auto` waits for a limited time for a replica that followed before. Raises DurabilityLost if the job must stop.
        """
        target, wait = self._target, Wait(self._resources.notify, clock=self._clock)
        roster = target.partition.roster
        while True:
            try:
                self._restore(self._progress.committed)
                level, end = self._unconfirmed.level(is_elsewhere=self._connection.is_elsewhere), self._progress.end
                if not level.commands() or self._unconfirmed.confirmed >= end:
                    return
                # the connection may have written nothing yet, and WAIT would say nothing then
                replies = self._connection.ask([touch_command(roster), *level.commands()])
                raise_errors(replies[:1], target.client, [roster])
                lacking = self._note_safety(level, end, replies[1:])
                self._connection.over()
            except ServerUnavailable as error:
                self._reconnect(error)
                continue
            if lacking and not bear_shortfall(
                wait, self._unconfirmed.durability, lacking, self._quota_wait.should_stop
            ):
                self._resources.replicas.lost(roster)
                self._resources.notify(unconfirmed_notice(target.stream.name, target.server))
