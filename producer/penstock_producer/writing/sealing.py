"""Segments of a shard that are full: the server is told that they get no more entries, so that they may be used again.

Told behind the next block, which costs no round trip, and by itself where the writer waits or ends.
"""

from __future__ import annotations

from penstock_common.segments.writing import SegmentWriter
from penstock_common.server.channel import Command, Reply
from penstock_common.stream.commands import Client, Run
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.registry import seal_command, seal_segments


class Sealing:
    """Of one shard. Only segments are named of whose entries none is under way: one that comes later would be lost."""

    def __init__(
        self, client: Client, partition: PartitionKeys, manifest: Manifest, lane: SegmentWriter | None
    ) -> None:
        self._client, self._partition, self._manifest, self._lane = client, partition, manifest, lane

    def behind(self, *under_way: str) -> tuple[list[str], list[Command]]:
        """What to say behind a block, and how; its answer goes to `answered`.

        ``under_way``: segments in which blocks lie that are not known to be committed.
        """
        names = [name for name in self._lane.full if name not in under_way] if self._lane is not None else []
        return names, [seal_command(self._partition, self._manifest, names)] if names else []

    def answered(self, names: list[str], reply: Reply) -> None:
        """A number, if it was heard; what the server refused is said again, as is what a broken connection took."""
        if self._lane is not None and type(reply) is int:
            self._lane.full = [name for name in self._lane.full if name not in names]

    def now(self, run: Run | None = None) -> None:
        """Says it of all of them, by ``run`` or else the client; no block may be under way."""
        if self._lane is not None and self._lane.full:
            seal_segments(self._client, self._partition, self._manifest, self._lane.full, run=run)
            self._lane.full.clear()
