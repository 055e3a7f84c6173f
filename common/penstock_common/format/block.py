"""A block: n samples of one shard gathered column by column, ready to become one entry.

Values are copied in, so the caller may reuse its arrays at once. Bytes on the wire are ``wire``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from mmap import mmap
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from penstock_common.errors import SpecMismatch
from penstock_common.format import scratch
from penstock_common.format.dtypes import BOOL, BYTES, numpy_dtype
from penstock_common.format.limits import MAX_HOLES
from penstock_common.format.ref import aligned
from penstock_common.format.spec import Spec, TensorSpec, flattened
from penstock_common.format.values import is_masked


@dataclass(slots=True)
class Column:
    """One tensor of a block: rows of a fixed array, or one flat array and a shape per sample when ragged."""

    spec: TensorSpec
    values: NDArray[Any]
    """Fixed: ``[n, *shape]``. Ragged and bytes: 1-D, the samples' elements one after the other. Little-endian."""
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
        """Payload bytes, shapes not counted."""
        return sum(column.nbytes for column in self.columns)

    def offsets(self) -> NDArray[np.int64]:
        """The offset of each of the n samples."""
        every = np.arange(self.first, self.end, dtype=np.int64)
        return np.delete(every, np.asarray(self.holes, dtype=np.int64) - self.first) if self.holes else every

    def moved(self, first: int) -> Block:
        """Return a copy that begins at another offset, in memory of its own."""
        columns = [
            Column(column.spec, column.values.copy(), None if column.shapes is None else column.shapes.copy())
            for column in self.columns
        ]
        return Block(first, self.count, columns, [hole - self.first + first for hole in self.holes])

    def tail(self, offset: int) -> Block:
        """What of this block lies at or after ``offset``, an offset from ``first`` to ``end``."""
        skip = int(np.searchsorted(self.offsets(), offset))
        columns = [_tail_of(column, skip) for column in self.columns]
        return Block(offset, self.count - skip, columns, [hole for hole in self.holes if hole >= offset])


def _tail_of(column: Column, skip: int) -> Column:
    if column.shapes is None:
        return Column(column.spec, column.values[skip:])
    start = int(np.prod(column.shapes[:skip], axis=1).sum())
    return Column(column.spec, column.values[start:], column.shapes[skip:])


Place = Callable[[int], "NDArray[np.uint8] | None"]
"""Memory for the columns of at most so many samples, each at the next multiple of 64 bytes behind the one before, to
be filled and handed on with the block; None where there is none."""


def sizes_of(spec: Iterable[TensorSpec], count: int) -> tuple[int, ...]:
    """Bytes of each fixed-size tensor of so many samples."""
    return tuple([count * tensor.sample_bytes for tensor in spec])


def starts_in(spec: Iterable[TensorSpec], count: int) -> list[int]:
    """Where the columns of so many samples begin in memory that begins aligned; and, at last, where the next would."""
    starts = [0]
    for size in sizes_of(spec, count):
        starts.append(aligned(starts[-1] + size))
    return starts


def columns_in(spec: Iterable[TensorSpec], count: int, memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Columns of fixed-size tensors ``[count, *shape]``, one after the other in memory that begins aligned."""
    return [
        np.ndarray((count, *[dim or 0 for dim in tensor.shape]), numpy_dtype(tensor.dtype), memory, start)
        for tensor, start in zip(spec, starts_in(spec, count), strict=False)
    ]


def moved_together(spec: list[TensorSpec], planned: int, count: int, memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """The columns of ``planned`` samples, of which there are ``count``, as if no more had been planned."""
    columns = columns_in(spec, count, memory)
    for column, before in zip(columns, columns_in(spec, planned, memory), strict=True):
        if column.ctypes.data != before.ctypes.data:
            column[...] = before[:count]  # numpy minds that they may overlap
    return columns


SMALL_BYTES = 1 << 16
"""Samples up to this size are put into a map byte by byte, for half of what an assignment costs in numpy, which lets
other threads run while it copies larger ones."""
_CELLS = "bBhHiIlLqQfd"
"""Types of numpy that a view of memory knows as well."""


def place_in_map(array: NDArray[Any]) -> tuple[mmap, int] | None:
    """The map in whose memory a contiguous array lies, and the offset of its first byte; None of any other."""
    base: Any = array
    while isinstance(base, ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if not isinstance(base, mmap):
        return None
    return base, array.ctypes.data - np.frombuffer(base, dtype=np.uint8).ctypes.data


class NoneLeft(Exception):
    """No sample may be added now."""


def _cells_of(column: NDArray[Any]) -> Any:
    """What a column of numbers is assigned to one by one: a view of its memory, which costs half of what it does."""
    return column.data if column.dtype.char in _CELLS else column


class BlockBuilder:
    """Gathers samples of a spec until a block is as large as wished.

    ``capacity`` is the number of samples after which a block of fixed-size tensors is full; for ragged ones the bytes
    decide. The arrays of a finished block are used again two blocks later: the caller has sent it by then.
    """

    def __init__(self, spec: Spec, target_bytes: int, max_samples: int, place: Place | None = None) -> None:
        """``place``, if it has memory for a block's fixed-size tensors, is where they are gathered instead."""
        self._spec, self._width = spec, len(spec.tensors)
        self._target_bytes = target_bytes
        self._fixed_spec = [tensor for tensor in spec if not tensor.is_ragged]
        self._fixed_bytes = sum(tensor.sample_bytes for tensor in self._fixed_spec)
        # at least one sample, and no more than bring the block to its target
        self.capacity = max(1, min(max_samples, target_bytes // max(self._fixed_bytes, 1)))
        self._count = 0
        # ragged samples are kept one by one and joined at the end: only then are their sizes known
        self._ragged: list[tuple[TensorSpec, list[NDArray[Any]]]] = [(t, []) for t in spec if t.is_ragged]
        self._ragged_bytes = 0
        self._own: list[NDArray[np.uint8]] = []
        """Memory of the last two blocks that were not gathered elsewhere."""
        self._place = None if self._ragged else place
        self._memory: NDArray[np.uint8] | None
        """Where the block is gathered; None before its first sample."""
        self._planned = self.capacity
        """Samples that the columns have room for: a block that is made in place takes no more than it may need, and
        its columns have to lie together in the end."""
        self._stop = self.left = self.capacity
        """Samples after which the block is full; and those that may come at all, which the owner may know to be fewer:
        asked before a block's first."""
        self._let_go()

    def _let_go(self) -> None:
        """Of the block's memory: a file is locked as long as an array over it lives."""
        self._memory = None
        self._fixed: list[tuple[TensorSpec, NDArray[Any]]] = []
        self._small: list[tuple[str, np.dtype[Any], tuple[int, ...], Any, int, int]] = []
        self._arrays: list[tuple[str, np.dtype[Any], tuple[int, ...], NDArray[Any], TensorSpec]] = []
        self._scalars: list[tuple[str, Any, type | None, float, float]] = []

    def _begin(self) -> None:
        """Before the first sample of a block; once more if that was refused."""
        if not self.left:
            raise NoneLeft
        if self._memory is None:
            self._planned = min(self.capacity, self.left)
            memory = None if self._place is None else self._place(self._planned)
            self._is_placed = memory is not None
            if memory is None:
                self._planned, memory = self.capacity, self._own_memory()
            self._gather_in(memory)
        self._stop = min(self._planned, self.left)

    def _own_memory(self) -> NDArray[np.uint8]:
        if len(self._own) < 2:
            nbytes = max(1, starts_in(self._fixed_spec, self.capacity)[-1])
            self._own.append(np.frombuffer(scratch.BLOCKS.take(nbytes), dtype=np.uint8))
        else:
            self._own.reverse()
        return self._own[-1]

    def _gather_in(self, memory: NDArray[np.uint8]) -> None:
        """Looks what of a sample is copied there, and how."""
        # numpy would broadcast, convert and wrap around on assignment, so add() lets only these straight in:
        # arrays of the exact dtype and shape, and of a 0-d tensor Python numbers within its bounds
        self._let_go()
        self._memory = memory
        columns = columns_in(self._fixed_spec, self._planned, memory)
        self._fixed = list(zip(self._fixed_spec, columns, strict=True))
        place = place_in_map(memory)
        for (tensor, column), start in zip(self._fixed, starts_in(self._fixed_spec, self._planned), strict=False):
            like = column.dtype, column.shape[1:]
            if not tensor.shape:
                self._scalars.append((tensor.name, _cells_of(column), *_bounds(column.dtype)))
            elif tensor.sample_bytes <= SMALL_BYTES and place is not None:
                self._small.append((tensor.name, *like, place[0], place[1] + start, tensor.sample_bytes))
            else:
                self._arrays.append((tensor.name, *like, column, tensor))
        self._has_large = bool(self._arrays or self._ragged)
        self._has_others = bool(self._scalars or self._has_large)

    def shorten(self, left: int) -> None:
        """Only so many samples may come yet, in this block and all that follow."""
        self.left = left
        self._stop = min(self._stop, self._count + left)

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether the block has reached its size."""
        return self._count >= self._stop

    def add(self, sample: Mapping[str, Any]) -> bool:  # noqa: C901 - a call more is a tenth of what a small sample costs
        """Copies one sample in; whether the block is full then.

        Raises SpecMismatch or TooLarge and leaves the block as it was if it does not fit; NoneLeft.
        """
        row = self._count
        if not row:
            self._begin()
        if len(sample) != self._width:
            return self.add(self._flat(sample))
        try:
            for name, dtype, shape, memory, at, size in self._small:
                value = sample[name]
                if type(value) is ndarray and value.dtype is dtype and value.shape == shape:
                    begin = at + row * size
                    try:
                        memory[begin : begin + size] = value
                        continue
                    except (ValueError, BufferError):  # not contiguous
                        pass
                self._assign(name, row, value)
            if self._has_others:
                for name, cells, number, low, high in self._scalars:
                    value = sample[name]
                    kind = type(value)
                    if kind is number and low <= value <= high:
                        cells[row] = value
                    else:
                        self._assign(name, row, value)
                if self._has_large:
                    self._add_large(row, sample)
        except KeyError:
            flat = self._flat(sample)
            if flat is sample:  # the error is a value's own
                raise
            return self.add(flat)
        self._count = row = row + 1
        return row >= self._stop

    def _flat(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a sample with nested dicts as the spec names its tensors. Raises SpecMismatch where it does not."""
        flat = flattened(sample)
        self._spec.check_names(flat)
        return flat

    def _assign(self, name: str, row: int, value: Any) -> None:
        for tensor, column in self._fixed:
            if tensor.name == name:
                column[row] = _exact(tensor, value, column.dtype, column.shape[1:])

    def _add_large(self, row: int, sample: Mapping[str, Any]) -> None:
        """Arrays that are large, or of no size known before."""
        for name, dtype, shape, column, tensor in self._arrays:
            column[row] = _exact(tensor, sample[name], dtype, shape)
        if self._ragged:
            self._keep(row, [tensor.canonical(sample[tensor.name]) for tensor, _ in self._ragged], sample)

    def _keep(self, row: int, values: list[NDArray[Any]], sample: Mapping[str, Any]) -> None:
        for (tensor, parts), value in zip(self._ragged, values, strict=True):
            own = value if type(sample[tensor.name]) is bytes else value.copy()  # bytes cannot change under us
            parts.append(own)
            self._ragged_bytes += own.nbytes + 8 * tensor.wire_ndim
        if self._ragged_bytes + (row + 1) * self._fixed_bytes >= self._target_bytes:
            self._stop = row + 1

    def add_rows(self, rows: Mapping[str, Any], start: int, stop: int) -> int:
        """Copies rows ``[start, stop)`` of columns that were checked with `check_rows`; returns how many fitted."""
        if not self._count:
            self._begin()
        taken = min(stop - start, self._stop - self._count)
        if self._ragged:
            taken = self._add_ragged_rows(rows, start, taken)
        for tensor, column in self._fixed:
            column[self._count : self._count + taken] = rows[tensor.name][start : start + taken]
        self._count += taken
        return taken

    def _add_ragged_rows(self, rows: Mapping[str, Any], start: int, most: int) -> int:
        for taken in range(most):
            if self._count + taken >= self._stop:
                return taken
            row = {tensor.name: rows[tensor.name][start + taken] for tensor, _ in self._ragged}
            values = [tensor.canonical(row[tensor.name]) for tensor, _ in self._ragged]
            self._keep(self._count + taken, values, row)
        return most

    def finish(self, first: int, holes: Sequence[int] = ()) -> Block:
        """The block so far, starting at offset ``first``; the builder is empty afterwards."""
        count = self._count
        if not count or self._memory is None:
            arrays = columns_in(self._fixed_spec, 0, np.empty(0, np.uint8))
        elif self._is_placed and count < self._planned:
            arrays = moved_together(self._fixed_spec, self._planned, count, self._memory)
        else:
            arrays = [array[:count] for _, array in self._fixed]
        fixed = {tensor.name: Column(tensor, array) for tensor, array in zip(self._fixed_spec, arrays, strict=True)}
        ragged = {tensor.name: _joined(tensor, parts) for tensor, parts in self._ragged}
        columns = [fixed.get(name) or ragged[name] for name in self._spec.names]
        for column in columns:
            if column.spec.dtype == BOOL:  # a bool made by view() may hold 2; the wire has 0 and 1
                np.not_equal(column.values.view(np.uint8), 0, out=column.values)
        block = Block(first, count, columns, list(holes))
        if count:
            self._let_go()
        self._count, self._ragged_bytes, self._stop = 0, 0, self.capacity
        self._ragged = [(tensor, []) for tensor, _ in self._ragged]
        return block


@lru_cache(maxsize=256)  # numpy works its limits out anew each time, and every block asks for them
def _bounds(dtype: np.dtype[Any]) -> tuple[type | None, float, float]:
    """The type of Python number a 0-d tensor takes as it is; and from where to where."""
    if dtype.kind in "iu":
        integers = np.iinfo(dtype)
        return int, int(integers.min), int(integers.max)
    if dtype.kind == "f":
        floats = np.finfo(dtype)
        return float, float(floats.min), float(floats.max)
    return None, 0, 0


def _exact(tensor: TensorSpec, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """A value that fits as it is, or else made to; raises SpecMismatch."""
    if (type(value) is ndarray or isinstance(value, np.generic)) and value.dtype == dtype and value.shape == shape:
        return value
    return tensor.canonical(value)


def _joined(tensor: TensorSpec, parts: list[NDArray[Any]]) -> Column:
    flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.empty(0, numpy_dtype(tensor.dtype))
    shapes = np.array([part.shape for part in parts], dtype=np.int64).reshape(len(parts), tensor.wire_ndim)
    return Column(tensor, flat, shapes)


def check_rows(spec: Spec, rows: Mapping[str, Any]) -> int:
    """Checks the columns of ``write_batch``, returns n: fixed tensors are one array ``[n, *shape]``, ragged n values.

    Raises SpecMismatch naming tensor, found and expected before anything is copied.
    """
    spec.check_names(rows)
    counts = {tensor.name: _count_of(tensor, rows[tensor.name]) for tensor in spec}
    lead = spec.names[0]
    for name, count in counts.items():
        if count != counts[lead]:
            raise SpecMismatch(name, f"{count} rows", f"{counts[lead]} rows as in {lead!r}")
    for tensor in spec:
        if tensor.is_ragged:
            for value in rows[tensor.name]:
                tensor.canonical(value)
    return counts[lead]


def _count_of(tensor: TensorSpec, value: Any) -> int:
    is_array = isinstance(value, np.ndarray)
    if tensor.is_ragged:
        if not (value.ndim if is_array else isinstance(value, Sequence) and not isinstance(value, (bytes, str))):
            raise SpecMismatch(tensor.name, f"a {type(value).__name__}", "a list of one value per sample")
        if tensor.dtype == BYTES and is_array and value.dtype.kind == "S":
            # each element read back from such an array has lost its trailing zero bytes
            raise SpecMismatch(tensor.name, f"a numpy array of {value.dtype}", "a list of bytes")
        return len(value)
    if not is_array or value.ndim == 0 or is_masked(value):
        raise SpecMismatch(
            tensor.name, f"a {type(value).__name__}", f"a numpy array of {tensor.dtype} [n, *{tensor.shape}]"
        )
    tensor.check(value.dtype, value.shape[1:])
    return len(value)


__all__ = ["BYTES", "MAX_HOLES", "Block", "BlockBuilder", "Column", "check_rows"]
