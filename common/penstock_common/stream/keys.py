"""The names of all keys that Penstock uses. docs/redis-keys.md gives their contents and lifetimes.

Keys of one partition share a hash tag, and therefore a slot, so one script may use several of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock_common.errors import PenstockError

LAST = "_last"
"""A group that each entries key has and that never reads: a script moves it to the end to learn the newest id."""
RELEASED = "~released"
"""The consumer that holds the entries that members returned. No member can have this name."""
_NAME = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,99}\Z")

_TAG = re.compile(r"[0-9a-f]{12}\.[0-9]{1,10}\Z")
"""The hash tag of a partition: the stream's id and a number."""
_OF_WHOLE_STREAM = re.compile(r"(meta|epochs|events|paces|watched|\d+:manifest)\Z")


class BadName(PenstockError, ValueError):
    """A stream, group or member name that cannot be part of a key."""


def is_name(text: object) -> bool:
    """Return whether a name may be part of a key."""
    return isinstance(text, str) and _NAME.match(text) is not None


def is_tag(text: object) -> bool:
    """Return whether a text is the hash tag of a partition."""
    return isinstance(text, str) and _TAG.match(text) is not None


def checked_name(kind: str, name: str) -> str:
    """Return the name itself if it may be part of a key. Raises BadName."""
    if kind == "stream" and isinstance(name, (list, tuple, set)):
        raise BadName(
            f"stream name {name!r:.140}: a Loader reads one stream; for several make one Loader each, and "
            "penstock.mix({'a': (loader_a, 0.7), 'b': (loader_b, 0.3)})"
        )
    if not is_name(name):
        raise BadName(f"{kind} name {name!r:.140}: use 1 to 100 letters, digits, '.', '_', '-', not starting with '_'")
    return name


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """The keys of a stream as a whole."""

    name: str

    @property
    def meta(self) -> str:
        """Hash: id, spec, partitions, tags, budget, counters."""
        return f"penstock:{{{self.name}}}:meta"

    @property
    def epochs(self) -> str:
        """Hash: epoch -> state, for every retained epoch."""
        return f"penstock:{{{self.name}}}:epochs"

    @property
    def events(self) -> str:
        """Stream: events that wake readers and writers that wait."""
        return f"penstock:{{{self.name}}}:events"

    @property
    def rates(self) -> str:
        """Hash: the latest rate that each worker and trainer reported."""
        return f"penstock:{{{self.name}}}:paces"

    @property
    def watched(self) -> str:
        """Hash: files of a watched folder and the epochs that have them."""
        return f"penstock:{{{self.name}}}:watched"

    def manifest(self, epoch: int) -> str:
        """Hash: an epoch's plan and its complete shards."""
        return f"penstock:{{{self.name}}}:{epoch}:manifest"


@dataclass(frozen=True, slots=True)
class PartitionKeys:
    """The keys of one partition."""

    name: str
    tag: str
    number: int

    @property
    def roster(self) -> str:
        """Hash: groups, members, epochs, replay leases and bytes of the partition."""
        return f"penstock:{{{self.name}.{self.tag}}}:roster"

    def entries(self, epoch: int) -> str:
        """Stream: the epoch's entries in this partition."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:entries"

    def state(self, epoch: int) -> str:
        """String ``live|abandoned|gone:<manifest id>``; absent once the epoch is released."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:state"

    def index(self, epoch: int, shard: int) -> str:
        """Stream: one record per committed block, its id the block's end offset."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:{shard}:index"

    def repairs(self, epoch: int, shard: int) -> str:
        """Stream: records that override the shard's index; absent unless the shard was repaired."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:{shard}:repairs"

    def ledger(self, epoch: int, group: str, shard: int) -> str:
        """Bitmap: a bit for each offset that the group is done with."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:ledger:{group}:{shard}"

    def positions(self, epoch: int, group: str) -> str:
        """Hash of an ordered group: rank -> position below which it has acknowledged everything; ``floor``."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:pos:{group}"

    def dead(self, epoch: int, group: str) -> str:
        """Hash: entry id, or ``shard:first-end`` of discarded samples -> JSON with reason and time."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:dead:{group}"

    def segments(self, epoch: int) -> str:
        """Hash: segment -> number of its entries; ``s:<segment>``: it takes no further entry."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:segments"

    def quarantine(self, epoch: int) -> str:
        """Hash: ``shard:offset`` -> the reason why the source could not make the sample."""
        return f"penstock:{{{self.name}.{self.tag}}}:{epoch}:quarantine"


_ANY = re.compile(
    r"penstock:\{(?P<stream>[^}]+?)(?:\.[0-9a-f]{12}\.\d+)?\}:(?:(?P<epoch>\d+):)?(?:\d+:)?(?P<kind>[a-z]+)"
    r"(?::(?P<group>[^:]+)(?::\d+)?)?\Z"
)


def parts_of(key: str) -> dict[str, str | None] | None:
    """Return the ``stream``, ``epoch``, ``kind`` and ``group`` in a key's name, or None for another program's key."""
    found = _ANY.match(key)
    return found.groupdict() if found else None


ANY_META = "penstock:{*}:meta"
"""A pattern that matches the meta keys of all streams."""

STREAM_NAMES = "penstock:{~streams}:names"
"""Hash: name of each stream -> its id. No stream's name begins with ``~``."""


def scratch_key(token: str) -> str:
    """Return a key with which `penstock doctor` measures. No stream's name begins with ``~``."""
    return f"penstock:{{~doctor}}:{token}"


def rights_keys(name: str) -> tuple[str, str]:
    """Return a key of a stream as a whole and one of a partition, with which a user's rights are tried.

    Neither is ever made.
    """
    return f"penstock:{{{name}}}:rights", f"penstock:{{{name}.rights}}:rights"


def name_in_meta_key(key: bytes) -> str:
    """Return the stream's name in a key that `ANY_META` matches."""
    return key.decode("utf-8", "replace").removeprefix("penstock:{").removesuffix("}:meta")


def patterns_of_stream(name: str) -> list[str]:
    """Return patterns that match every key of the stream, and keys of others: `is_of_stream` tells them apart."""
    return [f"penstock:{{{name}}}:*", f"penstock:{{{name}.*}}:*"]


def id_in_key(key: str, name: str) -> str:
    """Return the id of the stream in a key of its partition, or '' for a key that only has the stream's name."""
    inside = key.removeprefix("penstock:{").partition("}:")[0]
    return inside[len(name) + 1 :].partition(".")[0]


def is_of_stream(key: str, name: str) -> bool:
    """Return whether a key belongs to a stream of that name, in any of its lives. ``a.b`` is no part of ``a``."""
    if key.startswith(f"penstock:{{{name}}}:"):
        return True
    inside, _, rest = key.removeprefix("penstock:{").partition("}:")
    is_partition = inside.startswith(f"{name}.") and _TAG.match(inside[len(name) + 1 :])
    return bool(is_partition) and not _OF_WHOLE_STREAM.match(rest)
