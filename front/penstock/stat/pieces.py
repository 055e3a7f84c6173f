"""A tensor's samples as pieces of numbers ``[k, C]``: what statistics of every dtype and shape have in common.

A piece has at most `PIECE` numbers (one row of channels at least), so that float64 copies stay in a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.wire.block import Column
from penstock_common.wire.codec import row_starts
from penstock_common.wire.dtypes import BYTES
from penstock_common.wire.spec import TensorSpec

PIECE = 1 << 17
CHANNELS = (1, 3, 4)
"""Of an image: grey, RGB, RGBA."""
LEAST_SIDE = 4


def channel_axis(spec: TensorSpec) -> int | None:
    """Which axis of a sample is an image's channels: -1, 0, or None where it does not look like an image."""
    shape = spec.shape
    if spec.dtype == BYTES or len(shape) not in (3, 4):
        return None
    if shape[-1] in CHANNELS and all(_is_side(dim) for dim in shape[-3:-1]):
        return -1
    return 0 if len(shape) == 3 and shape[0] in CHANNELS and all(map(_is_side, shape[1:])) else None


def _is_side(dim: int | None) -> bool:
    return dim is None or dim >= LEAST_SIDE


def pieces_of(column: Column, rows: NDArray[np.int64], axis: int | None) -> Iterator[NDArray[Any]]:
    """The numbers of these samples, in the tensor's dtype; a column per channel, else one. bytes: their lengths."""
    spec = column.spec
    if spec.dtype == BYTES:
        assert column.shapes is not None
        yield column.shapes[rows, :1]
        return
    if axis == 0:
        channels = spec.shape[0] or 1
        for sample in split(column, rows):
            yield from _cut(sample.reshape(channels, -1).T)
        return
    yield from _cut(_flat(column, rows).reshape(-1, (spec.shape[-1] or 1) if axis == -1 else 1))


def split(column: Column, rows: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    """The numbers of each of these samples, 1-D."""
    if column.shapes is None:
        yield from (column.values[row].reshape(-1) for row in rows.tolist())
        return
    starts = row_starts(column.shapes, column.spec).tolist()
    yield from (column.values[starts[row] : starts[row + 1]] for row in rows.tolist())


def _flat(column: Column, rows: NDArray[np.int64]) -> NDArray[Any]:
    values: NDArray[Any] = column.values
    if column.shapes is None:
        return values.reshape(-1) if len(rows) == len(values) else values[rows].reshape(-1)
    return values if len(rows) == len(column.shapes) else np.concatenate(list(split(column, rows)))


def _cut(numbers: NDArray[Any]) -> Iterator[NDArray[Any]]:
    step = max(1, PIECE // max(1, numbers.shape[1]))
    for start in range(0, len(numbers), step):
        yield numbers[start : start + step]


def real(numbers: NDArray[Any]) -> NDArray[np.float64]:
    """As float64: a complex number's magnitude, 0 and 1 of a bool."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.abs(numbers) if numbers.dtype.kind == "c" else numbers).astype(np.float64)
