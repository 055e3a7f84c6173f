"""Writers that wait for room, as others see them: a note on the partition's roster, renewed while the wait lasts.

Who must wait, and when a wait is noted, is the producer's. Readers take from it that somebody waits for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.keys import PartitionKeys

_NOTE_WAIT = load_script("note_wait")

RENEW_S = 1.0
"""A writer that waits says so again this often."""
STALE_MS = 10_000
"""A note unseen for so long is of a writer that died, or of a server that stood still: it is not counted."""

Why = Literal["budget", "memory", "folder"]
"""What is full: the stream's budget, the server's memory by other keys than the stream's, or the folder of segments."""
WHYS: Final[tuple[Why, ...]] = get_args(Why)


@dataclass(frozen=True, slots=True)
class Waiter:
    """One writer that waits for room."""

    since_ms: int
    """Server time the wait began."""
    seen_ms: int
    """Server time of its last sign of life."""
    need_bytes: int
    """Payload bytes of the block that waits."""
    held_bytes: int
    """Payload bytes the partition held when it last looked."""
    why: Why
    is_next: bool
    """Whether it has the lowest unfinished shard of its partition: then nothing but the readers can make room."""


def note_wait(
    client: Client, partition: PartitionKeys, epoch: int, shard: int, *, waited_s: float, need_bytes: int,
    held_bytes: int, why: Why, is_next: bool,
) -> None:  # fmt: skip
    """Says, or says again, that the writer of that shard waits for room, and since when."""
    args = [epoch, shard, int(waited_s * 1000), need_bytes, held_bytes, why, int(is_next)]
    run_script(client, _NOTE_WAIT, [partition.roster], args)


def end_wait(client: Client, partition: PartitionKeys, epoch: int, shard: int) -> None:
    """Takes the note away: the writer goes on, or has given up."""
    client.hdel(partition.roster, f"w:{epoch}:{shard}")


def read_waiters(notes: Mapping[str, str], now_ms: int) -> dict[tuple[int, int], Waiter]:
    """(epoch, shard) -> writer, of the roster's notes that are not stale."""
    waiters: dict[tuple[int, int], Waiter] = {}
    for name, text in notes.items():
        epoch, _, shard = name.partition(":")
        value = json.loads(text)
        if now_ms - int(value["seen"]) <= STALE_MS:
            waiters[int(epoch), int(shard)] = Waiter(
                since_ms=int(value["since"]),
                seen_ms=int(value["seen"]),
                need_bytes=int(value["need"]),
                held_bytes=int(value["held"]),
                why=value["why"],
                is_next=bool(value["next"]),
            )
    return waiters
