"""A reader's waits before it can begin: for a stream that has a spec, and for an epoch that is produced."""

from __future__ import annotations

from collections.abc import Callable

from penstock_common.errors import StreamNotFound, WaitTimeout
from penstock_common.hints import near
from penstock_common.stream.commands import Client
from penstock_common.stream.directory import list_streams
from penstock_common.stream.events import await_event, last_event
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.manifest import ABANDONED, PRODUCED, find_manifest
from penstock_common.stream.streams import Stream, absence, find_stream, is_released, read_counters
from penstock_common.waiting import FIRST_WORD_S, Wait

EVENT_MS = 1000
"""The length of one wait for an event. It is finite, because an event may be lost with the server's memory."""


def await_stream(client: Client, name: str, wait: Wait, go_on: Callable[[], object] = lambda: None) -> Stream:
    """Return the stream once it has a spec. For a name that is probably misspelt, the wait says so at once.

    ``go_on`` is called in each turn, and raises to end the wait. Raises StreamNotFound, WaitTimeout.
    """
    keys = StreamKeys(name)
    first_word_s: float | None = None
    while True:
        go_on()
        event = last_event(client, keys)
        stream = find_stream(client, name)
        if stream is not None and stream.spec is not None:
            return stream
        try:
            if stream is None:
                if first_word_s is None:
                    first_word_s = 0.0 if near(name, list_streams(client)) else FIRST_WORD_S
                wait.because("stream", lambda: absence(client, name), first_word_s=first_word_s)
            else:
                wait.because("spec", lambda: f"stream {name!r} has no sample yet: is a producer running?")
        except WaitTimeout as error:
            raise (StreamNotFound(str(error)) if stream is None else error) from None
        await_event(client, keys, event, EVENT_MS)


def await_epoch(client: Client, name: str, epoch: int, wait: Wait) -> None:
    """Return once nothing more will be written to the epoch, or no producer will begin it.

    Raises StreamNotFound, WaitTimeout.
    """
    stream = await_stream(client, name, wait)
    while True:
        event = last_event(client, stream.keys)
        _, final, _ = read_counters(client, stream)
        manifest = find_manifest(client, stream, epoch)
        if manifest is not None:
            is_over = manifest.state in (PRODUCED, ABANDONED)
        else:  # its number is given out a moment before its manifest is there
            is_over = is_released(client, stream, epoch) or (final is not None and epoch >= final)
        if is_over:
            return
        wait.because("epoch", lambda: f"epoch {epoch} of {name!r} is not produced yet; a replay needs all of it")
        await_event(client, stream.keys, event, EVENT_MS)
