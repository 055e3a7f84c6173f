"""Waiting until a stream exists and has a spec: before that there is nothing to join."""

from __future__ import annotations

from penstock_common.errors import StreamNotFound, WaitTimeout
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.link.commands import Client
from penstock_common.stream.streams import Stream, absence, await_event, find_stream, last_event
from penstock_common.waiting import Wait

EVENT_MS = 1000
"""How long one wait for an event is: finite, since an event may be lost with the server's memory."""


def await_stream(client: Client, name: str, wait: Wait) -> Stream:
    """The stream, once it has a spec. Raises StreamNotFound, WaitTimeout."""
    keys = StreamKeys(name)
    while True:
        event = last_event(client, keys)
        stream = find_stream(client, name)
        if stream is not None and stream.spec is not None:
            return stream
        try:
            if stream is None:
                wait.because("stream", lambda: absence(client, name))
            else:
                wait.because("spec", lambda: f"stream {name!r} has no sample yet: is a producer running?")
        except WaitTimeout as error:
            raise (StreamNotFound(str(error)) if stream is None else error) from None
        await_event(client, keys, event, EVENT_MS)
