"""A simulated loss of one slot's newest writes: its keys go back to an earlier moment, and all others stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock_common.stream.streams import Stream


@dataclass(frozen=True)
class SlotState:
    """The keys of one hash tag at a moment."""

    tag: str
    keys: dict[bytes, bytes]

    def restore(self, client: Any) -> None:
        """Bring the keys of the tag back to that moment, as a promoted replica that lagged does."""
        with client.pipeline() as pipe:
            pipe.eval(_DELETE, 1, _prefix(self.tag))
            for key, dump in self.keys.items():
                pipe.restore(key, 0, dump)
            pipe.execute()


_DELETE = """
for _, key in ipairs(redis.call('KEYS', KEYS[1] .. '*')) do redis.call('DEL', key) end
"""
_DUMP = """
local found = redis.call('KEYS', KEYS[1] .. '*')
for i = 1, #found do found[i] = {found[i], redis.call('DUMP', found[i])} end
return found
"""


def _prefix(tag: str) -> str:
    return f"penstock:{{{tag}}}:"


def slot_state(client: Any, tag: str) -> SlotState:
    """Return the keys of a hash tag as they are now, at one moment."""
    return SlotState(tag, dict(client.eval(_DUMP, 1, _prefix(tag))))


def stream_slot(client: Any, stream: Stream) -> SlotState:
    """Return the keys of a stream as a whole: meta, manifests, events."""
    return slot_state(client, stream.name)


def partition_slot(client: Any, stream: Stream, number: int) -> SlotState:
    """Return the keys of a partition: roster, entries, indexes, ledgers."""
    partition = stream.partitions[number]
    return slot_state(client, f"{stream.name}.{partition.tag}")
