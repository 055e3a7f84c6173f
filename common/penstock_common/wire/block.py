"""Blocks: n samples of one shard, gathered column by column, which become one entry.

A block builder copies values, so the caller may reuse its arrays at once. ``codec`` turns a block into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from sys import getrefcount
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from penstock_common.errors import SpecMismatch
from penstock_common.wire.dtypes import BOOL, BYTES, numpy_dtype
from penstock_common.wire.header import aligned
from penstock_common.wire.spec import Spec, TensorSpec, flattened, is_masked


@dataclass(slots=True)
class Column:
    """One tensor of a block: rows of a fixed array, or one flat array and a shape per sample when ragged."""

    spec: TensorSpec
    values: NDArray[Any]
    """Little-endian. Fixed: ``[n, *shape]``. Ragged and bytes: 1-D, the elements of all samples in order."""
    shapes: NDArray[np.int64] | None = None
    """Only for ragged tensors and bytes: ``[n, ndim]``."""


@dataclass(slots=True)
class Block:
    """Samples of one shard whose offsets run from ``first`` to ``end``, holes excepted. It does not change."""

    first: int
    count: int
    """The number of samples present."""
    columns: list[Column]
    holes: list[int] = field(default_factory=list)
    """Offsets in ``[first, end)`` without a sample, ascending."""
    end: int = field(init=False)
    """The offset after the last sample or hole of this block."""
    nbytes: int = field(init=False)
    """The payload bytes of all columns, without shapes."""

    def __post_init__(self) -> None:
        self.end = self.first + self.count + len(self.holes)
        self.nbytes = sum([column.values.nbytes for column in self.columns])

    def offsets(self) -> NDArray[np.int64]:
        """Return the offset of each sample: int64 ``[count]``."""
        return offsets_of(self.first, self.end, self.holes)

    def moved(self, first: int) -> Block:
        """Return a copy that begins at another offset, in memory of its own."""
        columns = [
            Column(column.spec, column.values.copy(), None if column.shapes is None else column.shapes.copy())
            for column in self.columns
        ]
        return Block(first, self.count, columns, [hole - self.first + first for hole in self.holes])

    def head(self, offset: int) -> Block:
        """Return the part of this block before ``offset``, an offset from ``first`` to ``end``."""
        count = int(np.searchsorted(self.offsets(), offset))
        columns = [_rows_of(column, 0, count) for column in self.columns]
        return Block(self.first, count, columns, [hole for hole in self.holes if hole < offset])

    def tail(self, offset: int) -> Block:
        """Return the part of this block from ``offset`` on, an offset from ``first`` to ``end``."""
        skip = int(np.searchsorted(self.offsets(), offset))
        columns = [_rows_of(column, skip, self.count) for column in self.columns]
        return Block(offset, self.count - skip, columns, [hole for hole in self.holes if hole >= offset])


def offsets_of(first: int, end: int, holes: Sequence[int]) -> NDArray[np.int64]:
    """Return the offsets in ``[first, end)`` that have a sample."""
    every = np.arange(first, end, dtype=np.int64)
    return np.delete(every, np.asarray(holes, dtype=np.int64) - first) if holes else every


def _rows_of(column: Column, start: int, stop: int) -> Column:
    if column.shapes is None:
        return Column(column.spec, column.values[start:stop])
    ends = np.concatenate([[0], np.prod(column.shapes, axis=1).cumsum()])
    return Column(column.spec, column.values[ends[start] : ends[stop]], column.shapes[start:stop])


Place = Callable[[int], "NDArray[np.uint8] | None"]
"""A function that returns memory for the columns of at most the given number of samples, or None.

Each column begins at the next multiple of 64 bytes after the one before. The block keeps the memory.
"""


def sizes_of(spec: Iterable[TensorSpec], count: int) -> tuple[int, ...]:
    """Return the bytes that ``count`` samples take of each fixed-size tensor."""
    return tuple([count * tensor.sample_bytes for tensor in spec])


def starts_in(spec: Iterable[TensorSpec], count: int) -> list[int]:
    """Return the start of each column of ``count`` samples in aligned memory, and the start of a next column."""
    starts = [0]
    for size in sizes_of(spec, count):
        starts.append(aligned(starts[-1] + size))
    return starts


def columns_in(spec: Iterable[TensorSpec], count: int, memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Return columns of fixed-size tensors ``[count, *shape]`` over aligned memory, one after the other."""
    return [
        np.ndarray((count, *[dim or 0 for dim in tensor.shape]), numpy_dtype(tensor.dtype), memory, start)
        for tensor, start in zip(spec, starts_in(spec, count), strict=False)
    ]


def moved_together(spec: list[TensorSpec], planned: int, count: int, memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Move columns that were planned for more samples together, as if ``count`` had been planned, and return them."""
    columns = columns_in(spec, count, memory)
    for column, before in zip(columns, columns_in(spec, planned, memory), strict=True):
        if column.ctypes.data != before.ctypes.data:
            column[...] = before[:count]  # numpy handles overlapping memory correctly
    return columns


SMALL_BYTES = 1 << 16
"""Samples up to this size are copied through the map's own slices, at half the cost of an assignment in numpy.

For larger ones numpy is better: it lets other threads run while it copies.
"""
_CELLS = "bBhHiIlLqQfd"
"""The numpy type codes that a memoryview can assign, too."""


def place_in_map(array: NDArray[Any]) -> tuple[mmap, int] | None:
    """Return the map that holds a contiguous array and the offset of its first byte, or None if no map does."""
    base: Any = array
    while isinstance(base, ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if not isinstance(base, mmap):
        return None
    return base, array.ctypes.data - np.frombuffer(base, dtype=np.uint8).ctypes.data


class BlockFull(Exception):
    """The block, or the owner's quota, takes no more samples."""


def _cells_of(column: NDArray[Any]) -> Any:
    """Return the object to which single numbers are assigned: a memoryview where it can, at half the cost."""
    return column.data if column.dtype.char in _CELLS else column


class BlockBuilder:
    """A builder that gathers samples of one spec until a block has its target size.

    A block of fixed-size tensors is full after ``capacity`` samples. For ragged tensors the bytes decide. A finished
    block keeps its memory, which another block gets once nothing refers to the first.
    """

    def __init__(self, spec: Spec, target_bytes: int, max_samples: int, place: Place | None = None) -> None:
        """Make an empty builder.

        Args:
            spec: The tensors of each sample.
            target_bytes: Payload bytes at which a block is full. A block holds at least one sample.
            max_samples: Samples at which a block is full, whatever their size.
            place: Returns memory for the fixed-size tensors of a block, such as a segment's. Without it, or if it
                returns None, the builder uses memory of its own.
        """
        self._spec, self._width = spec, len(spec.tensors)
        self._target_bytes = target_bytes
        self._fixed_spec = [tensor for tensor in spec if not tensor.is_ragged]
        self._fixed_bytes = sum(tensor.sample_bytes for tensor in self._fixed_spec)
        # at least one sample, and no more than bring the block to its target
        self.capacity = max(1, min(max_samples, target_bytes // max(self._fixed_bytes, 1)))
        self._count = 0
        # ragged samples are kept separately and joined at the end, when their sizes are known
        self._ragged: list[tuple[TensorSpec, list[NDArray[Any]]]] = [(t, []) for t in spec if t.is_ragged]
        self._ragged_bytes = 0
        self._place = None if self._ragged else place
        self._memory: NDArray[np.uint8] | None
        """The memory of the current block; None before its first sample."""
        self._planned = self.capacity
        """Samples that the current columns can hold. A block in given memory plans no more samples than may come,
        because its columns must lie together in the end."""
        self._stop = self.left = self.capacity
        """``_stop``: samples after which the block is full. ``left``: samples that may still come; see `allow`."""
        self._let_go()

    def _let_go(self) -> None:
        """Drop every array over the block's memory: a file stays locked as long as one lives."""
        self._memory = None
        self._fixed: list[tuple[TensorSpec, NDArray[Any]]] = []
        self._small: list[tuple[str, np.dtype[Any], tuple[int, ...], Any, int, int]] = []
        self._arrays: list[tuple[str, np.dtype[Any], tuple[int, ...], NDArray[Any], TensorSpec]] = []
        self._scalars: list[tuple[str, Any, type | None, float, float]] = []

    def _begin(self) -> None:
        """Prepare for a block's first sample, again if that sample was refused."""
        if not self.left:
            raise BlockFull
        if self._memory is None:
            self._let_go()  # Ctrl-C may have come in the middle of the last attempt
            self._planned = min(self.capacity, self.left)
            memory = None if self._place is None else self._place(self._planned)
            self._is_placed = memory is not None
            if memory is not None:
                self._gather_in(memory, place_in_map(memory))
            else:
                self._planned = self.capacity
                own = BLOCKS.take(max(1, starts_in(self._fixed_spec, self._planned)[-1]))
                self._gather_in(np.frombuffer(own, dtype=np.uint8), (own, 0))
        self._stop = min(self._planned, self.left)

    def _gather_in(self, memory: NDArray[np.uint8], place: tuple[mmap, int] | None) -> None:
        """Plan how each tensor of a sample is copied into this memory.

        Args:
            memory: The memory of the block's columns.
            place: The map that holds the memory, and where it begins there. None if no map does.
        """
        # on assignment, numpy would broadcast, convert and wrap around. So add() copies directly only arrays of the
        # exact dtype and shape and, for a 0-d tensor, Python numbers within its bounds
        columns = columns_in(self._fixed_spec, self._planned, memory)
        self._fixed = list(zip(self._fixed_spec, columns, strict=True))
        starts = starts_in(self._fixed_spec, self._planned)
        for (tensor, column), start in zip(self._fixed, starts, strict=False):
            like = column.dtype, column.shape[1:]
            if not tensor.shape:
                self._scalars.append((tensor.name, _cells_of(column), *_bounds(column.dtype)))
            elif tensor.sample_bytes <= SMALL_BYTES and place is not None:
                self._small.append((tensor.name, *like, place[0], place[1] + start, tensor.sample_bytes))
            else:
                self._arrays.append((tensor.name, *like, column, tensor))
        self._has_large = bool(self._arrays or self._ragged)
        self._has_others = bool(self._scalars or self._has_large)
        self._memory = memory  # last: from here on all is planned

    def allow(self, left: int) -> None:
        """Take at most ``left`` samples in the blocks that begin from now on."""
        self.left = left

    def shorten(self, left: int) -> None:
        """Take at most ``left`` further samples, in this block and all later ones."""
        self.left = left
        self._stop = min(self._stop, self._count + left)

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """True if the block has reached its size."""
        return self._count >= self._stop

    def add(self, sample: Mapping[str, Any]) -> bool:  # noqa: C901 - a call more is a tenth of what a small sample costs
        """Copy one sample into the block and return whether the block is full.

        Args:
            sample: Tensor name to value. Nested dicts name tensors ``a/b``.

        Raises:
            SpecMismatch: A value does not fit the spec. The block is unchanged.
            TooLarge: A value exceeds a limit of the wire format. The block is unchanged.
            BlockFull: No further sample may come; see `shorten`.
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
        """Return a sample with nested dicts under the spec's tensor names. Raises SpecMismatch if the names differ."""
        flat = flattened(sample)
        try:
            self._spec.check_names(flat)
        except SpecMismatch as error:
            raise error from None  # the failed lookup of a name adds nothing to this error
        return flat

    def _assign(self, name: str, row: int, value: Any) -> None:
        for tensor, column in self._fixed:
            if tensor.name == name:
                column[row] = _exact(tensor, value, column.dtype, column.shape[1:])

    def _add_large(self, row: int, sample: Mapping[str, Any]) -> None:
        """Copy the large arrays of a sample, and keep its ragged values."""
        for name, dtype, shape, column, tensor in self._arrays:
            column[row] = _exact(tensor, sample[name], dtype, shape)
        if self._ragged:
            self._keep(row, sample)

    def _keep(self, row: int, sample: Mapping[str, Any]) -> None:
        """Keep the ragged values of a sample, or none of them if one does not fit."""
        values = [tensor.canonical(sample[tensor.name]) for tensor, _ in self._ragged]
        for (tensor, parts), value in zip(self._ragged, values, strict=True):
            own = value if type(sample[tensor.name]) is bytes else value.copy()  # bytes cannot change later
            del parts[row:]  # of a sample whose other tensors Ctrl-C kept out
            parts.append(own)
            self._ragged_bytes += own.nbytes + 8 * tensor.wire_ndim
        if self._ragged_bytes + (row + 1) * self._fixed_bytes >= self._target_bytes:
            self._stop = row + 1

    def add_rows(self, rows: Mapping[str, Any], start: int, stop: int) -> int:
        """Copy rows ``[start, stop)`` of columns that `check_rows` accepted, and return how many fitted."""
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
            self._keep(self._count + taken, row)
        return most

    def finish(self, first: int, holes: Sequence[int] = ()) -> Block:
        """Return the block gathered so far, starting at offset ``first``, and empty the builder."""
        count = self._count
        if not count or self._memory is None:
            arrays = columns_in(self._fixed_spec, 0, np.empty(0, np.uint8))
        elif count == self._planned:
            arrays = [array for _, array in self._fixed]
        elif self._is_placed:
            arrays = moved_together(self._fixed_spec, self._planned, count, self._memory)
        else:
            arrays = [array[:count] for _, array in self._fixed]
        columns = [Column(tensor, array) for tensor, array in zip(self._fixed_spec, arrays, strict=True)]
        if self._ragged:
            columns += [_joined(tensor, parts) for tensor, parts in self._ragged]
            columns.sort(key=lambda column: self._spec.names.index(column.spec.name))
        for column in columns:
            if column.spec.dtype == BOOL:  # a bool made by view() may hold 2; the wire format has 0 and 1
                np.not_equal(column.values.view(np.uint8), 0, out=column.values)
        block = Block(first, count, columns, list(holes))
        if count:
            self._let_go()
        self._count, self._ragged_bytes, self._stop = 0, 0, self.capacity
        self._ragged = [(tensor, []) for tensor, _ in self._ragged]
        return block


@lru_cache(maxsize=256)  # numpy computes the limits again at each call, and every block asks for them
def _bounds(dtype: np.dtype[Any]) -> tuple[type | None, float, float]:
    """Return the type of Python number that a 0-d tensor takes unchanged, with its lowest and highest value."""
    if dtype.kind in "iu":
        integers = np.iinfo(dtype)
        return int, int(integers.min), int(integers.max)
    if dtype.kind == "f":
        floats = np.finfo(dtype)
        return float, float(floats.min), float(floats.max)
    return None, 0, 0


def _exact(tensor: TensorSpec, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return the value itself if it fits exactly, else its canonical form. Raises SpecMismatch."""
    if (type(value) is ndarray or isinstance(value, np.generic)) and value.dtype == dtype and value.shape == shape:
        return value
    return tensor.canonical(value)


def _joined(tensor: TensorSpec, parts: list[NDArray[Any]]) -> Column:
    flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.empty(0, numpy_dtype(tensor.dtype))
    shapes = np.array([part.shape for part in parts], dtype=np.int64).reshape(len(parts), tensor.wire_ndim)
    return Column(tensor, flat, shapes)


def check_rows(spec: Spec, rows: Mapping[str, Any]) -> int:
    """Check the columns of ``write_batch`` and return their number of rows, before anything is copied.

    Args:
        spec: The tensors of each sample.
        rows: Tensor name to one array ``[n, *shape]``, or to n values where the tensor is ragged.

    Raises:
        SpecMismatch: Names the tensor, what was found and what was expected.
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
            # an element that is read back from such an array has lost its trailing zero bytes
            raise SpecMismatch(tensor.name, f"a numpy array of {value.dtype}", "a list of bytes")
        return len(value)
    if not is_array or value.ndim == 0 or is_masked(value):
        raise SpecMismatch(
            tensor.name, f"a {type(value).__name__}", f"a numpy array of {tensor.dtype} [n, *{tensor.shape}]"
        )
    tensor.check(value.dtype, value.shape[1:])
    return len(value)


class RowBuilder(BlockBuilder):
    """Fast path of BlockBuilder for a spec of one small array of a fixed size.

    It counts rows as an offset in the block's map, which takes one addition a row. The first row of a block, and a row
    of another kind, are added by BlockBuilder.
    """

    _at, _size = 0, 1
    """Offset of the block's first row; bytes of a row."""

    @property
    def _count(self) -> int:
        return (self._next - self._at) // self._size

    @_count.setter
    def _count(self, count: int) -> None:
        self._next = self._at + count * self._size

    @property
    def _stop(self) -> int:
        return (self._end - self._at) // self._size

    @_stop.setter
    def _stop(self, stop: int) -> None:
        self._end = self._at + stop * self._size

    def _let_go(self) -> None:
        super()._let_go()
        self._name = self._spec.names[0]
        self._dtype: np.dtype[Any] | None = None
        """The dtype of rows that are copied byte by byte. None, which no array has, before a block's first row and if
        rows are not copied in this way.
        """
        self._map: Any = None

    def _gather_in(self, memory: NDArray[np.uint8], place: tuple[mmap, int] | None) -> None:
        super()._gather_in(memory, place)
        if self._small:
            _, _, self._shape, self._map, self._at, self._size = self._small[0]
            self._count = 0

    def add(self, sample: Mapping[str, Any]) -> bool:
        """Copy one sample in: see `BlockBuilder.add`."""
        try:
            value = sample[self._name]
            if (
                type(value) is ndarray
                and value.dtype is self._dtype
                and value.shape == self._shape
                and len(sample) == 1
            ):
                begin = self._next
                end = begin + self._size
                self._map[begin:end] = value
                self._next = end
                return end >= self._end
        except (KeyError, ValueError, BufferError):  # another name, or not contiguous
            pass
        is_full = super().add(sample)
        self._dtype = self._small[0][1] if self._small else None
        return is_full


def builder_of(spec: Spec, target_bytes: int, max_samples: int, place: Place | None = None) -> BlockBuilder:
    """Return the builder that gathers samples of a spec at the least cost; see `BlockBuilder`."""
    first = spec.tensors[0]
    is_rows = len(spec.tensors) == 1 and bool(first.shape) and not first.is_ragged
    is_small = is_rows and 0 < first.sample_bytes <= SMALL_BYTES
    return (RowBuilder if is_small else BlockBuilder)(spec, target_bytes, max_samples, place)


# --- memory of blocks -------------------------------------------------------------------------------------------------

POOL_BYTES = 16 << 20
"""Bytes that a process keeps, if `POOL_BLOCKS` need no more. A map beyond them is freed with its last reference."""
POOL_BLOCKS = 2
"""The blocks of the newest size that are kept, however large they are: one is gathered while another is sent."""


def _references(maps: list[mmap]) -> int:
    for found in maps:
        return getrefcount(found)
    raise AssertionError


_UNUSED = _references([mmap(-1, 1)])
"""The reference count, in this interpreter, of a map that only the list and the loop over it hold."""


class MapPool:
    """A pool of memory maps for any thread, in which writers gather blocks. Reference counts show which maps are free.

    Without it, a writer of many small shards takes 130 page faults for each two blocks of 256 kB.
    """

    def __init__(self, kept_bytes: int = POOL_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._maps: list[mmap] = []

    def take(self, nbytes: int) -> mmap:
        """Return a map of ``nbytes`` with undefined content, to which nothing else refers."""
        for found in self._maps:  # a second thread's loop raises the count, so at most one of them takes it
            if len(found) == nbytes and getrefcount(found) == _UNUSED:
                return found
        made = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        while self.kept_bytes + nbytes > max(self._kept_bytes, POOL_BLOCKS * nbytes):
            del self._maps[:1]  # a slice, since another thread may have emptied the list
        self._maps.append(made)
        return made

    @property
    def kept_bytes(self) -> int:
        """The bytes of all maps of the pool, used or not."""
        return sum(map(len, self._maps))


BLOCKS = MapPool()
"""The pool of all writers of this process."""
