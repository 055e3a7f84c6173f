"""Hints on the events key asked for on a channel: what wakes a reader that rests. Only hints: one may be lost.

Whoever waits on a control connection has ``streams.await_event``; hints are given by ``streams.announce`` and scripts.
"""

from __future__ import annotations

from redis.exceptions import ResponseError

from penstock_common.server.channel import Channel, Command
from penstock_common.server.error_translation import translate_reply
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import parse_id
from penstock_common.stream.keys import StreamKeys

HintId = tuple[int, int]
"""Of the events key; its first part is the server's clock in ms, as in entry ids."""


def hint_command(keys: StreamKeys, after: HintId, block_ms: int) -> Command:
    """Waits so long (> 0) for a hint later than ``after``; what is sent behind it is done after that."""
    return (b"XREAD", b"BLOCK", b"%d" % block_ms, b"STREAMS", keys.events.encode(), b"%d-%d" % after)


def read_hint(channel: Channel, client: Client) -> HintId | None:
    """The answer: the last of the hints that came, None where none did. Raises ServerUnavailable, ReplyError."""
    reply = channel.read()
    if isinstance(reply, ResponseError):
        raise translate_reply(reply, client)
    match reply:
        case [[_, [*_, [bytes() as newest, *_]]]]:
            return parse_id(newest)
    return None
