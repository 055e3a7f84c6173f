"""Every key Penstock uses, spelled here and nowhere else; docs/redis-keys.md gives their contents and lifetimes.

Keys of one partition share a hash tag and so a slot: a script may name several of them.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from dataclasses import dataclass

from penstock_common.errors import PenstockError

SLOTS = 16384
LAST = "_last"
"""A group of every entries key that never reads: a script moves it to the end to learn the newest id."""
RELEASED = "~released"
"""The consumer that holds what a member handed back; no member can have this name."""
_NAME = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,99}\Z")

_TAG = re.compile(r"[0-9a-f]{12}\.\d+\Z")
"""A partition's: the stream's id, and a number."""
_OF_WHOLE_STREAM = re.compile(r"(meta|epochs|events|paces|watched|\d+:manifest)\Z")


class BadName(PenstockError, ValueError):
    """A stream, group or member name that cannot be part of a key."""


def is_name(text: object) -> bool:
    """Return whether it may be part of a key."""
    return isinstance(text, str) and _NAME.match(text) is not None


def checked_name(kind: str, name: str) -> str:
    """The name itself, if it may be part of a key; raises BadName."""
    if not is_name(name):
        raise BadName(f"{kind} name {name!r:.140}: use 1 to 100 letters, digits, '.', '_', '-', not starting with '_'")
    return name


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """Keys of a stream as a whole."""

    name: str

    @property
    def meta(self) -> str:
        """Hash: id, spec, partitions, tags, budget, counters."""
        return f"penstock:{{{self.name}}}:meta"

    @property
    def epochs(self) -> str:
        """Hash: epoch -> state, of every epoch still retained."""
        return f"penstock:{{{self.name}}}:epochs"

    @property
    def events(self) -> str:
        """Stream of wake-up hints: whoever waits for an epoch blocks on it."""
        return f"penstock:{{{self.name}}}:events"

    @property
    def paces(self) -> str:
        """Hash: how fast each worker and trainer is, as it said last."""
        return f"penstock:{{{self.name}}}:paces"

    @property
    def watched(self) -> str:
        """Hash: which files of a watched folder are in which epoch."""
        return f"penstock:{{{self.name}}}:watched"

    def manifest(self, epoch: int) -> str:
        """Hash: what an epoch must contain, and which shards are done."""
        return f"penstock:{{{self.name}}}:{epoch}:manifest"


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """Keys of one partition."""

    name: str
    tag: str
    number: int

    def _key(self, rest: str) -> str:
        return f"penstock:{{{self.name}.{self.tag}}}:{rest}"

    @property
    def roster(self) -> str:
        """Hash: groups, members, epochs, replay leases and bytes of the partition."""
        return self._key("roster")

    def entries(self, epoch: int) -> str:
        """Stream: the epoch's entries."""
        return self._key(f"{epoch}:entries")

    def state(self, epoch: int) -> str:
        """String ``live|abandoned|gone:<manifest id>``; absent once the epoch is released."""
        return self._key(f"{epoch}:state")

    def index(self, epoch: int, shard: int) -> str:
        """Stream: one record per committed block, its id the block's end offset."""
        return self._key(f"{epoch}:{shard}:index")

    def repairs(self, epoch: int, shard: int) -> str:
        """Stream: records that override the shard's index; absent unless something of the shard was repaired."""
        return self._key(f"{epoch}:{shard}:repairs")

    def ledger(self, epoch: int, group: str, shard: int) -> str:
        """Bitmap: one bit per offset the group has settled."""
        return self._key(f"{epoch}:ledger:{group}:{shard}")

    def positions(self, epoch: int, group: str) -> str:
        """Hash of an ordered group: rank -> position below which all of its batches are settled; ``floor``."""
        return self._key(f"{epoch}:pos:{group}")

    def dead(self, epoch: int, group: str) -> str:
        """Hash: entry id, or ``shard:first-end`` of what was given up -> JSON: why, when."""
        return self._key(f"{epoch}:dead:{group}")

    def segments(self, epoch: int) -> str:
        """Hash: segment -> how many of its entries are there; ``s:<segment>``: it gets no more."""
        return self._key(f"{epoch}:segments")

    def quarantine(self, epoch: int) -> str:
        """Hash: ``shard:offset`` -> why the source could not make the sample."""
        return self._key(f"{epoch}:quarantine")


_ANY = re.compile(
    r"penstock:\{(?P<stream>[^}]+?)(?:\.[0-9a-f]{12}\.\d+)?\}:(?:(?P<epoch>\d+):)?(?:\d+:)?(?P<kind>[a-z]+)"
    r"(?::(?P<group>[^:]+)(?::\d+)?)?\Z"
)


def parts_of(key: str) -> dict[str, str | None] | None:
    """The ``stream``, ``epoch``, ``kind`` and ``group`` in a key's name; None where it is no key of a stream."""
    found = _ANY.match(key)
    return found.groupdict() if found else None


ANY_META = "penstock:{*}:meta"
"""Pattern of every stream's meta key."""


def scratch_key(token: str) -> str:
    """What `penstock doctor` measures with; no stream's name begins with ``~``."""
    return f"penstock:{{~doctor}}:{token}"


def name_in_meta_key(key: bytes) -> str:
    """The stream's name in one of the keys that `ANY_META` matches."""
    return key.decode("utf-8", "replace").removeprefix("penstock:{").removesuffix("}:meta")


def patterns_of_stream(name: str) -> list[str]:
    """Patterns that match every key of the stream, and a few of others: `is_of_stream` tells them apart."""
    return [f"penstock:{{{name}}}:*", f"penstock:{{{name}.*}}:*"]


def is_of_stream(key: str, name: str) -> bool:
    """Whether a key belongs to a stream of that name, in whichever of its lives; ``a.b`` is not a part of ``a``."""
    if key.startswith(f"penstock:{{{name}}}:"):
        return True
    inside, _, rest = key.removeprefix("penstock:{").partition("}:")
    is_partition = inside.startswith(f"{name}.") and _TAG.match(inside[len(name) + 1 :])
    return bool(is_partition) and not _OF_WHOLE_STREAM.match(rest)


def search_tags(name: str, stream_id: str, count: int) -> list[str]:
    """One tag per partition such that partition p hashes into the p-th of ``count`` equal slot ranges.

    Consecutive numbers as tags clump on few nodes of a cluster (design.md section 6), so numbers are tried
    until one fits.
    """
    tags: list[str] = []
    number = 0
    while len(tags) < count:
        tag = f"{stream_id}.{number}"
        slot = crc_hqx(f"{name}.{tag}".encode(), 0) % SLOTS  # the CRC16 of the Redis Cluster specification
        if slot * count // SLOTS == len(tags):
            tags.append(tag)
        number += 1
    return tags
