"""Writers that wait for quota, as others see them: a note on the partition's roster, renewed during the wait.

The producer decides who must wait, and when a wait is noted. Readers learn that somebody waits for them.
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
"""How often a waiting writer renews its note."""
STALE_MS = 10_000
"""A note that is older belongs to a writer that died, or to a server that stood still. It does not count."""

Why = Literal["budget", "memory", "folder"]
"""What is full: the stream's budget, the server's memory by keys of others, or the folder of segments."""
WHYS: Final[tuple[Why, ...]] = get_args(Why)


@dataclass(frozen=True, slots=True)
class Waiter:
    """One writer that waits for quota."""

    since_ms: int
    """The server's time when the wait began."""
    seen_ms: int
    """The server's time of its last note."""
    need_bytes: int
    """The payload bytes of the block that waits."""
    held_bytes: int
    """The payload bytes that the partition held at its last look."""
    why: Why
    is_next: bool
    """Whether it has the lowest unfinished shard of its partition: then only readers can free quota."""


def note_wait(
    client: Client, partition: PartitionKeys, epoch: int, shard: int, *, waited_s: float, need_bytes: int,
    held_bytes: int, why: Why, is_next: bool,
) -> None:  # fmt: skip
    """Note, or note again, that the writer of that shard waits for quota, and since when."""
    args = [epoch, shard, int(waited_s * 1000), need_bytes, held_bytes, why, int(is_next)]
    run_script(client, _NOTE_WAIT, [partition.roster], args)


def end_wait(client: Client, partition: PartitionKeys, epoch: int, shard: int) -> None:
    """Remove the note: the writer continues, or has given up."""
    client.hdel(partition.roster, f"w:{epoch}:{shard}")


def read_waiters(notes: Mapping[str, str], now_ms: int) -> dict[tuple[int, int], Waiter]:
    """Return (epoch, shard) -> writer, of the roster's notes that are not stale."""
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
