"""The meta of a stream, which is made once and read by all.

``manifest`` has epochs, ``roster`` has groups.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock_common.errors import BadOption, DamagedKey, PenstockError, StreamConflict, StreamDeleted, StreamNotFound
from penstock_common.hints import near
from penstock_common.printable import listed, readable_bytes
from penstock_common.segments.folder import INLINE
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, decoded, readable, run_script
from penstock_common.stream.directory import enter_stream, list_all_streams, strike_stream, why_empty
from penstock_common.stream.events import CREATED, announce
from penstock_common.stream.keys import (
    PartitionKeys,
    StreamKeys,
    checked_name,
    is_tag,
)
from penstock_common.stream.placement import choose_tags, usual_partitions
from penstock_common.stream.ranges import parse_ranges
from penstock_common.waiting import Notify, to_stderr
from penstock_common.wire.compression import UNCOMPRESSED, Compression
from penstock_common.wire.header import STREAM_ID
from penstock_common.wire.limits import MAX_PARTITIONS
from penstock_common.wire.spec import Spec

_FIX_SPEC = load_script("fix_spec")
_SET_STREAM_FIELD = load_script("set_stream_field")
_UNLINK_NAMED = load_script("unlink_named")

CHUNK = 512
"""The keys that one command or script unlinks."""
DEFAULT_BUDGET_BYTES = 1 << 30
LEAST_PARTITION_BYTES = 1 << 8
"""The least budget of a partition. Less is probably a number whose unit was forgotten."""
DEFAULT_BLOCK_BYTES = 1_000_000
"""It needs fewer commits and records than 512 kB, and is below sizes that slow allocators down (decision 16)."""
SEGMENT_BLOCK_BYTES = 8_000_000
"""The block size for payloads in segments with a large budget, since no server holds such an entry (decision 16)."""
BLOCKS_A_BUDGET = 32
"""Blocks that a partition's budget holds at least: the end of a segment that no block fits into is lost space."""

_DELETING = "deleting"
"""The field of the meta key that a deletion sets first."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Stream:
    """The settings of a stream."""

    name: str
    id: str
    """A random id, which differs when a stream is made again under the same name."""
    spec: Spec | None
    """The tensors of a sample; None until the first sample fixes them."""
    partitions: tuple[PartitionKeys, ...]
    budget_bytes: int
    """The payload bytes that all partitions may hold at once."""
    block_bytes: int
    """The payload bytes that a writer packs into one entry."""
    retention: str
    durability: str
    """The condition under which a write counts as committed; see ``durability``."""
    payload: str
    """``inline``, or ``segments:`` and a folder; see ``segments.folder``."""
    info: dict[str, Any]
    """JSON of the source: class names, file names, units."""
    keys: StreamKeys
    compression: Compression = UNCOMPRESSED
    """The codecs with which writers compress tensors. Readers learn them from each entry."""
    is_deleting: bool = False
    """Whether a deletion of it began and did not end, so that no process may use it."""

    def partition_of(self, shard: int) -> PartitionKeys:
        """Return the partition of a shard: shard s belongs to partition s mod P."""
        return self.partitions[shard % len(self.partitions)]

    def named(self, numbers: Sequence[int]) -> str:
        """Return the name of some partitions in messages, or '' for all of them."""
        if len(numbers) == len(self.partitions):
            return ""
        which = f"partition {numbers[0]}" if len(numbers) == 1 else f"partitions {', '.join(map(str, numbers))}"
        return f"{which} of {self.name!r}"

    def require_spec(self) -> Spec:
        """Return the spec of a stream that has samples. Raises DamagedKey if it is gone."""
        if self.spec is None:
            raise DamagedKey(
                f"{self.keys.meta} has no `spec`, which the first sample fixes: either no sample was written yet, or "
                "another program removed it; docs/redis-keys.md says what belongs there"
            )
        return self.spec

    @property
    def partition_budget(self) -> int:
        """The payload bytes that each partition may hold: an equal part of the budget."""
        return self.budget_bytes // len(self.partitions)


@readable(lambda client, name: StreamKeys(name).meta)
def find_stream(client: Client, name: str) -> Stream | None:
    """Return the stream, or None if there is none of that name."""
    keys = StreamKeys(checked_name("stream", name))
    reply: dict[bytes, bytes] = client.hgetall(keys.meta)
    if b"id" not in reply:
        return None
    meta = decoded(reply)
    if not STREAM_ID.match(meta["id"]):
        raise ValueError(f"id is {meta['id']:.40}, expected 1 to 64 letters, digits or any of ._-")
    tags = json.loads(meta["tags"])
    if not tags or not all(map(is_tag, tags)):  # keys are in commands that people paste
        raise ValueError(f"tags are {meta['tags']:.40}, expected a list of texts such as 0123456789ab.0")
    return Stream(
        name=name,
        id=meta["id"],
        spec=Spec.from_json(json.loads(meta["spec"])) if meta.get("spec") else None,
        partitions=tuple(PartitionKeys(name, tag, p) for p, tag in enumerate(tags)),
        budget_bytes=int(meta["budget_bytes"]),
        block_bytes=int(meta["block_bytes"]),
        retention=meta["retention"],
        durability=_level_in(meta),
        payload=meta.get("payload", "inline"),
        info=json.loads(meta.get("info", "{}")),
        keys=keys,
        compression=Compression.parse(meta.get("compression", "")),
        is_deleting=_DELETING in meta,
    )


REPLICAS, AUTO = "replicas", "auto"
"""The field of the meta key, and its value, that make the level `memory` of a stream `auto`. Earlier versions do not
know that level: they go on with `memory`."""


def _level_in(meta: Mapping[str, str]) -> str:
    level = meta.get("durability", "memory")
    return AUTO if level == "memory" and meta.get(REPLICAS) == AUTO else level


def _fields_of_level(level: str) -> dict[str, str]:
    """Return the fields that store a durability, in the order in which they are set."""
    return {REPLICAS: AUTO, "durability": "memory"} if level == AUTO else {"durability": level, REPLICAS: ""}


def load_stream(client: Client, name: str) -> Stream:
    """Return the stream. Raises StreamNotFound, which names the streams that exist."""
    stream = find_stream(client, name)
    if stream is None:
        raise StreamNotFound(absence(client, name))
    return stream


def absence(client: Client, name: str) -> str:
    """Return a sentence on a missing stream."""
    names = [one for one in list_all_streams(client) if one != name]  # somebody may have made it since
    if not names and (why := why_empty(client)):
        return f"no stream {name!r}; {why}"
    meant = near(name, names)
    there = f"streams there: {listed(names, 10)}" if names else "the server has no streams yet"
    hint = f"did you mean {meant!r}?" if meant else "start a producer (`penstock produce`) or check name and URL"
    return f"no stream {name!r}; {there}; {hint}"


def look_at_each(
    names: Iterable[str],
    look: Callable[[str], Found | None],
    borne: tuple[type[PenstockError], ...] = (DamagedKey,),
) -> tuple[list[Found], dict[str, PenstockError]]:
    """Look at several streams, where the damage of one must not hide the others.

    Args:
        names: The streams' names.
        look: Called with each name. Its None is left out.
        borne: The errors that concern one stream.

    Returns:
        What ``look`` returned, and for each stream on which it raised such an error, name -> error.
    """
    found: list[Found] = []
    damaged: dict[str, PenstockError] = {}
    for name in names:
        try:
            one = look(name)
        except borne as error:
            damaged[name] = error
        else:
            found += [] if one is None else [one]
    return found, damaged


def deleted(client: Client, stream: Stream) -> StreamDeleted:
    """Return the error for a stream that was deleted, even if it was made again."""
    again = find_stream(client, stream.name)
    if again is not None and again.id == stream.id:
        return StreamDeleted(
            f"stream {stream.name!r} is being deleted; if that was interrupted, `penstock delete {stream.name}` again"
        )
    other = "; another one of that name was made since" if again is not None else ""
    return StreamDeleted(
        f"stream {stream.name!r} was deleted, or the server lost its data (emptied, or restarted without it){other}: "
        "start again to use it"
    )


def said_deleting(name: str) -> str:
    """Return how views name a stream whose deletion began and did not end."""
    return f"its deletion began and did not end: run `penstock delete {name}` again"


def require_there(client: Client, stream: Stream, made: Sequence[str] = ()) -> None:
    """Raise StreamDeleted if the stream was deleted, and then remove the keys ``made`` that the caller just made."""
    found, deleting = client.hmget(stream.keys.meta, "id", _DELETING)
    if found == stream.id.encode() and deleting is None:
        return
    if made and found != stream.id.encode():  # an unfinished deletion removes them itself
        client.unlink(*[key for key in made if stream.id in key])
        unlink_named(client, stream.keys, stream.id.encode(), [key for key in made if stream.id not in key])
    raise deleted(client, stream)


def unlink_named(client: Client, keys: StreamKeys, stream_id: bytes, named: Sequence[str]) -> int:
    """Unlink keys that only have the stream's name, unless a newer stream has it. Returns how many."""
    chunks = (named[at : at + CHUNK] for at in range(0, len(named), CHUNK))
    return sum(max(0, int(run_script(client, _UNLINK_NAMED, [keys.meta, *chunk], [stream_id]))) for chunk in chunks)


def _block_bytes(payload: str | None, partition_budget: int) -> int:
    if payload in (None, INLINE):
        return DEFAULT_BLOCK_BYTES
    return max(DEFAULT_BLOCK_BYTES, min(SEGMENT_BLOCK_BYTES, partition_budget // BLOCKS_A_BUDGET))


def create_stream(
    client: Client,
    name: str,
    *,
    spec: Spec | None = None,
    partitions: int | None = None,
    budget_bytes: int | None = None,
    block_bytes: int | None = None,
    retention: str | None = None,
    durability: str | None = None,
    payload: str | None = None,
    compression: Compression | None = None,
    info: Mapping[str, Any] | None = None,
    notify: Notify = to_stderr,
) -> Stream:
    """Make the stream, or return it if it exists with the same settings. None takes the existing or default value.

    ``notify`` is called when the budget of an existing stream changes.

    Raises:
        StreamConflict: The stream exists with another spec, payload or number of partitions.
        BadOption: The budget is too small for one sample.
        BadSpec: The compression names a tensor that the spec lacks.
        MissingExtra: The package of a codec is not installed.

    A refusal changes nothing of an existing stream.
    """
    stream = find_stream(client, name)
    if stream is None:
        keys = StreamKeys(name)
        stream_id = secrets.token_hex(6)
        servers = client.slots()
        count = partitions or usual_partitions(len(servers), budget_bytes or DEFAULT_BUDGET_BYTES)
        if not 1 <= count <= MAX_PARTITIONS:
            raise StreamConflict(f"stream {name!r}: {count} partitions asked for, 1 to {MAX_PARTITIONS} are possible")
        _require_budget_holds(name, budget_bytes, count, spec)
        fields: dict[str, str | int] = {
            "v": 1,
            "tags": json.dumps(choose_tags(name, stream_id, count, servers)),
            "spec": json.dumps(spec.as_json()) if spec else "",
            "partitions": count,
            "budget_bytes": budget_bytes or DEFAULT_BUDGET_BYTES,
            "block_bytes": block_bytes or _block_bytes(payload, (budget_bytes or DEFAULT_BUDGET_BYTES) // count),
            "retention": retention or "budget",
            **_fields_of_level(durability or AUTO),
            "payload": payload or INLINE,
            "info": json.dumps(dict(info or {})),
            "created_ms": time.time_ns() // 1_000_000,
            "id": stream_id,
            **({"compression": str(compression)} if compression else {}),
        }
        # all fields of the first creator at once: no process sees half a stream
        with client.pipeline(transaction=True) as pipe:
            for field, value in fields.items():
                pipe.hsetnx(keys.meta, field, value)
            is_ours = all(pipe.execute())
        # the stream's creator may have died before it announced the stream
        if is_ours or not client.exists(keys.events):
            announce(client, keys, CREATED, name)
        stream = load_stream(client, name)
    _refuse_conflict(stream, partitions, payload)
    _require_budget_holds(name, budget_bytes, len(stream.partitions), stream.spec or spec)
    if compression is not None:
        compression.require(stream.spec or spec)
    if spec is not None:
        fix_spec(client, stream, spec)
    _change_settings(client, stream, budget_bytes, retention, durability, compression, notify)
    if info:
        set_field(client, stream, "info", json.dumps({**stream.info, **info}))
    _enter(client, stream)
    return load_stream(client, name)


def _change_settings(
    client: Client, stream: Stream, budget_bytes: int | None, retention: str | None, durability: str | None,
    compression: Compression | None, notify: Notify,
) -> None:  # fmt: skip
    """Change the settings that a stream may change between runs. None keeps one."""
    if budget_bytes and budget_bytes != stream.budget_bytes:
        set_field(client, stream, "budget_bytes", budget_bytes)
        notify(
            f"the budget of stream {stream.name!r} is {readable_bytes(budget_bytes)} from now on; it was "
            f"{readable_bytes(stream.budget_bytes)}"
        )
    if retention and retention != stream.retention:
        set_field(client, stream, "retention", retention)
    if durability and durability != stream.durability:
        for field, value in _fields_of_level(durability).items():
            set_field(client, stream, field, value)
    if compression is not None and compression != stream.compression:
        set_field(client, stream, "compression", str(compression))


def _require_budget_holds(name: str, budget_bytes: int | None, partitions: int, spec: Spec | None) -> None:
    """Raise BadOption for a budget that can hold no sample: a block has at most a quarter of a partition's budget."""
    sample = sum(tensor.sample_bytes for tensor in spec.tensors) if spec else 0
    least = partitions * max(LEAST_PARTITION_BYTES, 4 * sample)
    if budget_bytes is not None and budget_bytes < least:
        raise BadOption(
            f"budget_bytes (--budget) is {budget_bytes:,} bytes, too little for a sample of stream {name!r}: give "
            f"{least:,} or more, and usually many times that"
        )


def _enter(client: Client, stream: Stream) -> None:
    """Note the stream in the directory. Raises StreamDeleted, and then leaves no note."""
    enter_stream(client, stream.name, stream.id)
    try:
        require_there(client, stream)
    except StreamDeleted:
        strike_stream(client, stream.name, stream.id.encode())
        raise


def _refuse_conflict(stream: Stream, partitions: int | None, payload: str | None) -> None:
    if payload and payload != stream.payload:
        raise StreamConflict(
            f"stream {stream.name!r} keeps its payloads {stream.payload!r}, {payload!r} asked for: leave payload out, "
            "or use another name"
        )
    if partitions and partitions != len(stream.partitions):
        raise StreamConflict(
            f"stream {stream.name!r} has {len(stream.partitions)} partitions, {partitions} asked for: "
            "leave partitions out, or use another name"
        )


def fix_spec(client: Client, stream: Stream, spec: Spec) -> Spec:
    """Make this the stream's spec if it has none, and return it. Raises StreamConflict if it has another."""
    text = json.dumps(spec.as_json())
    known = run_script(client, _FIX_SPEC, [stream.keys.meta], [stream.id, text])
    if known == -1:
        raise deleted(client, stream)
    if known == text.encode():
        announce(client, stream.keys, "spec", "")
    fixed = Spec.from_json(json.loads(known))
    if fixed != spec:
        raise StreamConflict(
            f"stream {stream.name!r} holds samples of another spec, ({fixed}), found ({spec}): write to a stream of "
            f"another name (--stream NAME of a command), or remove this one first (`penstock delete {stream.name}`); "
            f"it takes {fixed.as_option()}, in Python spec={fixed.as_json()}"
        )
    return fixed


def set_field(client: Client, stream: Stream, field: str, value: str | int) -> None:
    """Change one setting of the stream. Raises StreamDeleted, and never leaves half a meta."""
    if int(run_script(client, _SET_STREAM_FIELD, [stream.keys.meta], [stream.id, field, value])) < 0:
        raise deleted(client, stream)


def set_plan(client: Client, stream: Stream, epochs: int | None) -> None:
    """Store how many epochs the stream will have, so that trainers know the last one."""
    if epochs is None:
        client.hdel(stream.keys.meta, "final")
    else:
        set_field(client, stream, "final", epochs)
    announce(client, stream.keys, "plan", epochs)


@readable(lambda client, stream: stream.keys.meta)
def read_counters(client: Client, stream: Stream) -> tuple[int, int | None, str]:
    """Return (number of the next epoch, planned number of epochs or None, released epochs such as ``0-4,6``)."""
    following, final, released = client.hmget(stream.keys.meta, "next_epoch", "final", "released")
    ranges = (released or b"").decode()
    parse_ranges(ranges)  # raises ValueError if the text has no ranges
    return int(following or 0), int(final) if final is not None else None, ranges


def read_budget(client: Client, stream: Stream) -> int:
    """Return the stream's budget in bytes as it is now. It may have been changed since ``stream`` was read."""
    found, budget = client.hmget(stream.keys.meta, "id", "budget_bytes")
    return int(budget) if found == stream.id.encode() and budget is not None else stream.budget_bytes


def is_released(client: Client, stream: Stream, epoch: int) -> bool:
    """Return whether the epoch existed and was released, by retention or an operator."""
    return any(low <= epoch <= high for low, high in parse_ranges(read_counters(client, stream)[2]))
