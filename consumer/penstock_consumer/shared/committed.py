"""The comparison of received entries with the index: a commit writes an entry and its record together.

An entry that no record names was not written by a commit. A page of records is asked for when a header comes, and read
when the payload is there, so the server answers meanwhile. No answer of this connection condemns an entry alone.
"""

from __future__ import annotations

from penstock_common.errors import ServerUnavailable, UncommittedEntry
from penstock_common.wire.header import Header
from penstock_common.stream.entries import is_indexed
from penstock_common.server.channel import Channel, Reply
from penstock_common.stream.commands import Client
from penstock_common.server.connection import open_channel
from penstock_common.server.scripts import load_script
from penstock_common.stream.streams import Stream

_LIST_COMMITTED = load_script("list_committed").encode()
"""Sent in full: it is short, and a digest that the server forgot would be a refusal."""

PAGE = 32
"""Index records asked for at once by a group's only member; the members of a group divide it. More where an answer
brings more entries: these follow each other.
"""
MOST_SHARDS = 256
"""Shards of which a page is kept."""


class Committed:
    """What the indexes name, on a connection of its own that is opened at the first entry; used by one thread."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client, self._stream = client, stream
        self._channel: Channel | None = None
        self._pages: dict[tuple[int, int], dict[bytes, bytes]] = {}
        """(epoch, shard) -> id of a record, which is the block's end -> id of its entry."""
        self._awaited: tuple[int, int] | None = None
        """The epoch and shard of the page that was asked for and not read."""
        self._ahead = self._size = PAGE

    def begin(self, members: int) -> None:
        """Forgets the pages of earlier epochs; so many members divide what comes."""
        self._pages.clear()
        self._ahead = self._size = max(1, PAGE // members)

    def expect(self, entries: int) -> None:
        """The next answer brings at most so many entries."""
        self._size = max(self._ahead, entries)

    def ask(self, header: Header) -> None:
        """Asks for the records from the end of an entry on, unless its record is known."""
        at = header.epoch, header.shard
        page = self._pages.get(at)
        if page is not None and b"%d-0" % header.end in page:
            return
        self._receive()  # of an entry that was bad in itself
        key = self._stream.partition_of(header.shard).index(header.epoch, header.shard).encode()
        try:
            if self._channel is None:
                self._channel = open_channel(self._client)
            self._channel.send([(b"EVAL", _LIST_COMMITTED, b"1", key, b"%d-0" % header.end, b"%d" % self._size)])
            self._awaited = at
        except ServerUnavailable:  # idle for too long, perhaps: `require` asks the control client, which bears outages
            self.close()

    def require(self, header: Header, entry_id: bytes) -> None:
        """Raises UncommittedEntry unless the index, or a repair, names the entry; ServerUnavailable, DamagedKey."""
        self._receive()
        at = header.epoch, header.shard
        page = self._pages.get(at)
        record_id = b"%d-0" % header.end
        if page is not None and page.get(record_id) == entry_id:
            return
        partition = self._stream.partition_of(header.shard)
        if not is_indexed(self._client, partition, *at, header.end, entry_id):
            raise UncommittedEntry(
                f"no record of the index names this entry, which claims shard {header.shard} offsets "
                f"{header.first}-{header.end - 1}: no commit of Penstock wrote it, or its record was lost; "
                f"`penstock audit {self._stream.name}` tells"
            )
        if page is not None and record_id in page:  # a server that came back from an earlier moment
            del self._pages[at]

    def close(self) -> None:
        """Gives the connection back; again is harmless."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._awaited = None

    def _receive(self) -> None:
        channel = self._channel
        if self._awaited is None or channel is None:
            return
        at, self._awaited = self._awaited, None
        try:
            page = _page(channel.read())
        except ServerUnavailable:
            self.close()
            return
        if len(self._pages) >= MOST_SHARDS:
            self._pages.clear()
        self._pages[at] = page


def _page(reply: Reply) -> dict[bytes, bytes]:
    """Return entry ids by record id. After an error of the script the control client asks for each entry, and raises it."""
    words = reply.split() if isinstance(reply, bytes) else []
    return dict(zip(words[::2], words[1::2], strict=False))
