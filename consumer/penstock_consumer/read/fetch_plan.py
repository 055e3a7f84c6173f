"""Plan a reader's requests: how much it asks for next, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from penstock_common.server.channel import Channel, Command, ReplyError
from penstock_common.server.error_translation import is_wrong_type
from penstock_common.stream.commands import Client
from penstock_common.stream.events import EventId, event_command, read_event
from penstock_common.stream.keys import StreamKeys

REQUESTS_AHEAD = 2
"""The requests under way at once. The server prepares the next reply while the reader receives this one."""
REQUEST_BYTES = 2_000_000
"""The payload bytes of one request. They hide a round trip, and the server copies all of them to its reply buffer."""
REFERRED_BYTES = 8_000_000
"""The payload bytes of one request if segments hold the payload, and only this member of the group reads. The server
copies nothing then, and a request costs as much as an entry."""
MOST_ENTRIES = 64
BLOCK_MS = 100
"""The longest wait of an idle read. It is finite, because an epoch may end without another entry."""
SHORTEST_MS = 10
"""The shortest wait. It grows while nothing comes. (A server checks ten times a second which waits are over.)"""
USUAL_TIMES = 2
"""The first wait is this many times the usual wait, if that is longer."""
GROUP_ASKS_S = 0.003
"""One of a group's waiting members asks at this interval, so their pauses delay no entry for longer."""
TAKEN_AT_ONCE = 3
"""A member pauses no longer than until this many entries are its share."""
PAUSES_IN_VAIN = 3
"""The fruitless pauses before a member waits at the server, which gives each entry alone to one waiting member.

The number is finite, because the hint that ends a pause at the epoch's end may be lost."""
BUDGET_SHARE = 8
"""A member pauses again only if `TAKEN_AT_ONCE` entries for each member are at most 1 / 8 of the stream's budget.

The writers must be able to continue during the pause."""


class FetchRequest(NamedTuple):
    """One read of one partition."""

    partition: int
    most: int
    """The most entries to return."""
    block_ms: int | None
    """The wait of the request for an entry. None means no wait."""


class EntryRhythm:
    """The times between entries that come one after the other."""

    def __init__(self) -> None:
        self.usual_wait_s = 0.0
        """The usual wait until an entry comes."""
        self.each_s = 0.0
        """The recent mean time from one entry to the next, or 0 before the second."""
        self._waited_s = 0.0
        """The time waited since the last entry came."""
        self._came_s: float | None = None
        """The time at which the last entry came."""

    def waited(self, seconds: float) -> None:
        """Note a wait for entries."""
        self._waited_s += seconds

    def came(self, entries: int, now_s: float) -> None:
        """Note that entries came."""
        self.usual_wait_s += (self._waited_s - self.usual_wait_s) * 0.2
        self._waited_s = 0.0
        if self._came_s is not None:
            self.each_s += ((now_s - self._came_s) / entries - self.each_s) * 0.2
        self._came_s = now_s


class FetchPlanner:
    """The plan of one reader's requests. The reader reports each answer to it."""

    def __init__(self, partitions: int, budget_bytes: int, stream_bytes: int, *, is_referred: bool = False) -> None:
        """``budget_bytes`` is the budget of the prefetch queue, and ``stream_bytes`` that of the stream.

        ``is_referred``: entries refer to segments.
        """
        self._partitions, self._stream_bytes, self._is_referred = partitions, stream_bytes, is_referred
        self._most_bytes = budget_bytes // (2 * REQUESTS_AHEAD)
        self.request_bytes = min(REQUEST_BYTES, self._most_bytes)
        """The bytes of one request: a small share of the prefetch budget, so that members of a group share fairly."""
        self._entry_bytes = 0.0
        """The recent mean size of an entry, or 0 before the first."""
        self._turn = 0
        self._empty = 0
        """The number of successive answers without an entry."""
        self._is_drained = False
        """Whether the last answer with entries brought all entries that existed."""
        self._rhythm = EntryRhythm()
        self._has_paused = False
        """Whether the reader has paused, so that entries are expected. If none came, the epoch may have ended."""
        self._in_vain = 0
        """The number of successive pauses after which nothing was there."""

    @property
    def is_waiting(self) -> bool:
        """Return whether the last answer brought nothing."""
        return self._empty > 0

    @property
    def is_idle(self) -> bool:
        """Return whether every partition answered "nothing", one after the other."""
        return self._empty >= self._partitions

    @property
    def ends_sweep(self) -> bool:
        """Return whether a whole round over the partitions has just brought nothing."""
        return self._empty > 0 and self._empty % self._partitions == 0

    def restart(self) -> None:
        """Forget the answers so far, because they say nothing about what exists now."""
        self._empty = self._in_vain = 0

    def share(self, members: int) -> None:
        """Learn how many members of the group share what comes."""
        is_alone = self._is_referred and members == 1
        self.request_bytes = min(REFERRED_BYTES if is_alone else REQUEST_BYTES, self._most_bytes)

    def received(self, nbytes: int) -> None:
        """Note that an entry of ``nbytes`` bytes came."""
        self._entry_bytes += (nbytes - self._entry_bytes) * (0.2 if self._entry_bytes else 1.0)

    def answered(self, request: FetchRequest, entries: int, waited_s: float, now_s: float) -> None:
        """Note that a request brought this many entries now, after a wait of ``waited_s``."""
        self._rhythm.waited(waited_s)
        if not entries:
            self._empty += 1
            self._in_vain += request.block_ms is None
            return
        self._is_drained = entries < request.most or self._empty > 0
        self._empty = self._in_vain = 0
        self._rhythm.came(entries, now_s)

    def pause_s(self, members: int) -> float:
        """Return how long to pause before the next request, as one of ``members`` that share what comes.

        Each entry wakes one waiting member, and a process that wakes among many finds its caches cold. So each member
        takes a few entries at a time. A member does not pause if it is alone, if it may find more at once, or if it
        expects no entry by then.
        """
        longest_s = min(members * GROUP_ASKS_S, BLOCK_MS / 1000)
        is_alone = members == 1 or self._partitions > 1
        is_due = self._is_drained and (self._empty == 0 or self._is_early(members))
        self._has_paused = not is_alone and is_due and 0 < self._rhythm.each_s < longest_s
        return min(longest_s, TAKEN_AT_ONCE * self._rhythm.each_s) if self._has_paused else 0.0

    def _is_early(self, members: int) -> bool:
        """Return whether nothing was there because another member had just asked."""
        owed_bytes = members * TAKEN_AT_ONCE * self._entry_bytes
        return self._empty == self._in_vain <= PAUSES_IN_VAIN and owed_bytes <= self._stream_bytes / BUDGET_SHARE

    def next_requests(self, under_way: int, *, is_ended: bool) -> list[FetchRequest]:
        """Return the requests to send now, a partition each. In an epoch that ``is_ended`` none of them waits.

        An idle reader sends one request, or with several partitions one to each, and waits for all its answers.
        So does a reader of one partition that was given every entry. After a pause no request waits.
        """
        size, round_of = self._partitions, max(self._partitions, REQUESTS_AHEAD)
        is_slow = self.is_idle or (size == 1 and self._is_drained)
        if is_slow and under_way:
            return []
        most, count = REQUESTS_AHEAD, self._count()
        if is_slow:  # with several partitions one entry each, so that a round brings no more than usual
            most, count = (
                (1, count) if size == 1 else (max(1, min(size - self._empty % size, REQUESTS_AHEAD * count)), 1)
            )
        requests = []
        for _ in range(most - under_way):
            is_last = (is_slow and size == 1) or self._turn % round_of == round_of - 1
            block_ms = None if is_ended or self._has_paused else self._patience_ms(is_last=is_last)
            requests.append(FetchRequest(self._turn % size, count, block_ms))
            self._turn += 1
        self._has_paused = False
        return requests

    def _count(self) -> int:
        """Return the number of entries to ask for at once."""
        if not self._entry_bytes:
            return 1
        return max(1, min(MOST_ENTRIES, int(self.request_bytes / self._entry_bytes)))

    def _patience_ms(self, *, is_last: bool) -> int | None:
        """Return how long a request may wait for an entry. The server answers it at once if there is one.

        Only one request waits at a time, or the reader would see an epoch's end late. With several partitions it is
        the last one of an idle reader's round.
        """
        if not is_last:
            return None
        rounds = self._empty // self._partitions
        if self._partitions > 1:  # a wait for one partition delays entries of the others
            return min(BLOCK_MS, SHORTEST_MS << min(rounds - 1, 4)) if rounds else None
        return min(BLOCK_MS, max(SHORTEST_MS, int(USUAL_TIMES * 1000 * self._rhythm.usual_wait_s)) << min(rounds, 4))


class FetchPause:
    """The pauses of one reader, which it spends at the server."""

    def __init__(self, client: Client, keys: StreamKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._keys, self._clock = client, keys, clock
        self._until_s = 0.0
        """The time at which the current pause ends."""
        self._after: EventId = (0, 0)
        self.is_under_way = False
        """Whether the wait was sent to the server."""
        self.is_told = False
        """Whether an event ended the last pause. Something happened then, and the epoch may have ended."""

    def received(self, entry_id: bytes) -> None:
        """Note that an entry came. The event of its epoch's end comes later, by the same clock."""
        appended_ms = int(entry_id.partition(b"-")[0] or 0)
        self._after = max(self._after, (max(0, appended_ms - 1), 0))

    def begin(self, seconds: float) -> None:
        """Begin a pause now, even if the queue has no space yet for what the next request brings."""
        self._until_s = self._clock() + seconds

    def commands(self) -> list[Command]:
        """Return the commands to send before the next request."""
        left_ms = round((self._until_s - self._clock()) * 1000)
        self.is_under_way, self.is_told = left_ms > 0, False
        return [event_command(self._keys, self._after, left_ms)] if self.is_under_way else []

    def end(self, channel: Channel) -> None:
        """Wait until the pause is over. Raises ServerUnavailable."""
        until_s = self._until_s
        self.forget()
        try:
            newest = read_event(channel, self._client)
        except ReplyError as error:
            if not is_wrong_type(error.error):
                raise
            # events are only hints; if the key is no stream, the server does not wait for one
            time.sleep(max(0.0, until_s - self._clock()))
            return
        if newest is not None:
            self._after, self.is_told = newest, True

    def forget(self) -> None:
        """Note that no pause is under way, because it is over or the connection broke."""
        self.is_under_way, self._until_s = False, 0.0


STEPS_AT_ONCE = 3
WITHIN_S = 0.1
"""The longest time that the first of these steps waits. Together they are at most 1 / `BUDGET_SHARE` of the budget."""


class StepPlanner:
    """The plan of one rank's waits. The rank reports to it what came."""

    def __init__(self, world: int, step_positions: int, budget_bytes: int) -> None:
        """``step_positions`` is the distance between two of its steps. It is larger for a share of the steps."""
        self._world, self._step, self._budget_bytes = world, step_positions, budget_bytes
        self._sample_bytes = self._each_s = 0.0
        """The recent bytes of a sample and time from one step to the next, or 0 while unknown."""
        self._last: tuple[int, float] | None = None

    def received(self, nbytes: int, samples: int) -> None:
        """Note that an entry came."""
        self._sample_bytes = nbytes / max(samples, 1)

    def reached(self, position: int, now_s: float) -> None:
        """Note that all below a position is committed now."""
        if self._last is not None and position > self._last[0]:
            each_s = (now_s - self._last[1]) * self._step / (position - self._last[0])
            self._each_s = each_s if not self._each_s else (self._each_s + each_s) / 2
        if self._last is None or position > self._last[0]:
            self._last = position, now_s

    def steps(self) -> int:
        """Return how many steps to wait for now. A rank that is alone, or knows nothing yet, waits for one."""
        if self._world == 1 or not self._sample_bytes or not self._each_s:
            return 1
        within_budget = int(self._budget_bytes / BUDGET_SHARE / (self._step * self._sample_bytes))
        return max(1, min(STEPS_AT_ONCE, within_budget, int(WITHIN_S / self._each_s)))
