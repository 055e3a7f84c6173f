"""The losses of a server, as its clients know them: a server that restarts with older data cannot know what it forgot.

A writer remembers how far each shard was committed, and a member which entries it acknowledged. When the server comes
back as another run, a `LossDetector` compares this with the indexes, reports the difference, and notes it in the
epoch's manifest. `penstock audit` reads the notes.

A feed's writer may send the same samples again, in new entries. It notes the ids of the entries that were lost. That
settles the note of a member that had acknowledged these entries and no others.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Protocol
from zlib import crc32

from redis.exceptions import ResponseError

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.server.client import RestartDetector, read_run_id
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, readable, run_script
from penstock_common.stream.entries import index_ends, index_heads, indexed_ids, last_given
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import LAST, PartitionKeys
from penstock_common.stream.manifest import Manifest, begun_shards, find_manifest
from penstock_common.stream.streams import Stream, is_released
from penstock_common.waiting import Notify

_NOTE_LOSS = load_script("note_loss")

FIELD = "lost:"
"""Fields of a manifest, and of a stream's meta for epochs that have no manifest any more, begin with it."""
GONE, SENT_AGAIN = "gone:", "again:"
"""Fields of a manifest: the entries of a member's note, and entries whose samples their writer has sent again."""
MOST_IDS = 256
"""The most entries that are named with a note. Failovers lose few. A note without names is never settled."""
MOST_NOTES = 64
"""Notes kept in one hash: more of them would tell an operator nothing new."""
MOST_SHARDS = 1024
"""Shards whose end a writer remembers. A server loses its newest writes, so the newest shards are enough."""
MOST_ENTRIES = 4096
"""Acknowledged entries that a member remembers, for the same reason."""
MOST_EPOCHS = 16
MOST_SAID = 5
"""The most losses that one notice lists."""
COMMITTED, ACKNOWLEDGED = "committed", "acknowledged"


class LeasedEntry(Protocol):
    """The part of a lease that a loss detector reads: the entry's place."""

    partition: int
    shard: int
    entry_id: bytes


class AcknowledgedSamples(NamedTuple):
    """Samples of one entry that were trained on. They are in the offsets [first, end)."""

    lease: LeasedEntry
    first: int
    end: int
    samples: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Samples that the server confirmed or gave out, and no longer has."""

    epoch: int
    manifest: str
    """Id of the epoch's manifest."""
    shard: int
    first: int
    end: int
    """The end of the offsets [first, end)."""
    samples: int
    was: str
    """The state that the server had confirmed: ``committed`` or ``acknowledged``."""
    by: str
    """The process that noticed: ``writer <host>-<pid>``, or ``member <group>/<member>``."""
    at_ms: int
    """The time, by the clock of that process."""

    def __str__(self) -> str:
        """Return one clause without the epoch, for the audit and the notice."""
        where = f"shard {self.shard} offsets {self.first}-{self.end - 1}"
        count = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        return f"{where}: {count} that {self.by} had {self.was}, noticed at {utc(self.at_ms)}"


@dataclass(slots=True)
class _Entry:
    """An acknowledged entry, or the acknowledged part of it."""

    manifest_id: str
    shard: int
    first: int
    end: int
    samples: int

    def extend(self, first: int, end: int, samples: int) -> None:
        """Add another acknowledged part."""
        self.first, self.end = min(self.first, first), max(self.end, end)
        self.samples += samples


class LossDetector:
    """A memory of limited size of what a server confirmed to one client, which is compared with a server that came
    back.

    Args:
        client: control connection. `check` raises its failures, so a thread that must not block gives one without
            patience.
        stream: the stream that is written or read.
        by: the name of the client, as in `Loss.by`.
        notify: where to report losses.
        clock: seconds since 1970.
    """

    def __init__(
        self, client: Client, stream: Stream, by: str, notify: Notify, clock: Callable[[], float] = time.time
    ) -> None:
        self._client, self._stream, self._by, self._notify, self._clock = client, stream, by, notify, clock
        self._watch = RestartDetector(client)
        self._comparing = threading.Lock()
        self._lock = threading.Lock()
        self._ends: OrderedDict[tuple[int, int], tuple[str, int, str]] = OrderedDict()
        """(epoch, shard) -> manifest id, committed end, the writer's token."""
        self._entries: OrderedDict[tuple[int, int, bytes], _Entry] = OrderedDict()
        """(epoch, partition, entry id) -> the acknowledged part of it."""
        self._positions: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """Epoch -> manifest id, and the position below which a rank acknowledged everything."""

    # --- what it is told ---

    def committed(self, manifest: Manifest, shard: int, end: int, token: str = "") -> None:
        """Remember that a shard is committed up to an offset.

        ``token`` is that of a feed's writer, whose shard it is.
        """
        with self._lock:
            self._ends[manifest.epoch, shard] = manifest.id, end, token
            if len(self._ends) > MOST_SHARDS:
                self._ends.popitem(last=False)

    def acknowledged(self, manifest: Manifest, entries: Iterable[AcknowledgedSamples]) -> None:
        """Remember samples that were trained on."""
        with self._lock:
            for lease, first, end, samples in entries:
                key = manifest.epoch, lease.partition, lease.entry_id
                entry = self._entries.get(key)
                if entry is None:
                    self._entries[key] = _Entry(manifest.id, lease.shard, first, end, samples)
                    continue
                entry.extend(first, end, samples)
            while len(self._entries) > MOST_ENTRIES:
                self._entries.popitem(last=False)

    def reached(self, manifest: Manifest, position: int) -> None:
        """Remember how far a rank acknowledged an epoch whose entries it does not know."""
        with self._lock:
            _, before = self._positions.get(manifest.epoch, ("", 0))
            self._positions[manifest.epoch] = manifest.id, max(before, position)
            if len(self._positions) > MOST_EPOCHS:
                self._positions.popitem(last=False)

    # --- comparing ---

    def check(self) -> None:
        """Compare with the server, if it may be another run than at the last call.

        The first call only learns the run. It costs nothing while no connection was made. Raises ServerUnavailable. Any
        other failure is reported and ends nothing, because training and writing continue without a loss detector.
        """
        with self._comparing:
            try:
                self._watch.check(self._compare)
            except ServerUnavailable:
                raise
            except (PenstockError, ResponseError) as error:
                self._notify(
                    f"the server of {self._stream.name!r} came back, and what it may have lost cannot be found or "
                    f"noted ({error}): run `penstock audit {self._stream.name}`"
                )

    def _compare(self) -> None:
        if self._client.hget(self._stream.keys.meta, "id") != self._stream.id.encode():
            return  # the stream was deleted, and all its users get that error
        with self._lock:
            epochs = {epoch for epoch, _ in self._ends} | {epoch for epoch, _, _ in self._entries} | {*self._positions}
        for epoch in sorted(epochs):
            self._compare_epoch(epoch)

    def _compare_epoch(self, epoch: int) -> None:
        manifest = find_manifest(self._client, self._stream, epoch)
        entries = self._entries_lost(epoch, manifest)
        losses = [*self._ends_lost(epoch, manifest), *entries, *self._positions_lost(epoch, manifest)]
        if losses and self._is_released(epoch, manifest):
            self._forget(epoch)
            return
        for loss in losses:
            note_loss(self._client, self._stream, loss, entries.get(loss, []))
        if losses:
            self._say(epoch, losses)
        for loss in losses:
            self._forget_lost(loss)

    def _ends_lost(self, epoch: int, manifest: Manifest | None) -> list[Loss]:
        """Return the shards that a writer had committed further than their indexes now reach."""
        with self._lock:
            confirmed = {shard: ends for (number, shard), ends in self._ends.items() if number == epoch}
        mine = [shard for shard, (of, _, _) in confirmed.items() if manifest and manifest.id == of]
        heads = index_heads(self._client, self._stream, epoch, mine)
        losses = []
        for shard, (of, end, token) in confirmed.items():
            found, writer = heads.get(shard, (0, token))
            if writer != token:
                found = 0  # the shard was given out again: nothing in it is this writer's
            if found < end:
                losses.append(self._loss(epoch, of, shard, found, end, end - found, COMMITTED))
        return losses

    def _entries_lost(self, epoch: int, manifest: Manifest | None) -> dict[Loss, list[bytes]]:
        """Return acknowledged entries that no index names: they are gone, or others are in their place."""
        shards: dict[tuple[str, int], dict[bytes, _Entry]] = {}
        with self._lock:
            for (number, _, entry_id), entry in self._entries.items():
                if number == epoch:
                    shards.setdefault((entry.manifest_id, entry.shard), {})[entry_id] = entry
        losses = dict[Loss, list[bytes]]()
        for (of, shard), entries in shards.items():
            there: set[bytes] = set()
            if manifest is not None and manifest.id == of:
                first = min(entry.first for entry in entries.values())
                there = indexed_ids(self._client, self._stream.partition_of(shard), epoch, shard, first)
            ids = [entry_id for entry_id in entries if entry_id not in there]
            if ids:
                gone = [entries[entry_id] for entry_id in ids]
                low, high = min(entry.first for entry in gone), max(entry.end for entry in gone)
                samples = sum(entry.samples for entry in gone)
                losses[self._loss(epoch, of, shard, low, high, samples, ACKNOWLEDGED)] = ids
        return losses

    def _positions_lost(self, epoch: int, manifest: Manifest | None) -> list[Loss]:
        """Return what a rank acknowledged after the end of what is committed."""
        with self._lock:
            of, position = self._positions.get(epoch, ("", 0))
        if not position:
            return []
        if manifest is None or manifest.id != of:
            return [self._loss(epoch, of, 0, 0, position, position, ACKNOWLEDGED)]
        ends = index_ends(self._client, self._stream, epoch, begun_shards(self._client, self._stream, manifest))
        shard, end, committed = committed_front(manifest.sizes, list(ends.values()))
        lost = min(position, position if manifest.samples is None else manifest.samples) - committed
        return [self._loss(epoch, of, shard, end, end + lost, lost, ACKNOWLEDGED)] if lost > 0 else []

    def _is_released(self, epoch: int, manifest: Manifest | None) -> bool:
        """Return whether an epoch lacks something because retention removed it or an operator discarded it.

        A release marks the rosters first and unmarks them last, so this is asked after the indexes were read.
        """
        if manifest is None:
            return is_released(self._client, self._stream, epoch)
        if epoch in load_roster(self._client, self._stream.partitions[0]).retiring:
            return True
        return find_manifest(self._client, self._stream, epoch) is None

    def _loss(self, epoch: int, of: str, shard: int, first: int, end: int, samples: int, was: str) -> Loss:
        return Loss(epoch, of, shard, first, end, samples, was, self._by, int(self._clock() * 1000))

    def _say(self, epoch: int, losses: Sequence[Loss]) -> None:
        name = self._stream.name
        more = f"; and {len(losses) - MOST_SAID} more losses" if len(losses) > MOST_SAID else ""
        self._notify(
            f"the server came back without its newest writes: of epoch {epoch} of {name!r} it lost "
            f"{'; '.join(map(str, losses[:MOST_SAID]))}{more}. `penstock audit {name}` reports it"
        )

    def _forget_lost(self, loss: Loss) -> None:
        """Forget what was reported: the next comparison is with what the server has now."""
        with self._lock:
            if loss.was == COMMITTED:
                self._ends.pop((loss.epoch, loss.shard), None)
                return
            self._positions.pop(loss.epoch, None)
            for key, entry in list(self._entries.items()):
                is_of = key[0] == loss.epoch and (entry.manifest_id, entry.shard) == (loss.manifest, loss.shard)
                if is_of and loss.first <= entry.first and entry.end <= loss.end:
                    del self._entries[key]

    def _forget(self, epoch: int) -> None:
        with self._lock:
            self._positions.pop(epoch, None)
            for shard in [key for key in self._ends if key[0] == epoch]:
                del self._ends[shard]
            for entry in [key for key in self._entries if key[0] == epoch]:
                del self._entries[entry]


class ServerRuns:
    """The run of each server of a member at its join.

    A server that came back older may have lost the member. Its error then names that server.

    Args:
        client: control connection. Failures are not waited for.
        stream: the stream that is read.
        servers: the numbers of the partitions on each server.
        clock: seconds since 1970.
    """

    def __init__(
        self, client: Client, stream: Stream, servers: Sequence[Sequence[int]], clock: Callable[[], float] = time.time
    ) -> None:
        self._client, self._stream, self._clock = client.impatient(), stream, clock
        self._servers = servers
        self._ids: dict[int, str | None] = {}
        """Partition -> the run of its server at the join."""

    def learn(self) -> None:
        """Remember the runs of now. Raises ServerUnavailable."""
        for numbers in self._servers:
            self._ids |= dict.fromkeys(numbers, self._run_of(numbers[0]))

    def is_replaced(self, partition: PartitionKeys) -> bool:
        """Return whether the server of a partition was restarted or replaced since the join.

        Raises ServerUnavailable.
        """
        joined, now = self._ids.get(partition.number), self._run_of(partition.number)
        return joined is not None and now is not None and joined != now

    def explained(self, error: PenstockError, partition: PartitionKeys) -> PenstockError:
        """Return an error of a partition's roster, with server and time if the server was restarted or replaced."""
        with suppress(ServerUnavailable):
            if self.is_replaced(partition):
                where, at = self._client.node_of(partition.roster).where, utc(int(self._clock() * 1000))
                return type(error)(
                    f"{error}. The server {where}, which has partition {partition.number} of {self._stream.name!r}, "
                    f"was restarted or replaced since this process joined (noticed at {at}), and may have lost its "
                    "newest writes"
                )
        return error

    def _run_of(self, number: int) -> str | None:
        return read_run_id(self._client, self._stream.partitions[number].roster)


def committed_front(sizes: Sequence[int] | None, ends: Sequence[int]) -> tuple[int, int, int]:
    """Return the last shard that is reached without a gap, where it ends, and how many positions are committed.

    Args:
        sizes: planned samples of each shard; None without a plan. Then no gap can be seen, and all is counted.
        ends: committed end of each shard.
    """
    committed = 0
    for shard, end in enumerate(ends):
        committed += end
        if sizes is not None and end < sizes[shard]:
            return shard, end, committed
    return max(len(ends) - 1, 0), ends[-1] if ends else 0, committed


def describe_loss(client: Client, stream: Stream, manifest: Manifest, missing: Sequence[tuple[int, int, int]]) -> str:
    """Return which server lost which samples of a complete epoch, and since when, or '' if no server lost any.

    Args:
        client: Control connection.
        stream: The stream.
        manifest: The epoch, which counts the shards as complete.
        missing: (shard, first, end) of samples that no member can deliver. A server lost those that no index names.
    """
    ends, said = index_ends(client, stream, manifest.epoch, [shard for shard, _, _ in missing]), []
    for partition in stream.partitions:
        mine = [one for one in missing if stream.partition_of(one[0]) == partition]
        lost = [(shard, max(lo, ends[shard]), hi) for shard, lo, hi in mine if ends[shard] < hi]
        if not lost:
            continue
        ranges = ", ".join(f"shard {shard} offsets {lo}-{hi - 1}" for shard, lo, hi in lost[:MOST_SAID])
        at_ms, _ = last_given(client, partition, manifest.epoch).get(LAST, (0, 0))
        when = f"it has nothing of the epoch written after {utc(at_ms)}" if at_ms else "it has nothing of the epoch"
        said.append(
            f"the server {client.node_of(partition.roster).where}, which has partition {partition.number}, lost "
            f"{sum(hi - lo for _, lo, hi in lost)} committed samples ({ranges}): {when}"
        )
    return "; ".join(said)


def utc(at_ms: int) -> str:
    """Return a time as people write it."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- notes ------------------------------------------------------------------------------------------------------------


def note_loss(client: Client, stream: Stream, loss: Loss, entries: Sequence[bytes] = ()) -> None:
    """Note a loss in its epoch's manifest or, if that is gone, in the stream's meta. It may run twice.

    ``entries`` are the ids of the lost entries, if they are known.
    """
    text, ids = json.dumps(asdict(loss)), _as_ids(entries)
    # named by its entries, too: what is lost at the same offsets later is another loss
    name = f"{loss.was}:{loss.by}:{loss.shard}:{loss.first}" + (f":{crc32(ids.encode()):x}" if ids else "")
    manifest = stream.keys.manifest(loss.epoch)
    if ids:
        run_script(client, _NOTE_LOSS, [manifest], [loss.manifest, MOST_NOTES, f"{GONE}{name}", ids])
    if run_script(client, _NOTE_LOSS, [manifest], [loss.manifest, MOST_NOTES, f"{FIELD}{name}", text]) == 0:
        field = f"{FIELD}{loss.epoch}:{name}"
        run_script(client, _NOTE_LOSS, [stream.keys.meta], [stream.id, MOST_NOTES, field, text])


def note_sent_again(
    client: Client, stream: Stream, manifest: Manifest, shard: int, token: str, entries: Sequence[bytes]
) -> None:
    """Note that a feed's writer has sent the samples of entries again which the server had confirmed and lost.

    Their offsets are the same, and the new entries are committed. A note that fails ends no writer. Then the audit
    names what a member noted.
    """
    if ids := _as_ids(entries):
        field = f"{SENT_AGAIN}{token}:{shard}:{crc32(ids.encode()):x}"
        with suppress(PenstockError, ResponseError):
            run_script(
                client, _NOTE_LOSS, [stream.keys.manifest(manifest.epoch)], [manifest.id, MOST_NOTES, field, ids]
            )


@readable(lambda client, stream, epoch: stream.keys.manifest(epoch))
def resent_losses(client: Client, stream: Stream, epoch: int) -> dict[Loss, set[str]]:
    """Return losses all of whose entries were sent again, with the token of the writer that had committed them.

    The token says nothing of what the index holds now.
    """
    fields = {field.decode(): text for field, text in client.hgetall(stream.keys.manifest(epoch)).items()}
    again: dict[tuple[str, int], set[str]] = {}
    for field, text in fields.items():
        if field.startswith(SENT_AGAIN):
            _, token, shard, _ = field.split(":")
            again.setdefault((token, int(shard)), set()).update(json.loads(text))
    found: dict[Loss, set[str]] = {}
    for field, text in fields.items():
        noted = fields.get(FIELD + field.removeprefix(GONE))
        if field.startswith(GONE) and noted is not None:
            loss, gone = Loss(**json.loads(noted)), {*json.loads(text)}
            found[loss] = {token for (token, shard), ids in again.items() if shard == loss.shard and gone <= ids}
    return found


def _as_ids(entries: Sequence[bytes]) -> str:
    return json.dumps([entry_id.decode() for entry_id in entries]) if 0 < len(entries) <= MOST_IDS else ""


@readable(lambda client, stream, epoch: stream.keys.manifest(epoch))
def noted_losses(client: Client, stream: Stream, epoch: int) -> list[Loss]:
    """Return what clients noted in an epoch's manifest, by shard and offset."""
    return _parsed(client.hgetall(stream.keys.manifest(epoch)))


@readable(lambda client, stream: stream.keys.meta)
def losses_of_lost_epochs(client: Client, stream: Stream) -> dict[int, list[Loss]]:
    """Return what clients noted of epochs whose manifest the server lost, without those that were released since."""
    found: dict[int, list[Loss]] = {}
    for loss in _parsed(client.hgetall(stream.keys.meta)):
        if not is_released(client, stream, loss.epoch):
            found.setdefault(loss.epoch, []).append(loss)
    return found


def forget_losses(client: Client, stream: Stream, epoch: int) -> None:
    """Remove the notes of a released epoch from the stream's meta. Notes in a manifest go with it."""
    noted = [field for field in client.hkeys(stream.keys.meta) if field.startswith(f"{FIELD}{epoch}:".encode())]
    if noted:
        client.hdel(stream.keys.meta, *noted)


def _parsed(fields: dict[bytes, bytes]) -> list[Loss]:
    losses = [Loss(**json.loads(text)) for field, text in fields.items() if field.startswith(FIELD.encode())]
    return sorted(losses, key=lambda loss: (loss.shard, loss.first, loss.end))
