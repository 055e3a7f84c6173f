"""A shard's segments: how large they are made, and whether they are on the disk before the entry is.

Writing them is ``segments.writing``'s; who may use them again is ``recycling``'s.
"""

from __future__ import annotations

from penstock_common.segments.writing import SegmentWriter
from penstock_common.stream.durability import Durability
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.streams import Stream

SEGMENT_BYTES = 64 << 20
"""Large enough that making and sealing one costs nothing per byte, small enough that they turn over in a budget."""
BUDGET_SHARE = 1 / 16
"""Of a partition's budget: what a segment holds that is not settled keeps the rest of it from being used again."""


def open_lane(stream: Stream, manifest: Manifest, shard: int) -> SegmentWriter | None:
    """For the blocks of one shard; None where payloads travel in the entries. Raises SegmentsUnseen."""
    folder = segments_of(stream)
    if folder is None:
        return None
    assert stream.spec is not None
    folder.make()
    return SegmentWriter(
        folder, (stream.name, stream.id), stream.spec, manifest.epoch, stream.partition_of(shard).number,
        segment_bytes=segment_bytes(stream, manifest, shard), is_synced=Durability.parse(stream.durability).is_synced,
    )  # fmt: skip


def segment_bytes(stream: Stream, manifest: Manifest, shard: int) -> int:
    """So large that a small shard takes no more than it needs, and a large one turns over within the budget."""
    most = max(2 * stream.block_bytes, min(SEGMENT_BYTES, int(stream.partition_budget * BUDGET_SHARE)))
    if manifest.sizes is None or stream.spec is None or any(tensor.is_ragged for tensor in stream.spec):
        return most
    payload = manifest.shard_size(shard) * sum(tensor.sample_bytes for tensor in stream.spec)
    entries = payload // max(1, stream.block_bytes) + 2
    return min(most, payload + entries * 2048 + (64 << 10))
