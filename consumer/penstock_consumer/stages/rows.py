"""Rows of batches: choosing some of them, joining those of several, and the spans that say whose they are.

Which rows a stage chooses is its own business. No Redis here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.wire.ragged import Ragged
from penstock_consumer.stages.batch import Batch, BatchSpan, Lease
from penstock_consumer.stages.buffers import ArrayPool


def unrolled(spans: Sequence[BatchSpan]) -> tuple[list[Lease], NDArray[np.int64]]:
    """Lease and offset of each row."""
    leases = [span.lease for span in spans for _ in range(span.hi - span.lo)]
    parts = [np.arange(span.lo, span.hi, dtype=np.int64) for span in spans]
    return leases, np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def rolled(leases: Sequence[Lease], offsets: Sequence[int]) -> list[BatchSpan]:
    """The spans of rows in this order; neighbours of one entry are one span."""
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
    """The spans of some rows."""
    leases, offsets = unrolled(spans)
    return rolled([leases[row] for row in rows.tolist()], offsets[rows].tolist())


def gathered(source: NDArray[Any], rows: NDArray[np.int64], pool: ArrayPool) -> NDArray[Any]:
    """Some rows in aligned memory: the one copy a batch costs."""
    target = pool.array((len(rows), *source.shape[1:]), source.dtype)
    # 'clip' writes straight into the target where 'raise' would use a buffer between; all rows are there
    return np.take(source, rows, axis=0, out=target, mode="clip")


def taken(value: Any, rows: NDArray[np.int64], pool: ArrayPool) -> Any:
    """Some rows of one tensor of a batch."""
    return value.take(rows) if isinstance(value, Ragged) else gathered(value, rows, pool)


def joined(values: Sequence[Any], pool: ArrayPool) -> Any:
    """The rows of one tensor of several batches, one after the other."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], Ragged):
        return Ragged.concatenate(values)
    target = pool.array((sum(map(len, values)), *values[0].shape[1:]), values[0].dtype)
    return np.concatenate(values, out=target)


def dropped(batch: Batch, spans: Sequence[BatchSpan]) -> Batch:
    """Rows that nobody is given and that count as trained on."""
    left = Batch({}, batch.epoch, spans, batch.position)
    left.is_dropped = True
    return left
