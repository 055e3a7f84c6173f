"""Blocks of rows: samples of one small array, of which adding them one by one is most of what they cost.

What is not the ordinary case, a value of another kind or a block's first sample, is ``format.block``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from penstock_common.wire.block import SMALL_BYTES, BlockBuilder, Place
from penstock_common.wire.spec import Spec


class RowBuilder(BlockBuilder):
    """Of a spec of one array of a fixed size; does what any builder does, without a look at what there is not.

    Where it stands it knows as an offset in the block's map, which takes one addition a row.
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
        """None, which no array has, before a block's first row, and where rows are not copied byte by byte."""
        self._map: Any = None

    def _gather_in(self, memory: NDArray[np.uint8]) -> None:
        super()._gather_in(memory)
        if self._small:
            _, _, self._shape, self._map, self._at, self._size = self._small[0]
            self._count = 0

    def add(self, sample: Mapping[str, Any]) -> bool:
        """Copies one sample in: see `BlockBuilder.add`."""
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
    """What gathers samples of a spec at the least cost; see `BlockBuilder`."""
    first = spec.tensors[0]
    is_rows = len(spec.tensors) == 1 and bool(first.shape) and not first.is_ragged
    is_small = is_rows and 0 < first.sample_bytes <= SMALL_BYTES
    return (RowBuilder if is_small else BlockBuilder)(spec, target_bytes, max_samples, place)
