"""The check that a server takes commands as large as a block. Some managed services limit the size of a request."""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import Final

from redis.exceptions import NoPermissionError, ResponseError

from penstock_common.errors import ServerUnavailable, ServerUnsuitable
from penstock_common.printable import readable_bytes
from penstock_common.server.connection import open_channel
from penstock_common.server.error_translation import may_pass, server_at
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import StreamKeys, scratch_key
from penstock_common.stream.servers.suitability import takes_config
from penstock_common.stream.streams import DEFAULT_BLOCK_BYTES
from penstock_common.waiting import Notify

PROBE_BYTES: Final = 2_000_000
"""Twice the usual block, because a block may end with a sample that makes it larger."""
AROUND_BYTES: Final = 40_000
"""The bytes of a command that are not payload, at most, for usual blocks."""
SMALLER: Final = (1_000_000, 500_000, 250_000, 125_000, 60_000)
"""The blocks that are tried once the probe is refused."""


def require_takes_blocks(
    client: Client, name: str, block_bytes: int | None, payload: str | None, notify: Notify
) -> None:
    """Send a server whose limits cannot be read a command of 2 MB, or of the block if that is larger.

    Call it before the stream is made. ``notify`` gets a smaller limit that the block keeps to.

    Args:
        client: The streams' server.
        name: The stream.
        block_bytes: The wanted block. None is that of the stream, or the default.
        payload: The payload storage of a new stream. A server gets no payloads that are in segments.
        notify: Called with a line.

    Raises:
        ServerUnsuitable: The server takes no command as large as a block. It says which block it takes.
    """
    if takes_config(client):  # then its own limit of 512 MB holds, or one that an operator of the server chose
        return
    stored, kept = client.hmget(StreamKeys(name).meta, "block_bytes", "payload")
    if (payload or (kept or b"inline").decode("utf-8", "replace")) != "inline":
        return
    block = int(block_bytes or stored or DEFAULT_BLOCK_BYTES)
    probe = max(PROBE_BYTES, block + AROUND_BYTES)
    if not (refusal := _refusal(client, probe)):
        return
    taken = next((size for size in SMALLER if not _refusal(client, size + AROUND_BYTES)), 0)
    start = f"{server_at(client.where)} refuses a command of {readable_bytes(probe)} ({refusal})"
    if block <= taken:
        notify(f"{start}: blocks of {taken} bytes fit, and a sample that is larger cannot be written")
        return
    instead = (
        f"set block_bytes={taken} (penstock.Tuning(block_bytes={taken})), and make no larger samples"
        if taken
        else "take another server, because it refuses small ones, too"
    )
    raise ServerUnsuitable(f"{start}, and a block of stream {name!r} has {block} bytes: {instead}")


def _refusal(client: Client, nbytes: int) -> str:
    """Return why the server refuses a command of this size, or ''. Another reason to refuse it tells nothing."""
    key = scratch_key(secrets.token_hex(6)).encode()
    with closing(open_channel(client, key)) as channel:
        try:
            channel.send([(b"SET", key, bytes(nbytes), b"EX", b"1"), (b"UNLINK", key)])
            answer = channel.read()
            if not isinstance(answer, ResponseError):
                channel.read()
                return ""
        except ServerUnavailable as error:
            client.ping()  # raises if the server is away
            return str(error.__cause__ or error)
    return "" if may_pass(answer) or isinstance(answer, NoPermissionError) else str(answer)
