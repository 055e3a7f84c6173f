"""Samples made in place: arrays of the block itself, in a segment's memory where the stream has segments.

A decoder that can write into a given array saves a copy of each sample. ``shard`` and ``commit`` commit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import PenstockError
from penstock_common.wire.block import Block, Column, sizes_of
from penstock_common.wire.dtypes import BOOL
from penstock_common.wire.header import ALIGN, SegmentRef
from penstock_common.wire.spec import Spec


def require_fixed(spec: Spec) -> None:
    """Raise PenstockError if samples differ in size, because their places are then not known in advance."""
    ragged = [tensor.name for tensor in spec if tensor.is_ragged]
    if ragged:
        raise PenstockError(
            f"reserve() needs tensors of a fixed size, {', '.join(map(repr, ragged))} is ragged: use write"
        )


def memory_for(spec: Spec, count: int) -> NDArray[np.uint8]:
    """Return memory outside any segment for the columns of ``count`` samples."""
    memory = np.empty(SegmentRef("", 0, sizes_of(spec, count)).end + ALIGN, dtype=np.uint8)
    return memory[-memory.ctypes.data % ALIGN :]


class Reservation(Mapping[str, NDArray[Any]]):
    """Arrays for n samples to be filled in place; their contents are undefined at first.

    Leaving the ``with`` block without an error, or `commit`, adds them to the shard as one block. An error, or `drop`,
    forgets them. Afterwards the arrays belong to the stream: they are read-only, and may change.

    Example:
        ``with epoch.reserve(n) as rows: rows["x"][...] = ...``
    """

    def __init__(
        self, spec: Spec, first: int, arrays: dict[str, NDArray[Any]], end: Callable[[Block, bool], None]
    ) -> None:
        self._spec, self._first, self._arrays, self._end = spec, first, arrays, end
        self._is_over = False

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the array ``[n, *shape]`` of one tensor."""
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def commit(self) -> None:
        """Add all n samples.

        Raises:
            PenstockError: They were committed or dropped already, or an error of `ShardWriter.write`.
        """
        block = self._over()
        for column in block.columns:
            if column.spec.dtype == BOOL:  # the wire format has 0 and 1 only
                np.not_equal(column.values.view(np.uint8), 0, out=column.values)
            column.values.flags.writeable = False
        self._end(block, True)

    def drop(self) -> None:
        """Forget the samples. The shard's position does not change."""
        self._end(self._over(), False)

    def _over(self) -> Block:
        if self._is_over:
            raise PenstockError("these samples were committed or dropped already: reserve others")
        self._is_over = True
        columns = [Column(tensor, self._arrays[tensor.name]) for tensor in self._spec]
        return Block(self._first, len(columns[0].values), columns)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_over:
            if kind is None:
                self.commit()
            else:
                self.drop()
