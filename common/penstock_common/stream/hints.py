"""Hints on the events key, read on a channel: they wake a reader that waits. A hint may be lost.

A wait on a control connection uses ``streams.await_event``. ``streams.announce`` and scripts write the hints.
"""

from __future__ import annotations

from redis.exceptions import ResponseError

from penstock_common.server.channel import Channel, Command
from penstock_common.server.error_translation import translate_reply
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import parse_id
from penstock_common.stream.keys import StreamKeys

HintId = tuple[int, int]
"""An id of the events key. Its first part is the server's clock in ms, as in entry ids."""


def hint_command(keys: StreamKeys, after: HintId, block_ms: int) -> Command:
    """Return a command that waits up to ``block_ms`` (> 0) for a hint later than ``after``.

    Commands behind it run after that.
    """
    return (b"XREAD", b"BLOCK", b"%d" % block_ms, b"STREAMS", keys.events.encode(), b"%d-%d" % after)


def read_hint(channel: Channel, client: Client) -> HintId | None:
    """Return the last of the hints that came, or None without one. Raises ServerUnavailable, ReplyError."""
    reply = channel.read()
    if isinstance(reply, ResponseError):
        raise translate_reply(reply, client)
    match reply:
        case [[_, [*_, [bytes() as newest, *_]]]]:
            return parse_id(newest)
    return None
