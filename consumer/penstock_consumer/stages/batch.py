"""Batches, and the assembler that has received samples land in them in place.

Where bytes come from is the reader's; who is owed an acknowledgement travels along as spans. No Redis here.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock_common.hints import batch_attribute, is_unpacking, not_tuples, unknown_tensor
from penstock_common.wire.block import Column
from penstock_common.wire.dtypes import BYTES, numpy_dtype
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.buffers import ArrayPool

UNKNOWN = -1
"""The epoch of a batch that was rebuilt from tensors alone."""


@dataclass(slots=True, eq=False)
class Lease:
    """One delivered entry this member holds, and how many of its samples it still owes an acknowledgement for."""

    partition: int
    epoch: int
    shard: int
    entry_id: bytes
    owed: int
    is_lost: bool = False
    """Someone else holds the entry now: what was not handed out of it must not be."""
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """Offsets [lo, hi) of it that were settled batch by batch."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """Of an entry that is to be fetched again: what waits for its checkpoint, and is not to be handed out."""
    heir: Lease | None = None
    """The lease that took this one's place, and with it what is owed."""

    def current(self) -> Lease:
        """Return the lease in which this entry is counted now."""
        lease = self
        while lease.heir is not None:
            lease = lease.heir
        return lease


class BatchSpan(NamedTuple):
    """Consecutive rows of a batch: offsets [lo, hi) of one shard, from one entry."""

    lease: Lease
    lo: int
    hi: int


class Batch(dict[str, Any]):
    """Samples by tensor: ``batch["x"]`` is ``[n, *shape]``, a ragged tensor is a `Ragged`. All of one epoch.

    ``type(batch)(dict(batch))``, as frameworks rebuild what they map, gives a batch without identities: it has a size
    and its tensors, and cannot be acknowledged.
    """

    __slots__ = ("epoch", "is_alone", "is_dropped", "position", "rows", "source", "spans")

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]],
        epoch: int = UNKNOWN,
        spans: Sequence[BatchSpan] = (),
        position: int = 0,
    ) -> None:
        super().__init__(values)
        self.epoch = epoch
        """The epoch all samples are of; `UNKNOWN` in one that was rebuilt."""
        self.spans = spans
        """Where the rows come from, in order; what an acknowledgement is made of."""
        self.position = position
        """In ordered reading, where in the epoch's canonical order its step ends; else 0."""
        self.rows = 0
        """If not 0, its arrays have so many rows: those beyond `size` repeat its first ones."""
        self.is_alone = False
        """Nothing else may be handed out with it: training may have died on it."""
        self.is_dropped = False
        """Nobody is handed it, it counts as trained on: a filter's, or what did not fill a batch."""
        self.source = ""
        """In a mixture, the name of the loader it comes from."""

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except (KeyError, TypeError):  # TypeError: a slice
            raise KeyError(unknown_tensor(name, self.keys())) from None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(batch_attribute(name, self.keys(), "identities"))

    def __iter__(self) -> Iterator[str]:
        """Tensor names. Raises TypeError for ``x, y = batch``, which would give two names instead of two arrays."""
        if is_unpacking(sys._getframe(1)):
            raise TypeError(not_tuples(self.keys()))
        return super().__iter__()

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name} {_described(value)}" for name, value in self.items())
        of = "" if self.epoch == UNKNOWN else f" of epoch {self.epoch}"
        return f"<Batch of {self.size} samples{of}: {tensors}>"

    @property
    def size(self) -> int:
        """Samples in the batch; of one that was rebuilt, rows of its first tensor."""
        if self.epoch == UNKNOWN:
            with suppress(TypeError):  # one number for all of them
                return len(next(iter(self.values()), ()))
            return 0
        return sum([hi - lo for _, lo, hi in self.spans])

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum([int(value.nbytes) for value in self.values()])

    def identities(self) -> Iterator[tuple[int, int, int]]:
        """(epoch, shard, offset) of each row: the name of a sample for ever."""
        for span in self.spans:
            for offset in range(span.lo, span.hi):
                yield self.epoch, span.lease.shard, offset

    def without_lost(self) -> Batch | None:
        """The batch less the rows of entries that someone else holds now; None if no row is left."""
        if not any(span.lease.is_lost for span in self.spans):
            return self
        keep = np.concatenate([np.full(span.hi - span.lo, not span.lease.is_lost) for span in self.spans])
        if not keep.any():
            return None
        rows = np.flatnonzero(keep)
        values = {name: _take(value, rows) for name, value in self.items()}
        left = Batch(values, self.epoch, [span for span in self.spans if not span.lease.is_lost], self.position)
        left.rows, left.is_alone, left.is_dropped = self.rows, self.is_alone, self.is_dropped
        return left.padded()

    def padded(self) -> Batch:
        """The batch with as many `rows` as it should have."""
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


@dataclass(slots=True)
class _OpenBatch:
    """A batch being filled."""

    arrays: dict[str, NDArray[Any]]
    memory: dict[str, memoryview]
    """The bytes of `arrays`, a row after the other."""
    ragged: dict[str, list[Ragged]]
    filled: int = 0
    spans: list[BatchSpan] = field(default_factory=list)


class Assembler:
    """Fills batches of ``batch_size`` samples; finished ones are taken with `take`.

    A whole entry of fixed-size tensors is placed with `places` (where its bytes should go) and `accept`; anything
    else (ragged tensors, some rows of an entry) goes through `append`.
    """

    def __init__(self, spec: Spec, batch_size: int, pool: ArrayPool, epoch: int) -> None:
        self._spec, self._batch_size, self._pool, self._epoch = spec, batch_size, pool, epoch
        self._fixed = [tensor for tensor in spec if not tensor.is_ragged]
        self._row_bytes = {tensor.name: tensor.sample_bytes for tensor in self._fixed}
        self._fixed_arrays = [
            (t.name, numpy_dtype(t.dtype), (batch_size, *(dim or 0 for dim in t.shape))) for t in self._fixed
        ]
        """Name, dtype and shape of a batch's arrays."""
        self._ragged = [tensor.name for tensor in spec if tensor.is_ragged]
        self._opened: deque[_OpenBatch] = deque()
        self._ready: deque[Batch] = deque()

    def places(self, name: str, count: int) -> list[memoryview]:
        """Memory, in order, for the bytes of ``count`` samples of a fixed-size tensor; none is taken until `accept`."""
        size = self._row_bytes[name]
        return [
            opened.memory[name][opened.filled * size : (opened.filled + rows) * size]
            for opened, rows in self._shares(count)
        ]

    def targets(self, name: str, count: int) -> list[NDArray[Any]]:
        """Return the same memory as rows of arrays."""
        return [opened.arrays[name][opened.filled : opened.filled + rows] for opened, rows in self._shares(count)]

    def accept(self, count: int, spans: Sequence[BatchSpan], ragged: dict[str, Ragged]) -> None:
        """Takes ``count`` samples whose fixed tensors now lie in their `places`."""
        done = 0
        rest = deque(spans)
        for opened, rows in self._shares(count):
            for name, parts in opened.ragged.items():
                parts.append(ragged[name][done : done + rows])
            opened.spans += _split(rest, rows)
            opened.filled += rows
            done += rows
        while self._opened and self._opened[0].filled == self._batch_size:
            self._ready.append(self._finish(self._opened.popleft()))

    def takes_whole(self, count: int) -> bool:
        """Return whether so many samples would be a batch of their own."""
        return count == self._batch_size and not self.has_rows

    def adopt(self, columns: dict[str, Column], spans: Sequence[BatchSpan]) -> None:
        """Takes an entry that `takes_whole` as a batch, its arrays as they are."""
        self._ready.append(Batch({name: column.values for name, column in columns.items()}, self._epoch, list(spans)))

    def append(self, columns: dict[str, Column], rows: NDArray[np.int64], spans: Sequence[BatchSpan]) -> None:
        """Copies some rows of a decoded entry in."""
        count = len(rows)
        for tensor in self._fixed:
            values = columns[tensor.name].values[rows]
            done = 0
            for piece in self.targets(tensor.name, count):
                piece[...] = values[done : done + len(piece)]
                done += len(piece)
        ragged = {name: _take(as_ragged(column), rows) for name, column in columns.items() if column.shapes is not None}
        self.accept(count, spans, ragged)

    def flush(self) -> None:
        """Ends the batch being filled, however small."""
        for opened in self._opened:
            if opened.filled:
                self._ready.append(self._finish(opened))
        self._opened.clear()

    def take(self) -> Batch | None:
        """The next finished batch."""
        return self._ready.popleft() if self._ready else None

    @property
    def has_rows(self) -> bool:
        """Return whether a batch is begun."""
        return any(opened.filled for opened in self._opened)

    def _shares(self, count: int) -> list[tuple[_OpenBatch, int]]:
        """The begun batches, and as many more as ``count`` samples need, each with the rows it takes."""
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

    def _finish(self, opened: _OpenBatch) -> Batch:
        whole = opened.filled == self._batch_size
        values: dict[str, Any] = {}
        for name in self._spec.names:
            if (array := opened.arrays.get(name)) is None:
                values[name] = Ragged.concatenate(opened.ragged[name])
            else:
                values[name] = array if whole else array[: opened.filled]
        return Batch(values, self._epoch, opened.spans)


def as_ragged(column: Column) -> Ragged:
    """A ragged column as batches hold it."""
    assert column.shapes is not None
    return Ragged(column.values, column.shapes, is_bytes=column.spec.dtype == BYTES)


def _split(rest: deque[BatchSpan], rows: int) -> list[BatchSpan]:
    """Takes the spans of the next ``rows`` rows off the left."""
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
