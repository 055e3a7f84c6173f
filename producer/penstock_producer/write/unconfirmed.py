"""The committed blocks of a shard that its server may still lose, and the times at which it is asked about them.

A failover loses a server's newest writes. The writer keeps what no replica, or no disk, has confirmed, and sends it
again. So confirmations are asked for seldom, and no block waits for the one before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock_common.stream.servers.durability import MEMORY, Durability, ReplicaWatch
from penstock_common.wire.block import Block

UNCONFIRMED_BYTES: Final = 64 << 20
"""Payload bytes of committed blocks that a shard's writer keeps while they are not confirmed."""
ASK_BYTES: Final = 8 << 20
"""Payload bytes after which the server is asked again. An answer holds back the connection until a replica has all."""
ASK_S: Final = 0.1
"""Seconds after which it is asked again, however little was written."""
ANSWER_MS: Final = 20
"""The longest time that an answer may hold back the blocks behind it."""
PAUSE_S: Final = 1.0
"""Seconds without a question after an answer that said no: a replica that stands still must not slow a writer down."""


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A committed block, in memory that nothing else uses, with the reasons of its holes."""

    block: Block
    bad: Mapping[int, str]
    entries: list[bytes] = field(default_factory=list)
    """The ids that it was given each time it was committed."""


class UnconfirmedBlocks:
    """The committed blocks of one shard that are not confirmed at the level of the stream."""

    def __init__(
        self,
        durability: Durability,
        watch: ReplicaWatch,
        key: str,
        clock: Callable[[], float],
    ) -> None:
        """Begin with no block.

        Args:
            durability: The level of the stream.
            watch: Says which servers have replicas.
            key: A key of the shard's partition, whose server is asked.
            clock: Monotonic clock.
        """
        self.durability = durability
        """The level of the stream."""
        self._watch, self._key, self._clock = watch, key, clock
        self._blocks: deque[KeptBlock] = deque()
        self._bytes = self._unasked_bytes = 0
        self._due = -math.inf
        """The time from which the next block carries a question, if not enough bytes came before."""
        self._pause_ends = -math.inf
        self.confirmed = 0
        """All offsets below it have the level."""

    def level(self, *, is_elsewhere: bool = False) -> Durability:
        """Return the level that a write must reach now, which is `memory` with `auto` on a server without a replica.

        ``is_elsewhere`` means that it goes to another server than the one that the map names for the key. That one may
        have lost its place to a replica, with what is written there, so it counts as one with a replica.
        """
        return self._watch.level(self.durability, self._key, is_followed=is_elsewhere)

    @property
    def first(self) -> int | None:
        """The first offset that can be sent again, or None if no block is kept."""
        return self._blocks[0].block.first if self._blocks else None

    def question(self, level: Durability, nbytes: int) -> Durability:
        """Return the level to ask for behind a block of ``nbytes`` that must reach ``level``.

        It has no commands if no question is due.
        """
        if not level.has_question:
            return level
        now = self._clock()
        self._unasked_bytes += nbytes
        if now < self._pause_ends or (self._unasked_bytes < ASK_BYTES and now < self._due):
            return MEMORY
        self._unasked_bytes, self._due = 0, now + ASK_S
        return level

    def committed(self, block: Block, bad: Mapping[int, str], must_reach: Durability, entry_id: bytes = b"") -> None:
        """Keep a block that the server has committed, unless it is kept already. `auto` drops the oldest for it.

        ``must_reach`` is the `level` at which it was sent. By now the map may name a successor that lacks it.
        ``entry_id`` is empty if nothing was appended, because every sample is bad.
        """
        ids = [entry_id] if entry_id else []
        # a replica that comes, or comes back, may take the server's place without this block
        is_kept = must_reach.has_question or (self.durability.is_auto and self._watch.may_be_replaced(self._key))
        if not is_kept:  # blocks behind it are still to be sent again to a server that lost them
            while self._blocks and self._blocks[0].block.end <= block.end:
                self._drop_oldest()
            return
        if self._blocks and block.end <= self._blocks[-1].block.end:
            if (kept := self.at(block.first)) is not None and kept.block.first == block.first:
                kept.entries.extend(ids)
            return
        self._blocks.append(KeptBlock(block, bad, ids))
        self._bytes += block.nbytes
        while self.durability.is_auto and self._bytes > UNCONFIRMED_BYTES:
            self._drop_oldest()

    def answered(self, end: int, *, is_confirmed: bool) -> None:
        """Take the answer to a question that was sent behind the offset ``end``."""
        if not is_confirmed:
            self._pause_ends = self._clock() + PAUSE_S
            return
        self.confirmed, self._pause_ends = max(self.confirmed, end), -math.inf
        while self._blocks and self._blocks[0].block.end <= end:
            self._drop_oldest()

    def must_wait(self, nbytes: int) -> bool:
        """Return True if an explicit level allows no further block of ``nbytes`` before some are confirmed."""
        is_full = bool(self._blocks) and self._bytes + nbytes > UNCONFIRMED_BYTES
        return is_full and not self.durability.is_auto

    def at(self, offset: int) -> KeptBlock | None:
        """Return the kept block that has this offset, or None."""
        return next((kept for kept in self._blocks if kept.block.first <= offset < kept.block.end), None)

    def all(self) -> list[KeptBlock]:
        """Return the kept blocks by offset."""
        return list(self._blocks)

    def _drop_oldest(self) -> None:
        self._bytes -= self._blocks.popleft().block.nbytes
