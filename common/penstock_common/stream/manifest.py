"""Manifests: the plan of an epoch and its progress. States: ``open -> sized -> produced``, or ``abandoned``.

Opening an epoch first registers it in every partition (_OPEN_EPOCH). Only that creates entries keys.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from penstock_common.errors import DamagedKey, EpochAbandoned, EpochNotFound, ShardMismatch, StreamConflict
from penstock_common.printable import printable
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import (
    Arg,
    Call,
    Client,
    ask_all,
    decoded,
    is_script_error,
    readable,
    run_script,
    run_scripts,
)
from penstock_common.stream.damage import unreadable_value
from penstock_common.stream.events import announce
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.streams import Stream, deleted, is_released, read_counters, require_there
from penstock_common.wire.limits import MAX_NUMBER, MAX_SHARD_SAMPLES

_ABANDON_MANIFEST = load_script("abandon_manifest")
_ABANDON_STATE = load_script("abandon_state")
_BEGIN_MANIFEST = load_script("begin_manifest")
_BEGIN_NEXT_EPOCH = load_script("begin_next_epoch")
_FINISH_SHARD = load_script("finish_shard")
_FORGET_MANIFEST = load_script("forget_manifest")
_OPEN_EPOCH = load_script("open_epoch")
_REOPEN_SHARD = load_script("reopen_shard")
_RESERVE_EPOCH = load_script("reserve_epoch")
_RESERVE_SHARD = load_script("reserve_shard")
_SIZE_EPOCH = load_script("size_epoch")
_UNDO_OPEN_EPOCH = load_script("undo_open_epoch")

OPEN, SIZED, PRODUCED, ABANDONED = "open", "sized", "produced", "abandoned"
MAX_SHARDS = 1 << 20
"""Shards of an epoch at most. Readers ask the server about each of them."""
MAX_EPOCH_SAMPLES = 1 << 33
"""Samples of an epoch at most. Readers keep and send a bit for each."""
_CLOSED = re.compile(r"PENSTOCK (shard \d+ ended with \d+ samples)")
SHARDS_ASKED = 64
"""Shards that one command asks about."""


UNREPLICATED = "unreplicated:"
"""Fields of a manifest that begin with it say what was written without a replica."""


class UnreplicatedWrites(NamedTuple):
    """Entries of a partition that the level `auto` wrote while its server had no replica."""

    partition: int
    first_ms: int
    """The time of the oldest such entry, by its id."""
    last_ms: int
    """The time of the newest one."""
    server: str
    """Its address, without a password."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The plan of one epoch, and its complete shards."""

    epoch: int
    id: str
    state: str
    kind: str
    """``epoch`` for one pass over a source, ``feed`` for a stretch of an endless feed."""
    seed: int
    fingerprint: str
    """The source's fingerprint; '' if unknown."""
    sizes: tuple[int, ...] | None
    """The planned samples of each shard; None while the epoch is open."""
    done: dict[int, int]
    """Complete shard -> its size."""
    created_ms: int
    """When it was opened, by the producer's clock."""
    produced_ms: int | None
    """When it was produced, by the server's clock; None before."""
    unreplicated: tuple[UnreplicatedWrites, ...] = ()
    """The times at which the level `auto` wrote without a replica, at most one for each partition."""

    @property
    def is_ended(self) -> bool:
        """True once no more samples will come."""
        return self.state in (PRODUCED, ABANDONED)

    @property
    def samples(self) -> int | None:
        """The number of planned samples, holes included; None while the epoch is open."""
        return sum(self.sizes) if self.sizes is not None else None

    def shards(self) -> range:
        """Return the known shards: all once the epoch is sized, else up to the last complete one."""
        return range(len(self.sizes) if self.sizes is not None else max(self.done, default=-1) + 1)

    def shard_size(self, shard: int) -> int:
        """Return the upper bound of a shard's offsets. Nothing beyond it is part of the epoch."""
        if self.sizes is None:
            return self.done.get(shard, MAX_SHARD_SAMPLES)
        return self.sizes[shard] if shard < len(self.sizes) else 0

    @property
    def live_state(self) -> str:
        """The value of each partition's state key while this epoch may be written and acknowledged."""
        return f"live:{self.id}"


def load_manifest(client: Client, stream: Stream, epoch: int) -> Manifest:
    """Return the manifest. Raises EpochNotFound, which names the retained epochs."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        require_there(client, stream)
        there = ", ".join(map(str, retained_epochs(client, stream))) or "none"
        raise EpochNotFound(f"stream {stream.name!r} has no epoch {epoch}; retained epochs: {there}")
    return manifest


@readable(lambda client, stream, epoch: stream.keys.manifest(epoch))
def find_manifest(client: Client, stream: Stream, epoch: int) -> Manifest | None:
    """Return the manifest, or None if there is no such epoch."""
    reply: dict[bytes, bytes] = client.hgetall(stream.keys.manifest(epoch))
    if b"id" not in reply:
        return None
    found = decoded(reply)
    return Manifest(
        epoch=epoch,
        id=found["id"],
        state=found["state"],
        kind=found["kind"],
        seed=int(found["seed"]),
        fingerprint=found["fingerprint"],
        sizes=_parse_sizes(found["sizes"]) if "sizes" in found else None,
        done=_parse_done(found),
        created_ms=int(found["created_ms"]),
        produced_ms=int(found["produced_ms"]) if "produced_ms" in found else None,
        unreplicated=tuple(
            _parse_unreplicated(int(field.removeprefix(UNREPLICATED)), text)
            for field, text in found.items()
            if field.startswith(UNREPLICATED)
        ),
    )


def _parse_sizes(text: str) -> tuple[int, ...]:
    """Return the planned sizes of a manifest, bounded, because readers take memory by them. Raises ValueError."""
    if len(text) > MAX_SHARDS * 9:  # longer than the text of any allowed sizes, so it is not parsed
        raise ValueError(f"sizes has {len(text)} bytes")
    sizes = json.loads(text)
    if type(sizes) is not list or not all(type(size) is int for size in sizes):
        raise ValueError("sizes is no list of numbers")
    if (reason := why_not_planned(sizes)) is not None:
        raise ValueError(reason)
    return tuple(sizes)


def _parse_unreplicated(partition: int, text: str) -> UnreplicatedWrites:
    first, last, server = text.split(" ", 2)
    return UnreplicatedWrites(partition, int(first), int(last), server)


def _parse_done(fields: dict[str, str]) -> dict[int, int]:
    done = {int(field[2:]): int(size) for field, size in fields.items() if field.startswith("d:")}
    for shard, size in done.items():
        if not (0 <= shard < MAX_SHARDS and 0 <= size <= MAX_SHARD_SAMPLES):
            raise ValueError(f"d:{shard} says {size}")
    return done


def why_not_planned(sizes: Sequence[int]) -> str | None:
    """Return why an epoch cannot have shards of these sizes, or None if it can."""
    if len(sizes) > MAX_SHARDS:
        return f"an epoch has at most {MAX_SHARDS} shards, planned are {len(sizes)}"
    if any(not 0 <= size <= MAX_SHARD_SAMPLES for size in sizes):
        worst = max(sizes) if min(sizes) >= 0 else min(sizes)
        return f"a shard holds at most {MAX_SHARD_SAMPLES} samples, planned are {worst}"
    if (samples := sum(sizes)) > MAX_EPOCH_SAMPLES:
        return f"an epoch holds at most {MAX_EPOCH_SAMPLES} samples, planned are {samples}"
    return None


def state_damage(partition: PartitionKeys, manifest: Manifest, state: bytes) -> DamagedKey | None:
    """Return the error for an epoch's state that Penstock never writes, or None for a state that it writes."""
    if not state or (state.isascii() and state.startswith((b"live:", b"abandoned:", b"gone:"))):
        return None
    return unreadable_value(partition.state(manifest.epoch), ValueError(state))


def find_state_damage(client: Client, stream: Stream, manifest: Manifest) -> DamagedKey | None:
    """Return the error if manifest, state and roster disagree on an epoch of a partition's roster, or None.

    They disagree for a moment while the epoch is abandoned or released: ask again before believing it.
    """
    states = ask_all(client, [("GET", partition.state(manifest.epoch)) for partition in stream.partitions])
    ids = ask_all(client, [("HGET", partition.roster, f"e:{manifest.epoch}") for partition in stream.partitions])
    wanted = (f"abandoned:{manifest.id}" if manifest.state == ABANDONED else manifest.live_state).encode()
    for partition, state, listed in zip(stream.partitions, states, ids, strict=True):
        if listed is not None and listed != manifest.id.encode():
            return unreadable_value(stream.keys.manifest(manifest.epoch), ValueError(f"another id than {listed!r}"))
        if listed is not None and state != wanted:
            return unreadable_value(partition.state(manifest.epoch), ValueError(state))
    return None


def renewed(client: Client, stream: Stream, manifest: Manifest) -> Manifest:
    """Return the current manifest, read in full only if something that readers use has changed.

    For repeated calls in a wait, because a manifest has a field for each complete shard. Raises EpochNotFound.
    """
    found = client.hmget(stream.keys.manifest(manifest.epoch), "id", "state", "done")
    known = [manifest.id.encode(), manifest.state.encode()]
    is_same = found[:2] == known and (manifest.sizes is not None or found[2] == b"%d" % len(manifest.done))
    return manifest if is_same else load_manifest(client, stream, manifest.epoch)


def first_unfinished(client: Client, stream: Stream, epoch: int, shards: Sequence[int]) -> int | None:
    """Return the first of these shards that is not complete, or None. It reads a few fields of the manifest."""
    for start in range(0, len(shards), SHARDS_ASKED):
        asked = shards[start : start + SHARDS_ASKED]
        found = client.hmget(stream.keys.manifest(epoch), [f"d:{shard}" for shard in asked])
        for shard, size in zip(asked, found, strict=True):
            if size is None:
                return shard
    return None


@readable(lambda client, stream, epochs: " or ".join(stream.keys.manifest(epoch) for epoch in epochs[:3]))
def ended_ms(client: Client, stream: Stream, epochs: Sequence[int]) -> dict[int, int]:
    """Return epoch -> when it was produced, by the server's clock, or else when it was opened."""
    commands = [("HMGET", stream.keys.manifest(epoch), "produced_ms", "created_ms") for epoch in epochs]
    found = ask_all(client, commands)
    return {epoch: int(produced or created or 0) for epoch, (produced, created) in zip(epochs, found, strict=True)}


def retained_epochs(client: Client, stream: Stream) -> dict[int, str]:
    """Return epoch -> manifest state of all retained epochs, ascending."""
    return parse_states(stream, client.hgetall(stream.keys.epochs))


@readable(lambda stream, reply: stream.keys.epochs)
def parse_states(stream: Stream, reply: dict[bytes, bytes]) -> dict[int, str]:
    """Return epoch -> manifest state, from the contents of the epochs key."""
    return dict(sorted((int(epoch), state.decode()) for epoch, state in reply.items()))


def open_epoch(
    client: Client,
    stream: Stream,
    epoch: int | None = None,
    *,
    kind: str = "epoch",
    seed: int = 0,
    fingerprint: str = "",
    sizes: Sequence[int] | None = None,
    again: Manifest | None = None,
) -> Manifest:
    """Open an epoch, or find it open.

    Every step may be repeated, so a producer that died in between is simply started again. Producers that give a
    ``fingerprint`` share an epoch only if kind, seed and fingerprint agree.

    Args:
        epoch: The epoch's number; None takes the next one.
        sizes: The planned samples of each shard, which also sizes the epoch.
        again: The manifest that an earlier call returned. A server that lost it since gets it back with its id, which
            the partitions have.

    Raises:
        EpochAbandoned: It takes no more samples.
        StreamConflict: It exists with other sizes, of another source, or a new epoch's number is already in use.
    """
    keys = stream.keys
    if epoch is not None and not 0 <= epoch < MAX_NUMBER:
        raise EpochNotFound(f"epoch {epoch}: epochs are numbered from 0")
    is_ours = epoch is None or again is not None
    epoch = take_number(client, stream, epoch)
    key, manifest_id = keys.manifest(epoch), secrets.token_hex(8) if again is None else again.id
    fields = ["id", manifest_id, *_first_fields(kind, seed, fingerprint)]
    begun = run_script(client, _BEGIN_MANIFEST, [keys.meta, key, keys.epochs], [stream.id, epoch, OPEN, *fields])
    if begun < 1:
        raise deleted(client, stream) if begun < 0 else _was_released(client, stream, epoch)
    manifest = load_manifest(client, stream, epoch)
    if is_ours and manifest.id != manifest_id:
        raise _was_given_twice(stream, epoch, "another writer opened it")
    if manifest.state == ABANDONED:
        raise EpochAbandoned(f"epoch {epoch} of {stream.name!r} was abandoned: it takes no more samples")
    if fingerprint and (why := _why_not_shared(manifest, kind, seed, fingerprint)):
        raise StreamConflict(
            f"epoch {epoch} of {stream.name!r} belongs to another production: {why}; give this one another stream "
            "name, or start both with the same source and options"
        )
    _register(client, stream, manifest, is_begun_here=manifest.id == manifest_id)
    announce(client, keys, OPEN, epoch)
    if sizes is not None:
        size_epoch(client, stream, manifest, sizes)
    return load_manifest(client, stream, epoch)


def begin_next_epoch(client: Client, stream: Stream, epoch: int, kind: str) -> Manifest | None:
    """Begin the epoch of this number if it is still the next one, else return None. `open_epoch` makes its keys."""
    keys, manifest_id = stream.keys, secrets.token_hex(8)
    arguments = [stream.id, epoch, manifest_id, OPEN, *_first_fields(kind)]
    begun = run_script(client, _BEGIN_NEXT_EPOCH, [keys.meta, keys.manifest(epoch), keys.epochs], arguments)
    if begun < 0:
        raise deleted(client, stream)
    return load_manifest(client, stream, epoch) if begun else None


def _first_fields(kind: str, seed: int = 0, fingerprint: str = "") -> list[str | int]:
    """Return names and values of a new manifest's fields, without its id."""
    fields: dict[str, str | int] = {
        "kind": kind, "seed": seed, "fingerprint": fingerprint, "done": 0,
        "created_ms": time.time_ns() // 1_000_000, "state": OPEN,
    }  # fmt: skip
    return [part for field in fields.items() for part in field]


def _why_not_shared(manifest: Manifest, kind: str, seed: int, fingerprint: str) -> str:
    """Return how an epoch's plan differs from the caller's, or '' if both are of one production."""
    differ = (
        ("kind", manifest.kind, kind), ("seed", manifest.seed, seed),
        ("fingerprint (of the source and its order)", manifest.fingerprint, fingerprint),
    )  # fmt: skip
    return " and ".join(f"its {what} is {printable(str(its))}, not {ours}" for what, its, ours in differ if its != ours)


class EpochNumberTaken(StreamConflict):
    """A new epoch's number is in use: the server came back with an older state."""


def _was_given_twice(stream: Stream, epoch: int, why: str) -> EpochNumberTaken:
    return EpochNumberTaken(
        f"epoch number {epoch} of {stream.name!r} was given out twice ({why}): the server came back without its newest "
        "writes; start again, with the next number"
    )


def _register(client: Client, stream: Stream, manifest: Manifest, *, is_begun_here: bool) -> None:
    """Make the epoch's keys in every partition, or none if it was released since the manifest was read.

    A release goes partition by partition and removes the manifest last, except its `x:` fields. Keys made before it are
    removed by it. A call during the release finds `x:` fields, and a call after it finds no manifest.
    """
    epoch = manifest.epoch
    calls = _registrations(stream, stream.partitions, epoch, manifest.id)
    try:
        is_whole = all(run_scripts(client, _OPEN_EPOCH, calls))
    except ResponseError as error:
        if not is_script_error(error, "epoch has another manifest"):
            raise
        if is_begun_here:  # else other producers use it
            run_scripts(client, _UNDO_OPEN_EPOCH, calls)
            forget_manifest(client, stream, epoch, manifest.id)
        _raise_above_rosters(client, stream)
        raise _was_given_twice(stream, epoch, "a partition has it under another manifest") from None
    flat = [stream.keys.manifest(epoch), stream.keys.epochs, *(str(name) for names, _ in calls for name in names)]
    require_there(client, stream, flat)
    found = find_manifest(client, stream, epoch)
    is_there = found is not None and found.id == manifest.id
    if is_whole and is_there:
        return
    if not is_there:  # else the release is under way, and removes all of it
        run_scripts(client, _UNDO_OPEN_EPOCH, calls)
    raise _was_released(client, stream, epoch)


def _registrations(stream: Stream, partitions: Sequence[PartitionKeys], epoch: int, manifest_id: str) -> list[Call]:
    """Return the calls of the scripts that register an epoch in partitions, or take that back."""
    return [([p.roster, p.state(epoch), p.entries(epoch)], [epoch, manifest_id]) for p in partitions]


def register_again(
    client: Client, stream: Stream, partitions: Sequence[PartitionKeys], epoch: int, manifest_id: str
) -> None:
    """Register an epoch in partitions that lost it. Its samples there have to be made again."""
    run_scripts(client, _OPEN_EPOCH, _registrations(stream, partitions, epoch, manifest_id))
    require_there(client, stream)


def open_again(client: Client, stream: Stream, manifest: Manifest) -> None:
    """Register an epoch again where a server lost it. Raises EpochNotFound if it was released."""
    _register(client, stream, manifest, is_begun_here=False)


def forget_manifest(client: Client, stream: Stream, epoch: int, manifest_id: str) -> None:
    """Remove the manifest of an epoch that no partition has. The epoch does not count as released."""
    run_script(client, _FORGET_MANIFEST, [stream.keys.manifest(epoch), stream.keys.epochs], [manifest_id, epoch])


def reopen_shard(client: Client, stream: Stream, manifest: Manifest, shard: int) -> bool:
    """Take back that a shard is complete, so that a job makes the rest of it. False if another process did."""
    keys = [stream.keys.manifest(manifest.epoch), stream.keys.events, stream.keys.epochs]
    return bool(run_script(client, _REOPEN_SHARD, keys, [manifest.id, manifest.epoch, shard]))


def raise_next_epoch(client: Client, stream: Stream, above: int) -> None:
    """Make the next epoch's number higher than this one, which is in use. It never becomes lower."""
    if int(run_script(client, _RESERVE_EPOCH, [stream.keys.meta], [stream.id, above])) < 0:
        raise deleted(client, stream)


def _raise_above_rosters(client: Client, stream: Stream) -> None:
    """Raise the next number above every epoch of a partition, so that no other of them is given out again."""
    fields = [field for partition in stream.partitions for field in client.hkeys(partition.roster)]
    known = [int(field[2:]) for field in fields if field.startswith((b"e:", b"x:")) and field[2:].isdigit()]
    if known:
        raise_next_epoch(client, stream, max(known))


def take_number(client: Client, stream: Stream, wanted: int | None = None) -> int:
    """Take a number for a new epoch: the next one, or the wanted one. A caller may note it before opening the epoch.

    Numbers only rise, and a released epoch's number is never used again. A call that is repeated after a lost reply
    skips a number. That is harmless, because readers use existing epochs.
    """
    arguments = [stream.id, "" if wanted is None else wanted]
    epoch = int(run_script(client, _RESERVE_EPOCH, [stream.keys.meta], arguments))
    if epoch < 0:
        raise deleted(client, stream)
    if is_released(client, stream, epoch):
        raise _was_released(client, stream, epoch)
    return epoch


def _was_released(client: Client, stream: Stream, epoch: int) -> EpochNotFound:
    require_there(client, stream)
    following, name = read_counters(client, stream)[0], f"epoch {epoch} of {stream.name!r}"
    if following <= epoch:
        return EpochNotFound(f"{name} is gone: the server came back without its newest writes; start again")
    return EpochNotFound(f"{name} was released; the next is {following}")


def size_epoch(client: Client, stream: Stream, manifest: Manifest, sizes: Sequence[int]) -> str:
    """Fix shards and sizes, and return the state. Raises StreamConflict if the epoch has other sizes."""
    if (reason := why_not_planned(sizes)) is not None:
        raise StreamConflict(reason)
    state: bytes = change_manifest(client, stream, _SIZE_EPOCH, manifest, [len(sizes), json.dumps(list(sizes))])
    found = load_manifest(client, stream, manifest.epoch)
    if found.sizes is not None and found.sizes != tuple(sizes):
        raise StreamConflict(
            f"epoch {manifest.epoch} of {stream.name!r} is planned with {found.samples} samples in {len(found.sizes)} "
            f"shards, this source has {sum(sizes)} in {len(sizes)}: the source or --shard-samples changed"
        )
    return state.decode()


def finish_shard(
    client: Client,
    stream: Stream,
    manifest: Manifest,
    shard: int,
    size: int,
    unreplicated: UnreplicatedWrites | None = None,
) -> str:
    """Record that a shard is complete, and return the epoch's state. The last shard makes the epoch produced.

    Args:
        client: The client of the stream.
        stream: The stream.
        manifest: The manifest of the epoch.
        shard: The number of the shard.
        size: Its samples.
        unreplicated: The entries of the shard that no replica has, if the durability is `auto`.
    """
    args: list[Arg] = [shard, size, *(unreplicated or ())]
    state: bytes = change_manifest(client, stream, _FINISH_SHARD, manifest, args)
    return state.decode()


def change_manifest(
    client: Client, stream: Stream, script: str, manifest: Manifest, args: Iterable[Arg], keys: Sequence[str] = ()
) -> Any:
    """Run a script that changes the manifest, and return its answer.

    Raises EpochAbandoned, StreamDeleted, and ShardMismatch if an operator closed the epoch while it was written.

    Args:
        client: The client of the stream.
        stream: The stream.
        script: The script.
        manifest: The manifest of the epoch.
        args: The arguments behind id and epoch.
        keys: The keys behind manifest, events and epochs.
    """
    number = manifest.epoch
    names = [stream.keys.manifest(number), stream.keys.events, stream.keys.epochs, *keys]
    given = [manifest.id, number, *args]
    try:
        return run_script(client, script, names, given)
    except ResponseError as error:
        if is_script_error(error, "epoch has another manifest"):
            require_there(client, stream)
            raise EpochAbandoned(
                f"epoch {number} of {stream.name!r} was released, or removed and made again by another "
                "writer: start again"
            ) from None
        if (closed := _CLOSED.search(str(error))) is not None:
            raise ShardMismatch(
                f"{closed[1]} of epoch {number} of {stream.name!r}, because another writer of the epoch or `penstock "
                "epochs close` closed it before this writer had stopped; what it wrote after those is not part of the "
                "epoch: write it into the next one"
            ) from None
        raise


@readable(lambda client, stream, manifest: stream.keys.manifest(manifest.epoch))
def begun_shards(client: Client, stream: Stream, manifest: Manifest) -> range:
    """Return the shards that may have samples: the planned ones or, in an open epoch, those that were taken."""
    if manifest.sizes is not None:
        return range(len(manifest.sizes))
    taken = int(client.hget(stream.keys.manifest(manifest.epoch), "next_shard") or 0)
    if not 0 <= taken <= MAX_SHARDS:
        raise ValueError(f"next_shard is {taken}, expected 0 to {MAX_SHARDS}")
    return range(max(taken, len(manifest.shards())))


def reserve_shard(client: Client, stream: Stream, manifest: Manifest, shard: int) -> None:
    """Register a shard that its writer chose by number in an open epoch. Raises StreamConflict."""
    if not 0 <= shard < MAX_SHARDS:
        raise StreamConflict(f"shard {shard}: shards are numbered from 0 to {MAX_SHARDS - 1}")
    run_script(client, _RESERVE_SHARD, [stream.keys.manifest(manifest.epoch)], [manifest.id, shard])


def abandon_epoch(client: Client, stream: Stream, epoch: int, manifest_id: str | None = None) -> None:
    """Declare that an epoch will not be completed: in the partitions first, so that no late write is accepted.

    With ``manifest_id`` only the epoch of that manifest is abandoned, not a later one of the same number.
    """
    manifest = find_manifest(client, stream, epoch) if manifest_id else load_manifest(client, stream, epoch)
    if manifest is None or manifest_id not in (None, manifest.id):
        require_there(client, stream)
        return
    run_scripts(client, _ABANDON_STATE, [([p.roster, p.state(epoch)], [manifest.id]) for p in stream.partitions])
    keys = [stream.keys.manifest(epoch), stream.keys.epochs, stream.keys.meta]
    run_script(client, _ABANDON_MANIFEST, keys, [manifest.id, epoch, stream.id])
    require_there(client, stream)
    announce(client, stream.keys, ABANDONED, epoch)
