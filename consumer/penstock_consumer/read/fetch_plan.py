"""The plan of a reader's requests: how much it asks for next, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from penstock_common.server.channel import Channel, Command, ReplyError
from penstock_common.server.error_translation import is_wrong_type
from penstock_common.stream.commands import Client
from penstock_common.stream.hints import HintId, hint_command, read_hint
from penstock_common.stream.keys import StreamKeys

AHEAD = 2
"""Requests under way at once: the server prepares the next reply while this one is received."""
REQUEST_BYTES = 2_000_000
"""Payload asked for at once: enough to hide a round trip, and the server copies all of it into its reply buffer."""
MOST_ENTRIES = 64
BLOCK_MS = 100
"""How long an idle read waits: finite, because an epoch may end without another entry."""
SHORTEST_MS = 10
"""At first so long, then longer the longer nothing comes. (A server looks ten times a second whose time is over.)"""
USUAL_TIMES = 2
"""Or at first so many times as long as is usual."""
GROUP_ASKS_S = 0.003
"""Of a group's members that wait, one asks so often: no entry lies there longer because they rest in between."""
TAKEN_AT_ONCE = 3
"""A member rests no longer than until so many entries are its share."""
RESTS_IN_VAIN = 3
"""So often it rests again before it waits at the server, which gives each entry alone to one of those that wait. Not
for ever: the hint that ends a rest when the epoch ends may be lost."""
BUDGET_SHARE = 8
"""And only where that many entries for each member are at most this part of the stream's budget, 1 / 8: its writers
are to go on meanwhile."""


class FetchRequest(NamedTuple):
    """One read of one partition."""

    partition: int
    most: int
    """Entries at most."""
    block_ms: int | None
    """How long it waits for one; None: not at all."""


class FetchPlanner:
    """The plan of one reader's requests. The reader reports each answer to it."""

    def __init__(self, partitions: int, budget_bytes: int, stream_bytes: int) -> None:
        """``budget_bytes`` are those of the prefetch queue, ``stream_bytes`` the stream's."""
        self._partitions, self._stream_bytes = partitions, stream_bytes
        self.request_bytes = min(REQUEST_BYTES, budget_bytes // (2 * AHEAD))
        """Asked for at once: a small share of the prefetch budget, so that members of a group share fairly."""
        self._entry_bytes = 0.0
        """As of late; 0 before the first."""
        self._turn = 0
        self._empty = 0
        """Answers without an entry, one after the other."""
        self._is_drained = False
        """Whether the last answer with entries brought all there were."""
        self._waited_s = self._usual_s = 0.0
        """Waited since the last entry came; what was usual until then."""
        self._has_rested = False
        """Whether entries should have come by now: if none have, the epoch may have ended."""
        self._in_vain = 0
        """Rests behind which nothing was, one after the other."""
        self._each_s = 0.0
        """From one entry to the next, as of late; 0 before the second."""
        self._came_s: float | None = None
        """When the last of them came."""

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
        """Return whether every partition gave the same number of answers that brought nothing."""
        return self._empty > 0 and self._empty % self._partitions == 0

    def restart(self) -> None:
        """Forget the answers so far: they say nothing about what is there now."""
        self._empty = self._in_vain = 0

    def received(self, nbytes: int) -> None:
        """An entry of so many bytes."""
        self._entry_bytes += (nbytes - self._entry_bytes) * (0.2 if self._entry_bytes else 1.0)

    def answered(self, request: FetchRequest, entries: int, waited_s: float, now_s: float) -> None:
        """One request brought so many entries now, and was waited for so long."""
        self._waited_s += waited_s
        if not entries:
            self._empty += 1
            self._in_vain += request.block_ms is None
            return
        self._is_drained = entries < request.most or self._empty > 0
        self._empty = self._in_vain = 0
        self._usual_s += (self._waited_s - self._usual_s) * 0.2
        self._waited_s = 0.0
        if self._came_s is not None:
            self._each_s += ((now_s - self._came_s) / entries - self._each_s) * 0.2
        self._came_s = now_s

    def rest_s(self, members: int) -> float:
        """Return how long to rest before the next request, as one of ``members`` that share what comes.

        Each entry wakes one of those that wait, and a process that is woken among many finds its caches cold: so each
        takes a few entries at a time. Who is alone, may find more at once, or has none to expect by then does not rest.
        """
        longest_s = min(members * GROUP_ASKS_S, BLOCK_MS / 1000)
        is_alone = members == 1 or self._partitions > 1
        is_due = self._is_drained and (self._empty == 0 or self._is_early(members))
        self._has_rested = not is_alone and is_due and 0 < self._each_s < longest_s
        return min(longest_s, TAKEN_AT_ONCE * self._each_s) if self._has_rested else 0.0

    def _is_early(self, members: int) -> bool:
        """Return whether nothing was there because another member had just asked."""
        owed_bytes = members * TAKEN_AT_ONCE * self._entry_bytes
        return self._empty == self._in_vain <= RESTS_IN_VAIN and owed_bytes <= self._stream_bytes / BUDGET_SHARE

    def next_requests(self, under_way: int, *, is_ended: bool) -> list[FetchRequest]:
        """Return the requests to send now, a partition each. In an epoch that ``is_ended`` none of them waits.

        An idle reader sends one request, or with several partitions a sweep over them, and waits for all its answers;
        so does a reader of one partition that was given all there was. After a rest nothing is waited for.
        """
        size, round_of = self._partitions, max(self._partitions, AHEAD)
        is_slow = self.is_idle or (size == 1 and self._is_drained)
        if is_slow and under_way:
            return []
        most, count = AHEAD, self._count()
        if is_slow:  # one entry each where there are several: all of them together are no more than else
            most, count = (1, count) if size == 1 else (max(1, min(size - self._empty % size, AHEAD * count)), 1)
        requests = []
        for _ in range(most - under_way):
            is_last = (is_slow and size == 1) or self._turn % round_of == round_of - 1
            block_ms = None if is_ended or self._has_rested else self._patience_ms(is_last=is_last)
            requests.append(FetchRequest(self._turn % size, count, block_ms))
            self._turn += 1
        self._has_rested = False
        return requests

    def _count(self) -> int:
        """Entries asked for at once."""
        if not self._entry_bytes:
            return 1
        return max(1, min(MOST_ENTRIES, int(self.request_bytes / self._entry_bytes)))

    def _patience_ms(self, *, is_last: bool) -> int | None:
        """Return how long a request may wait for an entry. The server answers it at once where there is one.

        One at a time waits, or an end is seen late; of several partitions the last one of an idle reader's sweep.
        """
        if not is_last:
            return None
        sweeps = self._empty // self._partitions
        if self._partitions > 1:  # while one is waited for, what comes in another one lies there
            return min(BLOCK_MS, SHORTEST_MS << min(sweeps - 1, 4)) if sweeps else None
        return min(BLOCK_MS, max(SHORTEST_MS, int(USUAL_TIMES * 1000 * self._usual_s)) << min(sweeps, 4))


class FetchPause:
    """The pauses of one reader, which it spends at the server."""

    def __init__(self, client: Client, keys: StreamKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._keys, self._clock = client, keys, clock
        self._until_s = 0.0
        """When the rest that was decided on ends."""
        self._after: HintId = (0, 0)
        self.is_under_way = False
        """Whether the wait was sent."""
        self.is_told = False
        """Whether a hint has ended the last one: something happened, and the epoch may have ended."""

    def received(self, entry_id: bytes) -> None:
        """An entry came: what is said of its epoch's end is said later, by the same clock."""
        appended_ms = int(entry_id.partition(b"-")[0] or 0)
        self._after = max(self._after, (max(0, appended_ms - 1), 0))

    def begin(self, seconds: float) -> None:
        """From now on, not from when there is room for what the next request brings."""
        self._until_s = self._clock() + seconds

    def commands(self) -> list[Command]:
        """Return the commands to send before the next request."""
        left_ms = round((self._until_s - self._clock()) * 1000)
        self.is_under_way, self.is_told = left_ms > 0, False
        return [hint_command(self._keys, self._after, left_ms)] if self.is_under_way else []

    def end(self, channel: Channel) -> None:
        """Returns when the rest is over. Raises ServerUnavailable."""
        until_s = self._until_s
        self.forget()
        try:
            newest = read_hint(channel, self._client)
        except ReplyError as error:
            if not is_wrong_type(error.error):
                raise
            # the key has only hints, and where it is no stream the server does not wait for any
            time.sleep(max(0.0, until_s - self._clock()))
            return
        if newest is not None:
            self._after, self.is_told = newest, True

    def forget(self) -> None:
        """It is over, or the connection broke: nothing is under way."""
        self.is_under_way, self._until_s = False, 0.0


STEPS_AT_ONCE = 3
WITHIN_S = 0.1
"""So long the first of them lies there at most; and they are at most 1 / `BUDGET_SHARE` of the stream's budget."""


class StepPlanner:
    """The plan of one rank's waits. The rank reports to it what came."""

    def __init__(self, world: int, step_positions: int, budget_bytes: int) -> None:
        """``step_positions`` from one of its steps to the next: of a share of them more than a step has."""
        self._world, self._step, self._budget_bytes = world, step_positions, budget_bytes
        self._sample_bytes = self._each_s = 0.0
        """Of a sample, and from one step to the next, as of late; 0 while they are not known."""
        self._last: tuple[int, float] | None = None

    def received(self, nbytes: int, samples: int) -> None:
        """One entry."""
        self._sample_bytes = nbytes / max(samples, 1)

    def reached(self, position: int, now_s: float) -> None:
        """All below a position is committed now."""
        if self._last is not None and position > self._last[0]:
            each_s = (now_s - self._last[1]) * self._step / (position - self._last[0])
            self._each_s = each_s if not self._each_s else (self._each_s + each_s) / 2
        if self._last is None or position > self._last[0]:
            self._last = position, now_s

    def steps(self) -> int:
        """Return how many steps to wait for now. A rank that is alone, or knows nothing yet, waits for one."""
        if self._world == 1 or not self._sample_bytes or not self._each_s:
            return 1
        room = int(self._budget_bytes / BUDGET_SHARE / (self._step * self._sample_bytes))
        return max(1, min(STEPS_AT_ONCE, room, int(WITHIN_S / self._each_s)))
