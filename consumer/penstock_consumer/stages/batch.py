"""Batches, their memory, and the assembler that gives received samples their places in a batch.

The reader fetches the bytes. Spans say which entries a batch's samples belong to. Nothing here uses Redis.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from sys import getrefcount
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock_common.hints import batch_attribute, is_unpacking, not_tuples, unknown_tensor
from penstock_common.wire.block import Column
from penstock_common.wire.dtypes import BYTES, numpy_dtype
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec

UNKNOWN = -1
"""The epoch number of a batch that was rebuilt from tensors alone."""


@dataclass(slots=True, eq=False)
class Lease:
    """A member's lease on one delivered entry."""

    partition: int
    epoch: int
    shard: int
    entry_id: bytes
    unacknowledged: int
    """The number of its samples that are not acknowledged."""
    is_lost: bool = False
    """Whether another member holds the entry now. This member must give no more of its samples to the loop."""
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """The offsets [lo, hi) of the entry that were acknowledged before it came, and then batch by batch."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """The offsets that wait for a checkpoint, in an entry to be fetched again. The loop must not get them again."""
    heir: Lease | None = None
    """The lease that replaced this one and took over its unacknowledged samples."""

    def current(self) -> Lease:
        """Return the lease that counts this entry now."""
        lease = self
        while lease.heir is not None:
            lease = lease.heir
        return lease

    def acknowledge(self, ranges: Sequence[tuple[int, int]], samples: int) -> None:
        """Count this many samples, at these offsets, as acknowledged."""
        self.unacknowledged -= samples
        self.acknowledged.extend(ranges)

    def lose(self) -> None:
        """Note that another lease, here or elsewhere, holds the entry now."""
        self.is_lost = True

    def inherit(self, samples: int) -> None:
        """Count unacknowledged samples of an earlier lease, too."""
        self.unacknowledged += samples

    def leave_to(self, heir: Lease) -> None:
        """Let another lease count this entry from now on."""
        self.heir = heir


class BatchSpan(NamedTuple):
    """Consecutive rows of a batch, at the offsets [lo, hi) of one shard, from one entry."""

    lease: Lease
    lo: int
    hi: int


class Batch(dict[str, Any]):
    """Samples of one epoch, by tensor: ``batch["x"]`` is ``[n, *shape]``, and a ragged tensor is a `Ragged`.

    Frameworks rebuild what they map as ``type(batch)(dict(batch))``. This gives a batch without identities. It has a
    size and its tensors, and cannot be acknowledged.

    Example:
        >>> batch["x"].shape, batch.size, batch.epoch
        ((64, 224, 224, 3), 64, 0)
    """

    __slots__ = ("cleared_bytes", "epoch", "is_alone", "is_dropped", "position", "rows", "source", "spans")

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]],
        epoch: int = UNKNOWN,
        spans: Sequence[BatchSpan] = (),
        position: int = 0,
        *,
        rows: int = 0,
        is_alone: bool = False,
        is_dropped: bool = False,
        source: str = "",
    ) -> None:
        super().__init__(values)
        self.epoch = epoch
        """The epoch of all its samples, or `UNKNOWN` in a batch that was rebuilt."""
        self.spans = spans
        """The entries and offsets of the rows, in order. An acknowledgement is made of them."""
        self.position = position
        """In canonical order, the position in the epoch at which its step ends; else 0."""
        self.rows = rows
        """The number of rows of its arrays, if not 0. The rows beyond `size` repeat the first ones."""
        self.is_alone = is_alone
        """Whether no other samples may be joined to it, because a training job may have died at it."""
        self.is_dropped = is_dropped
        """Whether it counts as trained on without the loop: a filter's rows, or rows that fill no batch."""
        self.source = source
        """In a mixture, the name of the loader that gave it."""
        self.cleared_bytes = 0
        """The payload bytes of the arrays that `clear` removed."""

    def clear(self) -> None:
        """Remove all arrays. The identities and the number of bytes stay."""
        self.cleared_bytes = self.nbytes
        super().clear()

    def given_by(self, source: str) -> Batch:
        """Note the loader of a mixture that gave the batch, and return the batch."""
        self.source = source
        return self

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except (KeyError, TypeError):  # TypeError: a slice
            raise KeyError(unknown_tensor(name, self.keys())) from None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(batch_attribute(name, self.keys(), "identities"))

    def __iter__(self) -> Iterator[str]:
        """Yield the tensor names. Raises TypeError for ``x, y = batch``, which would give names instead of arrays."""
        if is_unpacking(sys._getframe(1)):
            raise TypeError(not_tuples(self.keys()))
        return super().__iter__()

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name} {_described(value)}" for name, value in self.items())
        of = "" if self.epoch == UNKNOWN else f" of epoch {self.epoch}"
        return f"<Batch of {self.size} samples{of}: {tensors}>"

    @property
    def size(self) -> int:
        """Return the number of samples, or in a batch that was rebuilt the rows of its first tensor."""
        if self.epoch == UNKNOWN:
            with suppress(TypeError):  # one number for all of them
                return len(next(iter(self.values()), ()))
            return 0
        samples = 0
        for _, lo, hi in self.spans:
            samples += hi - lo
        return samples

    @property
    def nbytes(self) -> int:
        """Return the payload bytes, also after `clear`."""
        nbytes = self.cleared_bytes
        for value in self.values():
            nbytes += int(value.nbytes)
        return nbytes

    def identities(self) -> Iterator[tuple[int, int, int]]:
        """Yield (epoch, shard, offset) of each row, which names the sample for as long as the stream exists."""
        for span in self.spans:
            for offset in range(span.lo, span.hi):
                yield self.epoch, span.lease.shard, offset

    def without_lost(self) -> Batch | None:
        """Return the batch without the rows of entries that another member holds now, or None if no row is left."""
        for span in self.spans:
            if span.lease.is_lost:
                return self._without_lost()
        return self

    def _without_lost(self) -> Batch | None:
        keep = np.concatenate([np.full(span.hi - span.lo, not span.lease.is_lost) for span in self.spans])
        if not keep.any():
            return None
        rows = np.flatnonzero(keep)
        values = {name: _take(value, rows) for name, value in self.items()}
        return Batch(
            values,
            self.epoch,
            [span for span in self.spans if not span.lease.is_lost],
            self.position,
            rows=self.rows,
            is_alone=self.is_alone,
            is_dropped=self.is_dropped,
        ).filled_up()

    def filled_up(self) -> Batch:
        """Return the batch, filled up to `rows` rows."""
        size = self.size
        if self.rows > size:
            every = np.arange(self.rows) % size
            self.update({name: _take(value, every) for name, value in self.items() if len(value) < self.rows})
        return self


def _described(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    if isinstance(value, Ragged) or dtype is None:
        return type(value).__name__
    return f"{dtype}{list(value.shape)}"


def _take(value: Any, rows: NDArray[np.int64]) -> Any:
    if isinstance(value, Ragged):
        return value.take(rows)
    return value[rows]


# --- memory -----------------------------------------------------------------------------------------------------------

ALIGNMENT = 64
"""The alignment in bytes: a cache line. TensorFlow and XLA ask for it to take an array without a copy."""
TRIED = 8
"""The buffers tried before a new one is made. They become free in the order of their use, so a few are enough."""


def _references(buffers: list[tuple[NDArray[np.uint8], int]], position: int) -> int:
    owner, _ = buffers[position]
    return getrefcount(owner)


_UNUSED = _references([(np.empty(1, dtype=np.uint8), 0)], 0)
"""The reference count of a buffer that only the pool holds. Newer interpreters count fewer references."""


class ArrayPool:
    """A pool of 64-byte aligned arrays, which are used again once nothing refers to them.

    A fresh large array costs page faults (0.4 s of CPU per GB); a recycled one does not. Reference counts show which
    arrays are free again.
    Every view of a batch keeps its buffer alive through ``base``. An array is therefore never used again while
    something refers to it: a batch, a slice of it, or a torch or TensorFlow tensor made of it without a copy.
    Several readers may use a pool.
    """

    def __init__(self, keep: int) -> None:
        self._lock = threading.Lock()
        self._keep = keep
        """The number of buffers kept for each size. Its last user frees a buffer beyond that number."""
        self._pool: dict[int, list[tuple[NDArray[np.uint8], int]]] = {}
        """The buffers by size, each with the position of its first aligned byte."""
        self._next: dict[int, int] = {}
        """The position at which the search for a free buffer begins, by size. The oldest buffer is expected there."""
        self.check_size: Callable[[int], object] | None = None
        """See `bound`."""

    def bound(self, check_size: Callable[[int], object]) -> None:
        """Call ``check_size`` with the bytes of a batch whenever it has more of them. It raises if they are too many.

        A batch of ragged tensors has no size before it is filled, and may be far larger than what it is filled from.
        """
        self.check_size = check_size

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of undefined content."""
        return self.memory(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ``nbytes`` bytes of undefined content."""
        with self._lock:  # until something refers to the buffer
            owner, start = self._buffer(nbytes)
            return owner[start : start + nbytes]

    def trim(self) -> None:
        """Free the buffers that nothing refers to, because fewer are needed from now on."""
        with self._lock:
            for buffers in self._pool.values():
                for position in reversed(range(len(buffers))):
                    if _references(buffers, position) == _UNUSED:
                        del buffers[position]
            self._next.clear()

    def _buffer(self, nbytes: int) -> tuple[NDArray[np.uint8], int]:
        """Return a buffer that nothing refers to, and the position of its first aligned byte."""
        buffers = self._pool.setdefault(nbytes, [])
        first = self._next.get(nbytes, 0)
        for step in range(min(TRIED, len(buffers))):
            position = (first + step) % len(buffers)
            if _references(buffers, position) == _UNUSED:
                self._next[nbytes] = position + 1
                return buffers[position]
        self._next[nbytes] = first + TRIED  # a trainer may never free those it holds
        owner = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        start = -owner.ctypes.data % ALIGNMENT
        if len(buffers) < self._keep:
            buffers.append((owner, start))
        return owner, start


def row_bytes(spec: Spec) -> int:
    """Return the bytes of a sample's fixed-size tensors."""
    return sum(tensor.sample_bytes for tensor in spec if not tensor.is_ragged)


def pool_for(spec: Spec, batch_size: int, nbytes: int) -> ArrayPool:
    """Return memory for all batches that can wait in ``nbytes`` at once, and for some that the loop has."""
    return ArrayPool(keep=nbytes // max(1, row_bytes(spec) * batch_size) + 8)


# --- filling batches --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenBatch:
    """A batch being filled."""

    arrays: dict[str, NDArray[Any]]
    memory: dict[str, memoryview]
    """The bytes of `arrays`, row after row."""
    ragged: dict[str, list[Ragged]]
    filled: int = 0
    ragged_bytes: int = 0
    """The bytes in `ragged`."""
    spans: list[BatchSpan] = field(default_factory=list)

    def add(self, ragged: dict[str, Ragged], start: int, stop: int) -> None:
        """Add the ragged tensors of some samples."""
        for name, parts in self.ragged.items():
            parts.append(ragged[name][start:stop])
            self.ragged_bytes += parts[-1].nbytes

    def fill(self, spans: list[BatchSpan], rows: int) -> None:
        """Note that the next rows have their samples."""
        self.spans += spans
        self.filled += rows


class Assembler:
    """An assembler that fills batches of ``batch_size`` samples. `take` gives the finished ones.

    The reader places a complete entry of fixed-size tensors with `places` (where its bytes should go) and `accept`.
    Anything else (ragged tensors, some rows of an entry) goes through `append`.
    """

    def __init__(self, spec: Spec, batch_size: int, pool: ArrayPool, epoch: int) -> None:
        self._spec, self._batch_size, self._pool, self._epoch = spec, batch_size, pool, epoch
        self._fixed = [tensor for tensor in spec if not tensor.is_ragged]
        self._row_bytes = {tensor.name: tensor.sample_bytes for tensor in self._fixed}
        self._fixed_arrays = [
            (t.name, numpy_dtype(t.dtype), (batch_size, *(dim or 0 for dim in t.shape))) for t in self._fixed
        ]
        """The name, dtype and shape of each of a batch's arrays."""
        self._ragged = [tensor.name for tensor in spec if tensor.is_ragged]
        self._opened: deque[_OpenBatch] = deque()
        self._ready: deque[tuple[dict[str, Any], list[BatchSpan]]] = deque()
        """The tensors and spans of finished batches."""

    def places(self, name: str, count: int) -> list[memoryview]:
        """Return memory, in order, for the bytes of ``count`` samples of a fixed-size tensor. `accept` takes it."""
        size = self._row_bytes[name]
        return [
            opened.memory[name][opened.filled * size : (opened.filled + rows) * size]
            for opened, rows in self._shares(count)
        ]

    def accept(self, count: int, spans: Sequence[BatchSpan], ragged: dict[str, Ragged]) -> None:
        """Take ``count`` samples whose fixed tensors are in their `places`."""
        done = 0
        rest = deque(spans)
        for opened, rows in self._shares(count):
            opened.add(ragged, done, done + rows)
            opened.fill(_split(rest, rows), rows)
            done += rows
            if self._pool.check_size is not None:
                self._pool.check_size(opened.ragged_bytes + opened.filled * sum(self._row_bytes.values()))
        while self._opened and self._opened[0].filled == self._batch_size:
            self._ready.append(self._finish(self._opened.popleft()))

    def takes_whole(self, count: int) -> bool:
        """Return whether ``count`` samples would make a complete batch of their own."""
        return count == self._batch_size and not any(opened.filled for opened in self._opened)

    def adopt(self, columns: dict[str, Column], spans: Sequence[BatchSpan]) -> None:
        """Take an entry for which `takes_whole` is true as a batch, with its arrays as they are."""
        self._ready.append(({name: column.values for name, column in columns.items()}, list(spans)))

    def append(self, columns: dict[str, Column], rows: NDArray[np.int64], spans: Sequence[BatchSpan]) -> None:
        """Copy some rows of a decoded entry into the batch."""
        count = len(rows)
        for tensor in self._fixed:
            values = columns[tensor.name].values[rows]
            done = 0
            for opened, share in self._shares(count):
                opened.arrays[tensor.name][opened.filled : opened.filled + share] = values[done : done + share]
                done += share
        ragged = {name: _take(as_ragged(column), rows) for name, column in columns.items() if column.shapes is not None}
        self.accept(count, spans, ragged)

    def flush(self) -> None:
        """End the batch being filled, however small it is."""
        for opened in self._opened:
            if opened.filled:
                self._ready.append(self._finish(opened))
        self._opened.clear()

    def take(self, position: int = 0, *, is_alone: bool = False) -> Batch | None:
        """Return the next finished batch. See `Batch` for the arguments."""
        if not self._ready:
            return None
        values, spans = self._ready.popleft()
        return Batch(values, self._epoch, spans, position, is_alone=is_alone)

    def _shares(self, count: int) -> list[tuple[_OpenBatch, int]]:
        """Return the open batches that ``count`` samples need, each with the rows it takes. Open more if needed."""
        shares: list[tuple[_OpenBatch, int]] = []
        while count > 0:
            if len(shares) == len(self._opened):
                self._opened.append(self._fresh())
            opened = self._opened[len(shares)]
            rows = min(count, self._batch_size - opened.filled)
            shares.append((opened, rows))
            count -= rows
        return shares

    def _fresh(self) -> _OpenBatch:
        arrays, memory = {}, {}
        for tensor, dtype, shape in self._fixed_arrays:
            held = self._pool.memory(self._batch_size * self._row_bytes[tensor])
            arrays[tensor], memory[tensor] = held.view(dtype).reshape(shape), held.data
        return _OpenBatch(arrays, memory, {name: [] for name in self._ragged})

    def _finish(self, opened: _OpenBatch) -> tuple[dict[str, Any], list[BatchSpan]]:
        whole = opened.filled == self._batch_size
        values: dict[str, Any] = {}
        for name in self._spec.names:
            if (array := opened.arrays.get(name)) is None:
                values[name] = Ragged.concatenate(opened.ragged[name])
            else:
                values[name] = array if whole else array[: opened.filled]
        return values, opened.spans


def as_ragged(column: Column) -> Ragged:
    """Return a ragged column in the form that batches hold."""
    assert column.shapes is not None
    return Ragged(column.values, column.shapes, is_bytes=column.spec.dtype == BYTES)


def _split(rest: deque[BatchSpan], rows: int) -> list[BatchSpan]:
    """Remove the spans of the next ``rows`` rows from the left, and return them."""
    taken: list[BatchSpan] = []
    while rows:
        span = rest.popleft()
        size = span.hi - span.lo
        if size > rows:
            rest.appendleft(BatchSpan(span.lease, span.lo + rows, span.hi))
            span = BatchSpan(span.lease, span.lo, span.lo + rows)
            size = rows
        taken.append(span)
        rows -= size
    return taken
