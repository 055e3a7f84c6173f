"""The state of slots: saved by DUMP, and brought back by RESTORE, as a server that comes back older has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock_common.stream.streams import Stream

SAVE = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  found[#found + 1] = key
  found[#found + 1] = redis.call('DUMP', key)
end
return found
"""
RESTORE = """
local kept = {}
for i = 2, #ARGV, 2 do
  kept[ARGV[i]] = true
  redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1], 'REPLACE')
end
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  if not kept[key] then redis.call('DEL', key) end
end
"""

SlotState = dict[bytes, bytes]
"""Key -> its value, as DUMP gives it."""


class SlotStore:
    """Saves and brings back the keys of slots. The database holds one stream."""

    def __init__(self, client: Any, stream: Stream) -> None:
        tags = {stream.name: "s", **{f"{stream.name}.{one.tag}": f"p{one.number}" for one in stream.partitions}}
        self._slots = {tag.encode(): slot for tag, slot in tags.items()}
        self._save, self._restore = client.register_script(SAVE), client.register_script(RESTORE)

    def save(self) -> dict[str, SlotState]:
        """Return the state of every slot, by its name in histories."""
        flat: list[bytes] = self._save()
        states: dict[str, SlotState] = {}
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            states.setdefault(self.slot_of(key), {})[key] = value
        return states

    def slot_of(self, key: bytes) -> str:
        """Return the name of a key's slot."""
        return self._slots.get(key.partition(b"{")[2].partition(b"}")[0], "names")

    def bring_back(self, states: dict[str, SlotState], slots: Iterable[str], now: dict[str, SlotState]) -> None:
        """Bring these slots back to a former state. ``now`` has the keys that they hold."""
        for slot in slots:
            flat = [part for pair in states.get(slot, {}).items() for part in pair]
            sample = next(iter({**states.get(slot, {}), **now.get(slot, {})}), None)
            if sample is not None:
                pattern = sample.partition(b"}")[0].replace(b"[", b"\\[") + b"}*"
                self._restore(args=[pattern, *flat])
