"""A shared reader's rests: how long is ``asking``'s, here is where they are spent, which is at the server.

The wait for a hint and the read behind it are sent together: so whoever rests is woken once, by the answers to both,
and at once when the epoch ends (decision 23).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock_common.stream.hints import HintId, hint_command, read_hint
from penstock_common.stream.keys import StreamKeys
from penstock_common.server.channel import Channel, Command, ReplyError
from penstock_common.stream.commands import Client
from penstock_common.server.error_translation import is_wrong_type


class Resting:
    """Of one reader."""

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
        """What is to be sent before the next request."""
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
