"""Hints on a channel: a wait that ends at once when something happens to the stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock_common.server.channel import Channel, ReplyError
from penstock_common.server.connection import open_channel
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.events import CREATED, announce, event_command, last_event, read_event
from penstock_common.stream.keys import StreamKeys

KEYS = StreamKeys("t")
SOON_MS, LONG_MS = 20, 20_000


@pytest.fixture
def channel(url: str) -> Iterator[Channel]:
    """An open channel to the server."""
    opened = open_channel(connect(url))
    yield opened
    opened.close()


def last_id(client: Client) -> tuple[int, int]:
    """Return the id of the last hint."""
    high, _, low = last_event(client, KEYS).decode().partition("-")
    return int(high), int(low)


def test_a_hint_that_came_before_the_wait_began_ends_it_at_once(channel: Channel, client: Client) -> None:
    """An epoch may end between an answer and the pause after it."""
    announce(client, KEYS, CREATED, "t")
    first = last_id(client)
    announce(client, KEYS, "produced", 0)
    announce(client, KEYS, "produced", 1)
    channel.send([event_command(KEYS, first, LONG_MS)])
    assert read_event(channel, client) == last_id(client)


def test_a_wait_for_a_hint_that_nobody_gives_ends_by_itself(channel: Channel, client: Client) -> None:
    """Earlier hints were read before, and a stream whose hints were lost has none."""
    channel.send([event_command(KEYS, (0, 0), SOON_MS)])
    assert read_event(channel, client) is None
    announce(client, KEYS, CREATED, "t")
    channel.send([event_command(KEYS, last_id(client), SOON_MS)])
    assert read_event(channel, client) is None


def test_what_is_sent_behind_a_wait_is_done_after_it(channel: Channel, client: Client) -> None:
    """Otherwise a reader misses what came during its pause, or finds the end of an epoch before its last entries."""
    channel.send([event_command(KEYS, (0, 0), LONG_MS), (b"GET", b"key")])
    client.set("key", "late")
    announce(client, KEYS, CREATED, "t")
    assert read_event(channel, client) == last_id(client)
    assert channel.read() == b"late"


def test_a_key_that_holds_no_hints_is_named(channel: Channel, client: Client) -> None:
    """A wait on a key of another program would return at once each time, and keep a core busy."""
    client.set(KEYS.events, "text")
    channel.send([event_command(KEYS, (0, 0), SOON_MS)])
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        read_event(channel, client)
