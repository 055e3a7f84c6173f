"""Choose and join rows of batches, with the spans that say which entries the rows come from.

Each stage decides which rows it chooses. Nothing here uses Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.wire.ragged import Ragged
from penstock_consumer.stages.batch import ArrayPool, Batch, BatchSpan, Lease


def unrolled(spans: Sequence[BatchSpan]) -> tuple[list[Lease], NDArray[np.int64]]:
    """Return the lease and the offset of each row."""
    leases = [span.lease for span in spans for _ in range(span.hi - span.lo)]
    parts = [np.arange(span.lo, span.hi, dtype=np.int64) for span in spans]
    return leases, np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def rolled(leases: Sequence[Lease], offsets: Sequence[int]) -> list[BatchSpan]:
    """Return the spans of rows in this order. Consecutive offsets of one entry become one span."""
    spans: list[BatchSpan] = []
    held: Lease | None = None
    start = end = 0
    for lease, offset in zip(leases, offsets, strict=True):
        if lease is not held or offset != end:
            if held is not None:
                spans.append(BatchSpan(held, start, end))
            held, start = lease, offset
        end = offset + 1
    return [*spans, BatchSpan(held, start, end)] if held is not None else []


def chosen_spans(spans: Sequence[BatchSpan], rows: NDArray[np.int64]) -> list[BatchSpan]:
    """Return the spans of the chosen rows."""
    leases, offsets = unrolled(spans)
    return rolled([leases[row] for row in rows.tolist()], offsets[rows].tolist())


def gathered(source: NDArray[Any], rows: NDArray[np.int64], pool: ArrayPool) -> NDArray[Any]:
    """Return the chosen rows in aligned memory. This is the only copy that a batch costs."""
    target = pool.array((len(rows), *source.shape[1:]), source.dtype)
    # 'clip' writes directly into the target, and 'raise' would use a buffer between; all rows exist
    return np.take(source, rows, axis=0, out=target, mode="clip")


def taken(value: Any, rows: NDArray[np.int64], pool: ArrayPool) -> Any:
    """Return the chosen rows of one tensor of a batch."""
    return value.take(rows) if isinstance(value, Ragged) else gathered(value, rows, pool)


def joined(values: Sequence[Any], pool: ArrayPool) -> Any:
    """Return the rows of one tensor from several batches, in their order."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], Ragged):
        return Ragged.concatenate(values)
    target = pool.array((sum(map(len, values)), *values[0].shape[1:]), values[0].dtype)
    return np.concatenate(values, out=target)


def dropped(batch: Batch, spans: Sequence[BatchSpan]) -> Batch:
    """Return a batch of rows that the loop never gets and that count as trained on."""
    return Batch({}, batch.epoch, spans, batch.position, is_dropped=True)
