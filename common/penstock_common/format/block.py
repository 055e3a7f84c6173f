"""A block: n samples of one shard gathered column by column, ready to become one entry.

Values are copied in, so the caller may reuse its arrays at once. Bytes on the wire are ``wire``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.format.dtypes import BYTES, numpy_dtype
from penstock_common.format.spec import Spec, TensorSpec

MAX_HOLES = 1024
"""Dropped samples one entry may carry: bounds the header; a block is closed before it has more."""


@dataclass(slots=True)
class Column:
    """One tensor of a block: rows of a fixed array, or one flat array and a shape per sample when ragged."""

    spec: TensorSpec
    values: NDArray[Any]
    """Fixed: ``[n, *shape]``. Ragged and bytes: 1-D, the samples' elements one after the other."""
    shapes: NDArray[np.int64] | None = None
    """Ragged and bytes only: ``[n, ndim]``."""

    @property
    def nbytes(self) -> int:
        """Payload bytes of this column, shapes not counted."""
        return int(self.values.nbytes)


@dataclass(slots=True)
class Block:
    """Samples of one shard whose offsets run from ``first`` to ``end``, holes excepted."""

    first: int
    count: int
    """Samples present."""
    columns: list[Column]
    holes: list[int] = field(default_factory=list)
    """Offsets in ``[first, end)`` that were dropped (quarantined), rising."""

    @property
    def end(self) -> int:
        """The offset after the last one this block accounts for."""
        return self.first + self.count + len(self.holes)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(column.nbytes for column in self.columns)

    def offsets(self) -> NDArray[np.int64]:
        """The offset of each of the n samples."""
        every = np.arange(self.first, self.end, dtype=np.int64)
        return np.delete(every, np.asarray(self.holes, dtype=np.int64) - self.first) if self.holes else every

    def tail(self, offset: int) -> Block:
        """What of this block lies at or after ``offset``."""
        skip = int(np.searchsorted(self.offsets(), offset))
        columns = [_tail_of(column, skip) for column in self.columns]
        return Block(offset, self.count - skip, columns, [hole for hole in self.holes if hole >= offset])


def _tail_of(column: Column, skip: int) -> Column:
    if column.shapes is None:
        return Column(column.spec, column.values[skip:])
    start = int(np.prod(column.shapes[:skip], axis=1).sum())
    return Column(column.spec, column.values[start:], column.shapes[skip:])


class BlockBuilder:
    """Gathers samples of a spec until a block is as large as wished.

    ``capacity`` is the number of samples after which a block of fixed-size tensors is full; for ragged ones the bytes
    decide. The arrays of a finished block are used again two blocks later: the caller has sent it by then.
    """

    def __init__(self, spec: Spec, target_bytes: int, max_samples: int) -> None:
        self._spec = spec
        self._target_bytes = target_bytes
        fixed = sum(tensor.sample_bytes for tensor in spec if not tensor.is_ragged)
        # at least one sample, and no more than bring the block to its target
        self.capacity = max(1, min(max_samples, target_bytes // max(fixed, 1)))
        self._sets = [self._fresh_arrays(), self._fresh_arrays()]
        self._turn = 0
        self._count = 0
        self._ragged_bytes = 0
        self._ragged: dict[str, list[NDArray[Any]]] = {tensor.name: [] for tensor in spec if tensor.is_ragged}
        self._use(self._sets[0])

    def _fresh_arrays(self) -> dict[str, NDArray[Any]]:
        return {
            tensor.name: np.empty((self.capacity, *(d or 0 for d in tensor.shape)), numpy_dtype(tensor.dtype))
            for tensor in self._spec
            if not tensor.is_ragged
        }

    def _use(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._fixed = [
            (tensor, tensor.name, arrays[tensor.name], arrays[tensor.name].dtype, arrays[tensor.name].shape[1:])
            for tensor in self._spec
            if not tensor.is_ragged
        ]

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether the block has reached its size."""
        return self._count >= self.capacity or self._ragged_bytes >= self._target_bytes

    def add(self, sample: Mapping[str, Any]) -> None:
        """Copies one sample in; raises SpecMismatch and leaves the block as it was if it does not fit."""
        row = self._count
        if len(sample) != len(self._spec.tensors):
            self._spec.check_names(sample)
        try:
            for tensor, name, column, dtype, shape in self._fixed:
                value = sample[name]
                # numpy would broadcast and convert on assignment, so only the exact array goes straight in
                if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
                    column[row] = value
                else:
                    column[row] = tensor.canonical(value)
            if self._ragged:
                self._add_ragged(sample)
        except KeyError:
            self._spec.check_names(sample)
            raise
        self._count = row + 1

    def _add_ragged(self, sample: Mapping[str, Any]) -> None:
        values = {name: self._spec[name].canonical(sample[name]) for name in self._ragged}
        for name, value in values.items():
            self._ragged[name].append(np.array(value, copy=True))
            self._ragged_bytes += value.nbytes

    def add_rows(self, rows: Mapping[str, Any], start: int, stop: int) -> int:
        """Copies rows ``[start, stop)`` of fixed columns that were checked with `check_rows`; returns how many fitted."""
        taken = min(stop - start, self.capacity - self._count)
        for _, name, column, _, _ in self._fixed:
            column[self._count : self._count + taken] = rows[name][start : start + taken]
        self._count += taken
        return taken

    def finish(self, first: int, holes: Sequence[int] = ()) -> Block:
        """The block so far, starting at offset ``first``; the builder is empty afterwards."""
        columns = [self._column(tensor) for tensor in self._spec]
        block = Block(first, self._count, columns, list(holes))
        self._turn = 1 - self._turn
        self._use(self._sets[self._turn])
        self._count = self._ragged_bytes = 0
        self._ragged = {name: [] for name in self._ragged}
        return block

    def _column(self, tensor: TensorSpec) -> Column:
        if not tensor.is_ragged:
            (values,) = (array for spec, _, array, _, _ in self._fixed if spec is tensor)
            return Column(tensor, values[: self._count])
        parts = self._ragged[tensor.name]
        flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.empty(0, numpy_dtype(tensor.dtype))
        shapes = np.array([part.shape for part in parts], dtype=np.int64).reshape(len(parts), tensor.wire_ndim)
        return Column(tensor, flat, shapes)


def check_rows(spec: Spec, rows: Mapping[str, Any]) -> int:
    """Checks the columns of ``write_batch`` (fixed tensors: ``[n, *shape]``; ragged: n values); returns n."""
    from penstock_common.errors import SpecMismatch

    spec.check_names(rows)
    count = len(rows[spec.tensors[0].name])
    for tensor in spec:
        if len(rows[tensor.name]) != count:
            found, expected = f"{len(rows[tensor.name])} rows", f"{count} rows as in {spec.tensors[0].name!r}"
            raise SpecMismatch(tensor.name, found, expected)
        if tensor.is_ragged or count == 0:
            continue
        value = rows[tensor.name]
        if not isinstance(value, np.ndarray):
            raise SpecMismatch(tensor.name, type(value).__name__, "a numpy array of rows")
        tensor.canonical(value[0])
    return count


__all__ = ["BYTES", "MAX_HOLES", "Block", "BlockBuilder", "Column", "check_rows"]
