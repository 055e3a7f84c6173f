"""Manifests: what an epoch must contain, and how far it is. States ``open -> sized -> produced``, or ``abandoned``.

Opening an epoch registers it in every partition first (OPEN_EPOCH); only that creates entries keys.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from redis.exceptions import ResponseError

from penstock_common.errors import DamagedKey, EpochAbandoned, EpochNotFound, StreamConflict
from penstock_common.printable import printable
from penstock_common.stream.commands import (
    Arg,
    Call,
    Client,
    Run,
    decoded,
    is_script_error,
    readable,
    run_script,
    run_scripts,
)
from penstock_common.stream.damage import unreadable_value
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.lua.epochs import (
    FINISH_SHARD,
    FORGET_MANIFEST,
    OPEN_EPOCH,
    RESERVE_SHARD,
    SIZE_EPOCH,
    UNMAKE_EPOCH,
)
from penstock_common.stream.lua.streams import BEGIN_MANIFEST, RESERVE_EPOCH
from penstock_common.stream.streams import Stream, announce, deleted, is_released, read_counters, require_there
from penstock_common.wire.limits import MAX_NUMBER, MAX_SHARD_SAMPLES

OPEN, SIZED, PRODUCED, ABANDONED = "open", "sized", "produced", "abandoned"
MAX_SHARDS = 1 << 20
"""Of an epoch. Readers go through all of them, and ask the server about each."""
MAX_EPOCH_SAMPLES = 1 << 33
"""Readers keep and send a bit for each."""
SHARDS_ASKED = 64
"""At once, whether they are complete."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one epoch must contain."""

    epoch: int
    id: str
    state: str
    kind: str
    """``epoch`` = one pass over a source; ``feed`` = a stretch of an endless feed."""
    seed: int
    fingerprint: str
    """Of the source; empty if unknown."""
    sizes: tuple[int, ...] | None
    """Samples planned per shard, None while the epoch is open."""
    done: dict[int, int]
    """Shard -> its size, of the shards that are complete."""
    created_ms: int
    """By the producer's clock."""
    produced_ms: int | None
    """By the server's clock; None before."""

    @property
    def is_ended(self) -> bool:
        """Whether no more samples will come."""
        return self.state in (PRODUCED, ABANDONED)

    @property
    def samples(self) -> int | None:
        """Samples planned in all, holes included; None while the epoch is open."""
        return sum(self.sizes) if self.sizes is not None else None

    def starts(self) -> list[int]:
        """Position of each shard's first sample in the epoch's canonical order (sized epochs)."""
        return [0, *accumulate(self.sizes or ())]

    def shards(self) -> range:
        """The shards that are known of: all of them once sized, else up to the last that is complete."""
        return range(len(self.sizes) if self.sizes is not None else max(self.done, default=-1) + 1)

    def shard_size(self, shard: int) -> int:
        """Upper bound of a shard's offsets; what lies outside is not part of the epoch."""
        if self.sizes is None:
            return self.done.get(shard, MAX_SHARD_SAMPLES)
        return self.sizes[shard] if shard < len(self.sizes) else 0

    @property
    def live_state(self) -> str:
        """What the state key of each partition says while this epoch may be written and acknowledged."""
        return f"live:{self.id}"


def load_manifest(client: Client, stream: Stream, epoch: int) -> Manifest:
    """The manifest; raises EpochNotFound naming the retained epochs."""
    manifest = find_manifest(client, stream, epoch)
    if manifest is None:
        require_there(client, stream)
        there = ", ".join(map(str, retained_epochs(client, stream))) or "none"
        raise EpochNotFound(f"stream {stream.name!r} has no epoch {epoch}; retained epochs: {there}")
    return manifest


@readable(lambda client, stream, epoch: stream.keys.manifest(epoch))
def find_manifest(client: Client, stream: Stream, epoch: int) -> Manifest | None:
    """The manifest, or None if there is no such epoch (any more)."""
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
    )


def _parse_sizes(text: str) -> tuple[int, ...]:
    """Return the planned sizes of a manifest; raises ValueError. Whoever reads them takes memory and time by them."""
    if len(text) > MAX_SHARDS * 9:  # longer than as many sizes ever are; parsing it would cost what it bounds
        raise ValueError(f"sizes has {len(text)} bytes")
    sizes = json.loads(text)
    if type(sizes) is not list or not all(type(size) is int for size in sizes):
        raise ValueError("sizes is no list of numbers")
    if (reason := why_not_planned(sizes)) is not None:
        raise ValueError(reason)
    return tuple(sizes)


def _parse_done(fields: dict[str, str]) -> dict[int, int]:
    done = {int(field[2:]): int(size) for field, size in fields.items() if field.startswith("d:")}
    for shard, size in done.items():
        if not (0 <= shard < MAX_SHARDS and 0 <= size <= MAX_SHARD_SAMPLES):
            raise ValueError(f"d:{shard} says {size}")
    return done


def why_not_planned(sizes: Sequence[int]) -> str | None:
    """Return why an epoch cannot have shards of these sizes; None where it can."""
    if len(sizes) > MAX_SHARDS:
        return f"an epoch has at most {MAX_SHARDS} shards, planned are {len(sizes)}"
    if any(not 0 <= size <= MAX_SHARD_SAMPLES for size in sizes):
        worst = max(sizes) if min(sizes) >= 0 else min(sizes)
        return f"a shard holds at most {MAX_SHARD_SAMPLES} samples, planned are {worst}"
    if (samples := sum(sizes)) > MAX_EPOCH_SAMPLES:
        return f"an epoch holds at most {MAX_EPOCH_SAMPLES} samples, planned are {samples}"
    return None


def state_damage(partition: PartitionKeys, manifest: Manifest, state: bytes) -> DamagedKey | None:
    """What to raise where an epoch's state in a partition is one that no Penstock writes; None where one does."""
    if not state or (state.isascii() and state.startswith((b"live:", b"abandoned:", b"gone:"))):
        return None
    return unreadable_value(partition.state(manifest.epoch), ValueError(state))


def find_state_damage(client: Client, stream: Stream, manifest: Manifest) -> DamagedKey | None:
    """What to raise where manifest, state and roster do not agree on an epoch that a partition has on its roster.

    While somebody abandons or releases the epoch, that is so for a moment: ask again before it is believed.
    """
    with client.pipeline(transaction=False) as pipe:
        for partition in stream.partitions:
            pipe.get(partition.state(manifest.epoch))
            pipe.hget(partition.roster, f"e:{manifest.epoch}")
        replies = pipe.execute()
    wanted = (f"abandoned:{manifest.id}" if manifest.state == ABANDONED else manifest.live_state).encode()
    for partition, state, listed in zip(stream.partitions, replies[::2], replies[1::2], strict=True):
        if listed is not None and listed != manifest.id.encode():
            return unreadable_value(stream.keys.manifest(manifest.epoch), ValueError(f"another id than {listed!r}"))
        if listed is not None and state != wanted:
            return unreadable_value(partition.state(manifest.epoch), ValueError(state))
    return None


def renewed(client: Client, stream: Stream, manifest: Manifest) -> Manifest:
    """The manifest as it is now, read whole only where what a reader goes by has changed. Raises EpochNotFound.

    For whoever asks again and again while nothing comes: a manifest has a field for each shard that is complete.
    """
    found = client.hmget(stream.keys.manifest(manifest.epoch), "id", "state", "done")
    known = [manifest.id.encode(), manifest.state.encode()]
    is_same = found[:2] == known and (manifest.sizes is not None or found[2] == b"%d" % len(manifest.done))
    return manifest if is_same else load_manifest(client, stream, manifest.epoch)


def first_unfinished(client: Client, stream: Stream, epoch: int, shards: Sequence[int]) -> int | None:
    """The first of these shards that is not complete; None if all are. A few are asked for, not the whole manifest."""
    for start in range(0, len(shards), SHARDS_ASKED):
        asked = shards[start : start + SHARDS_ASKED]
        found = client.hmget(stream.keys.manifest(epoch), [f"d:{shard}" for shard in asked])
        for shard, size in zip(asked, found, strict=True):
            if size is None:
                return shard
    return None


@readable(lambda client, stream, epochs: " or ".join(stream.keys.manifest(epoch) for epoch in epochs[:3]))
def ended_ms(client: Client, stream: Stream, epochs: Sequence[int]) -> dict[int, int]:
    """Epoch -> when it was produced, by the server's clock; of one that never was, when it was opened."""
    with client.pipeline(transaction=False) as pipe:
        for epoch in epochs:
            pipe.hmget(stream.keys.manifest(epoch), "produced_ms", "created_ms")
        found = pipe.execute() if epochs else []
    return {epoch: int(produced or created or 0) for epoch, (produced, created) in zip(epochs, found, strict=True)}


def retained_epochs(client: Client, stream: Stream) -> dict[int, str]:
    """Epoch -> state of its manifest, rising, of all epochs that are still there."""
    return parse_states(stream, client.hgetall(stream.keys.epochs))


@readable(lambda stream, reply: stream.keys.epochs)
def parse_states(stream: Stream, reply: dict[bytes, bytes]) -> dict[int, str]:
    """The same, from what the key holds."""
    return {int(epoch): state for epoch, state in sorted(decoded(reply).items(), key=lambda item: int(item[0]))}


def open_epoch(
    client: Client,
    stream: Stream,
    epoch: int | None = None,
    *,
    kind: str = "epoch",
    seed: int = 0,
    fingerprint: str = "",
    sizes: Sequence[int] | None = None,
) -> Manifest:
    """Opens the epoch (None = the next number) or finds it open; ``sizes`` also sizes it.

    Every step may be repeated, so a producer that died in between is simply started again. Producers that give a
    ``fingerprint`` share an epoch only where kind, seed and fingerprint agree.

    Raises:
        EpochAbandoned: It takes no more samples.
        StreamConflict: It exists with other sizes, of another source, or a new epoch's number is already in use.
    """
    keys = stream.keys
    if epoch is not None and not 0 <= epoch < MAX_NUMBER:
        raise EpochNotFound(f"epoch {epoch}: epochs are numbered from 0")
    is_new = epoch is None
    epoch = _reserve_number(client, stream, epoch)
    key, manifest_id = keys.manifest(epoch), secrets.token_hex(8)
    fields: dict[str, str | int] = {
        "id": manifest_id, "kind": kind, "seed": seed, "fingerprint": fingerprint, "done": 0,
        "created_ms": time.time_ns() // 1_000_000, "state": OPEN,
    }  # fmt: skip
    flat = [part for field in fields.items() for part in field]
    begun = run_script(client, BEGIN_MANIFEST, [keys.meta, key, keys.epochs], [stream.id, epoch, OPEN, *flat])
    if begun < 1:
        raise deleted(client, stream) if begun < 0 else _was_released(client, stream, epoch)
    manifest = load_manifest(client, stream, epoch)
    if is_new and manifest.id != manifest_id:
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


def _why_not_shared(manifest: Manifest, kind: str, seed: int, fingerprint: str) -> str:
    """Return how an epoch's plan differs from the caller's; "" where both are of one production."""
    differ = (
        ("kind", manifest.kind, kind), ("seed", manifest.seed, seed),
        ("fingerprint (of the source and its order)", manifest.fingerprint, fingerprint),
    )  # fmt: skip
    return " and ".join(f"its {what} is {printable(str(its))}, not {ours}" for what, its, ours in differ if its != ours)


class NumberTaken(StreamConflict):
    """A new epoch's number was given out before: the server came back from before it was."""


def _was_given_twice(stream: Stream, epoch: int, why: str) -> NumberTaken:
    return NumberTaken(
        f"epoch number {epoch} of {stream.name!r} was given out twice ({why}): the server came back without its newest "
        "writes; start again, with the next number"
    )


def _register(client: Client, stream: Stream, manifest: Manifest, *, is_begun_here: bool) -> None:
    """Makes the epoch's keys in every partition, or none of them where it was released since the manifest was read.

    A release goes partition by partition and takes the manifest last but for its `x:` fields: whoever comes before it
    is swept up by it, whoever comes while it lasts meets `x:`, whoever comes after it finds no manifest.
    """
    epoch = manifest.epoch
    made = [[p.roster, p.state(epoch), p.entries(epoch)] for p in stream.partitions]
    calls: list[Call] = [(names, [epoch, manifest.id]) for names in made]
    try:
        is_whole = all(run_scripts(client, OPEN_EPOCH, calls))
    except ResponseError as error:
        if not is_script_error(error, "epoch has another manifest"):
            raise
        if is_begun_here:  # else others use it
            run_scripts(client, UNMAKE_EPOCH, calls)
            run_script(client, FORGET_MANIFEST, [stream.keys.manifest(epoch), stream.keys.epochs], [manifest.id, epoch])
        raise _was_given_twice(stream, epoch, "a partition has it under another manifest") from None
    flat = [stream.keys.manifest(epoch), stream.keys.epochs, *(name for names in made for name in names)]
    require_there(client, stream, flat)
    found = find_manifest(client, stream, epoch)
    is_there = found is not None and found.id == manifest.id
    if is_whole and is_there:
        return
    if not is_there:  # else the release is under way, and sweeps up all of it
        run_scripts(client, UNMAKE_EPOCH, calls)
    raise _was_released(client, stream, epoch)


def take_number(client: Client, stream: Stream) -> int:
    """The next epoch's number, for whoever wants to note it before opening the epoch."""
    return _reserve_number(client, stream, None)


def _reserve_number(client: Client, stream: Stream, wanted: int | None) -> int:
    """Epochs only rise: the next number is never below one that was given out, and a released one never comes back.

    Asked again after a lost answer the next number is skipped, which harms nobody: readers go by the epochs there are.
    """
    arguments = [stream.id, "" if wanted is None else wanted]
    epoch = int(run_script(client, RESERVE_EPOCH, [stream.keys.meta], arguments))
    if epoch < 0:
        raise deleted(client, stream)
    if is_released(client, stream, epoch):
        raise _was_released(client, stream, epoch)
    return epoch


def _was_released(client: Client, stream: Stream, epoch: int) -> EpochNotFound:
    following, name = read_counters(client, stream)[0], f"epoch {epoch} of {stream.name!r}"
    if following <= epoch:
        return EpochNotFound(f"{name} is gone: the server came back without its newest writes; start again")
    return EpochNotFound(f"{name} was released; the next is {following}")


def size_epoch(client: Client, stream: Stream, manifest: Manifest, sizes: Sequence[int]) -> str:
    """Fixes shards and sizes; returns the state. Raises StreamConflict where it was sized otherwise."""
    if (reason := why_not_planned(sizes)) is not None:
        raise StreamConflict(reason)
    keys = [stream.keys.manifest(manifest.epoch), stream.keys.events, stream.keys.epochs]
    plan: list[Arg] = [manifest.id, manifest.epoch, len(sizes), json.dumps(list(sizes))]
    state = _scripted(client, stream, SIZE_EPOCH, keys, plan)
    found = load_manifest(client, stream, manifest.epoch)
    if found.sizes is not None and found.sizes != tuple(sizes):
        raise StreamConflict(
            f"epoch {manifest.epoch} of {stream.name!r} is planned with {found.samples} samples in {len(found.sizes)} "
            f"shards, this source has {sum(sizes)} in {len(sizes)}: the source or --shard-samples changed"
        )
    return state


def finish_shard(
    client: Client, stream: Stream, manifest: Manifest, shard: int, size: int, run: Run | None = None
) -> str:
    """Records that a shard is complete; the last one makes the epoch produced. Returns the state.

    ``run`` runs the script, which may run twice; None leaves it to the client.
    """
    keys = [stream.keys.manifest(manifest.epoch), stream.keys.events, stream.keys.epochs]
    return _scripted(client, stream, FINISH_SHARD, keys, [manifest.id, manifest.epoch, shard, size], run)


def _scripted(
    client: Client, stream: Stream, script: str, keys: list[str], args: list[Arg], run: Run | None = None
) -> str:
    try:
        state: bytes = run_script(client, script, keys, args) if run is None else run(script, keys, args)
    except ResponseError as error:
        if is_script_error(error, "epoch has another manifest"):
            require_there(client, stream)
            raise EpochAbandoned("the epoch was removed and made anew by someone else: start again") from None
        raise
    return state.decode()


@readable(lambda client, stream, manifest: stream.keys.manifest(manifest.epoch))
def begun_shards(client: Client, stream: Stream, manifest: Manifest) -> range:
    """Shards that may have samples: the planned ones, or of an open epoch those taken so far."""
    if manifest.sizes is not None:
        return range(len(manifest.sizes))
    taken = int(client.hget(stream.keys.manifest(manifest.epoch), "next_shard") or 0)
    if not 0 <= taken <= MAX_SHARDS:
        raise ValueError(f"next_shard is {taken}, expected 0 to {MAX_SHARDS}")
    return range(max(taken, len(manifest.shards())))


def reserve_shard(client: Client, stream: Stream, manifest: Manifest, shard: int) -> None:
    """Makes an open epoch know of a shard that its writer chose by number; raises StreamConflict."""
    if not 0 <= shard < MAX_SHARDS:
        raise StreamConflict(f"shard {shard}: shards are numbered from 0 to {MAX_SHARDS - 1}")
    run_script(client, RESERVE_SHARD, [stream.keys.manifest(manifest.epoch)], [manifest.id, shard])


def abandon_epoch(client: Client, stream: Stream, epoch: int, manifest_id: str | None = None) -> None:
    """Declares that the epoch will not be completed: partitions first, so that no late write slips in.

    ``manifest_id`` is the epoch's whose writer gives it up: another epoch that has the number since is left alone.
    """
    manifest = find_manifest(client, stream, epoch) if manifest_id else load_manifest(client, stream, epoch)
    if manifest is None or manifest_id not in (None, manifest.id):
        require_there(client, stream)
        return
    for partition in stream.partitions:
        client.set(partition.state(epoch), f"abandoned:{manifest.id}", xx=True)  # not of one that is gone meanwhile
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(stream.keys.manifest(epoch), "state", ABANDONED)
        pipe.hset(stream.keys.epochs, str(epoch), ABANDONED)
        pipe.execute()
    require_there(client, stream, [stream.keys.manifest(epoch), stream.keys.epochs])
    announce(client, stream.keys, ABANDONED, epoch)
