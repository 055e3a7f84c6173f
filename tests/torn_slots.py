"""A loss of the newest writes of one slot, made by hand: its keys go back to an earlier moment, all others stay."""

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
        if now := _keys(client, self.tag):
            client.delete(*now)
        for key, dump in self.keys.items():
            client.restore(key, 0, dump)


def _keys(client: Any, tag: str) -> list[bytes]:
    return list(client.scan_iter(match=f"penstock:{{{tag}}}:*"))


def slot_state(client: Any, tag: str) -> SlotState:
    """Return the keys of a hash tag as they are now."""
    return SlotState(tag, {key: client.dump(key) for key in _keys(client, tag)})


def stream_slot(client: Any, stream: Stream) -> SlotState:
    """Return the keys of a stream as a whole: meta, manifests, events."""
    return slot_state(client, stream.name)


def partition_slot(client: Any, stream: Stream, number: int) -> SlotState:
    """Return the keys of a partition: roster, entries, indexes, ledgers."""
    partition = stream.partitions[number]
    return slot_state(client, f"{stream.name}.{partition.tag}")
