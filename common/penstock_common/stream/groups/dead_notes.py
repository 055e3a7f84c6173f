"""The notes of dead letters: for each group and epoch one hash, entry id -> why and since when, as JSON.

Discarded samples are noted there, too: by entry id, or as ``shard:first-end`` if no entry is left.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock_common.stream.commands import Client
from penstock_common.stream.keys import PartitionKeys

_NAME = re.compile(rb"([0-9]{1,10}:)?[0-9]{1,18}-[0-9]{1,18}")
"""The names of the fields. Commands send them to the server as ids of entries."""


@dataclass(frozen=True, slots=True)
class DeadLetterNote:
    """The content of one field of the hash."""

    why: str
    since_ms: int = 0
    """The server's time."""
    given_up: bool = False
    """Whether an operator decided it. The group is done with the samples, and no further report is needed."""
    shard: int = -1
    """The shard of what was given up, or -1 if no index names it."""
    first: int = 0
    end: int = 0


def read_note(value: bytes) -> DeadLetterNote:
    """Parse any content: a note may be damaged, or of another version."""
    text = value.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        return DeadLetterNote(
            str(found["why"]), int(found.get("at", 0)), bool(found.get("given_up", False)),
            int(found.get("shard", -1)), int(found.get("first", 0)), int(found.get("end", 0)),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return DeadLetterNote(text)


def write_note(note: DeadLetterNote) -> str:
    """Return the JSON of a note on discarded samples."""
    offsets = {"shard": note.shard, "first": note.first, "end": note.end} if note.shard >= 0 else {}
    return json.dumps({"why": note.why, "at": note.since_ms, "given_up": True, **offsets})


def skipped(
    client: Client, partition: PartitionKeys, epoch: int, group: str
) -> tuple[set[bytes], list[DeadLetterNote]]:
    """Return what an ordered group skips.

    These are ids of entries that are dead or discarded, and discarded ranges without an entry.
    """
    notes = load_notes(client, partition, epoch, group)
    ranges = [note for name, note in notes.items() if b":" in name and note.given_up]
    return {name for name in notes if b":" not in name}, ranges


def load_notes(client: Client, partition: PartitionKeys, epoch: int, group: str) -> dict[bytes, DeadLetterNote]:
    """Return all notes, by entry id or, for discarded ranges, by ``shard:first-end``. Other fields are ignored."""
    reply: dict[bytes, bytes] = client.hgetall(partition.dead(epoch, group))
    notes = {name: read_note(value) for name, value in reply.items() if _NAME.fullmatch(name)}
    return {name: note for name, note in notes.items() if b":" not in name or note.given_up}
