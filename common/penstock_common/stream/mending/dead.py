"""How dead letters are noted: per group and epoch one hash, entry id -> why and since when, as JSON.

What an operator gave up stands there too: by entry id, or as ``shard:first-end`` where no entry is left to name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock_common.stream.commands import Client
from penstock_common.stream.keys import PartitionKeys

_NAME = re.compile(rb"([0-9]{1,10}:)?[0-9]{1,18}-[0-9]{1,18}")
"""Of a field. Commands send these names to the server as ids of entries."""


@dataclass(frozen=True, slots=True)
class DeadNote:
    """One field of the hash."""

    why: str
    since_ms: int = 0
    """Server time."""
    given_up: bool = False
    """An operator's word: its samples are settled for the group, and nobody needs to be told again."""
    shard: int = -1
    """Of what was given up, -1 where no index names it."""
    first: int = 0
    end: int = 0


def read_note(value: bytes) -> DeadNote:
    """Takes whatever stands there: a note may be damaged, or of another version."""
    text = value.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        return DeadNote(
            str(found["why"]), int(found.get("at", 0)), bool(found.get("given_up", False)),
            int(found.get("shard", -1)), int(found.get("first", 0)), int(found.get("end", 0)),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return DeadNote(text)


def write_note(note: DeadNote) -> str:
    """The JSON of what is given up."""
    place = {"shard": note.shard, "first": note.first, "end": note.end} if note.shard >= 0 else {}
    return json.dumps({"why": note.why, "at": note.since_ms, "given_up": True, **place})


def skipped(client: Client, partition: PartitionKeys, epoch: int, group: str) -> tuple[set[bytes], list[DeadNote]]:
    """What an ordered group passes over: entries by id, dead or given up, and given up ranges that have no entry."""
    notes = load_notes(client, partition, epoch, group)
    ranges = [note for name, note in notes.items() if b":" in name and note.given_up]
    return {name for name in notes if b":" not in name}, ranges


def load_notes(client: Client, partition: PartitionKeys, epoch: int, group: str) -> dict[bytes, DeadNote]:
    """Return everything noted, by entry id or, of what was given up, ``shard:first-end``; other fields are nobody's."""
    reply: dict[bytes, bytes] = client.hgetall(partition.dead(epoch, group))
    notes = {name: read_note(value) for name, value in reply.items() if _NAME.fullmatch(name)}
    return {name: note for name, note in notes.items() if b":" not in name or note.given_up}
