"""A batch as the bytes of one message: the entries of docs/wire-format.md, one after the other.

The message begins with ``PSB1`` and the batch's number (u32). Each field follows as the bytes of its name (u32), the
bytes of its value (u32), name and value, each filled up to a multiple of 8. Numbers are little-endian. A field ``meta``
begins an entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from penstock_common.wire.block import Block, Column
from penstock_common.wire.codec import Fields, encode
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import Batch

MAGIC = b"PSB1"
ALIGN = 8
"""A payload at a multiple of this is used as a typed array in place."""
_PAIR = struct.Struct("<II")


def message_of(number: int, batch: Batch, spec: Spec, stream_id: str) -> bytes:
    """Return a batch as the bytes of one message. Each span of its rows becomes an entry with a checksum."""
    parts: list[Any] = [MAGIC + struct.pack("<I", number)]
    for fields in _entries(batch, spec, stream_id):
        for name, value in fields:
            parts += [_PAIR.pack(len(name), len(value)), name, _filling(len(name)), value, _filling(len(value))]
    return b"".join(parts)


def _filling(size: int) -> bytes:
    return bytes(-size % ALIGN)


def _entries(batch: Batch, spec: Spec, stream_id: str) -> Iterator[Fields]:
    start = 0
    for lease, lo, hi in batch.spans:
        rows = slice(start, start + hi - lo)
        block = Block(lo, hi - lo, [_column(batch, tensor, rows) for tensor in spec])
        yield encode(block, stream=stream_id, epoch=batch.epoch, shard=lease.shard)
        start = rows.stop


def _column(batch: Batch, tensor: Any, rows: slice) -> Column:
    value = batch[tensor.name][rows]
    return Column(tensor, value.values, value.shapes) if isinstance(value, Ragged) else Column(tensor, value)
