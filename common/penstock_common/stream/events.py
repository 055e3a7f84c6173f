"""The events key of a stream, which wakes its readers and writers. An event is a hint, and may be lost.

Scripts write events, too.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from penstock_common.errors import DamagedKey, WritesRefused
from penstock_common.server.channel import Channel, Command
from penstock_common.server.error_translation import translate_reply
from penstock_common.stream.commands import Client, parse_id
from penstock_common.stream.keys import StreamKeys

EVENTS_KEPT = 256
DAMAGED_PAUSE_MS = 100
"""The pause between two checks of a wait while the events key is damaged."""
CREATED = "created"

EventId = tuple[int, int]
"""An id of the events key. Its first part is the server's clock in ms, as in entry ids."""


def announce(client: Client, keys: StreamKeys, what: str, value: object) -> None:
    """Wake all that wait for a change of this stream. An event is a hint only, so old ones may be trimmed."""
    # a deleted stream announces nothing, because its events key must not come back
    # no stream any more, no id is left in it, or the server is above maxmemory: waits check without hints
    with suppress(DamagedKey, ResponseError, WritesRefused):
        client.xadd(keys.events, {what: str(value)}, maxlen=EVENTS_KEPT, approximate=True, nomkstream=what != CREATED)


def last_event(client: Client, keys: StreamKeys) -> bytes:
    """Return the id of the newest event. Read it before the state and give it to `await_event`, to miss no event."""
    found: list[tuple[bytes, Any]] = []
    with suppress(DamagedKey):  # `await_event` knows what to do then
        found = client.xrevrange(keys.events, count=1)
    return found[0][0] if found else b"0-0"


def await_event(client: Client, keys: StreamKeys, after: bytes, block_ms: int) -> None:
    """Wait for an event after ``after``, at most ``block_ms`` (> 0).

    If another program changed the key's type, this returns after a short pause, and the caller checks the state.
    """
    try:
        client.xread({keys.events: after}, block=max(1, block_ms), count=1)
    except DamagedKey:
        time.sleep(min(block_ms, DAMAGED_PAUSE_MS) / 1000)


def event_command(keys: StreamKeys, after: EventId, block_ms: int) -> Command:
    """Return a command that waits up to ``block_ms`` (> 0) for a hint later than ``after``.

    Commands behind it run after that.
    """
    return (b"XREAD", b"BLOCK", b"%d" % block_ms, b"STREAMS", keys.events.encode(), b"%d-%d" % after)


def read_event(channel: Channel, client: Client) -> EventId | None:
    """Return the last of the hints that came, or None without one. Raises ServerUnavailable, ReplyError."""
    reply = channel.read()
    if isinstance(reply, ResponseError):
        raise translate_reply(reply, client)
    match reply:
        case [[_, [*_, [bytes() as newest, *_]]]]:
            return parse_id(newest)
    return None
