"""Ragged tensors: a batch's samples of different shapes, and the shapes as an entry carries them.

Where sizes are bounded, an empty dimension counts as 1: numpy multiplies the others even if the product is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import TooLarge
from penstock_common.format.limits import MAX_ENTRY_BYTES
from penstock_common.hints import Mistaken


class Ragged(Sequence[Any]):
    """A batch's samples of different shapes: one flat array and one shape a sample.

    ``r[i]`` is the i-th sample in its own shape, a view. Of a ``bytes`` tensor it is a byte string. ``r[2:5]`` is a
    Ragged of fewer samples. ``r.padded()`` is one rectangular array. ``values`` and ``shapes`` are the data, as
    ``tf.RaggedTensor`` or ``torch.nested`` take them.

    Example:
        >>> boxes = batch["boxes"]
        >>> boxes[0].shape, boxes.padded().shape
        ((3, 4), (32, 7, 4))
    """

    __slots__ = ("_starts", "is_bytes", "shapes", "values")

    def __init__(self, values: NDArray[Any], shapes: NDArray[np.int64], *, is_bytes: bool = False) -> None:
        self.values = values
        """1-D: the elements of all samples in order, each sample in C order."""
        self.shapes = shapes
        """int64 ``[n, ndim]``: each sample's shape, or a byte string's length."""
        self.is_bytes = is_bytes
        self._starts: NDArray[np.int64] = np.zeros(len(shapes) + 1, dtype=np.int64)
        np.cumsum(np.prod(shapes, axis=1), out=self._starts[1:])
        if values.ndim != 1 or shapes.ndim != 2 or len(values) != self._starts[-1]:
            raise ValueError(f"{values.shape} values for shapes that ask {self._starts[-1]}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of every sample: uint8 for byte strings."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of values and shapes."""
        return int(self.values.nbytes + self.shapes.nbytes)

    def __len__(self) -> int:
        return len(self.shapes)

    shape = Mistaken(
        "shape",
        ", because its samples may differ in size: write ragged[0] for one, ragged.padded() for one array; --resize or "
        "a transform makes images alike",
    )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self.take(range(start, stop, step))
            stop = max(start, stop)
            flat = self.values[self._starts[start] : self._starts[stop]]
            return Ragged(flat, self.shapes[start:stop], is_bytes=self.is_bytes)
        position = range(len(self))[index]  # range takes negative indices and raises IndexError
        flat = self.values[self._starts[position] : self._starts[position + 1]]
        return flat.tobytes() if self.is_bytes else flat.reshape(self.shapes[position])

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def tolist(self) -> list[Any]:
        """Return the samples as Python values: nested lists of numbers, or byte strings."""
        return [sample if self.is_bytes else sample.tolist() for sample in self]

    def padded(self, fill: Any = 0, *, limit_bytes: int = MAX_ENTRY_BYTES) -> NDArray[Any]:
        """Return all samples in one new array ``[n, *largest shape]``, each at index 0 of its dimensions.

        Args:
            fill: The value of the elements that no sample has.
            limit_bytes: The largest array to make. One long and one wide sample can ask for far more than the data.

        Raises:
            TooLarge: The array would exceed ``limit_bytes``.
        """
        largest = [int(size) for size in self.shapes.max(axis=0, initial=0)]
        size = float(len(self)) * float(np.prod(np.maximum(largest, 1), dtype=np.float64)) * self.dtype.itemsize
        if size > limit_bytes:
            raise TooLarge(f"padding {len(self)} samples to {largest} takes {size:.3g} bytes, over {limit_bytes}")
        out = np.full((len(self), *largest), fill, dtype=self.dtype)
        for position, shape in enumerate(self.shapes.tolist()):
            flat = self.values[self._starts[position] : self._starts[position + 1]]
            corner: tuple[slice, ...] = tuple(slice(0, dim) for dim in shape)
            out[position][corner] = flat.reshape(shape)
        return out

    def take(self, positions: Sequence[int] | NDArray[Any]) -> Ragged:
        """Copy the samples at these positions, in this order, into a new Ragged."""
        rows = np.asarray(positions, dtype=np.int64)
        spans = zip(self._starts[:-1][rows].tolist(), self._starts[1:][rows].tolist(), strict=True)
        parts = [self.values[start:stop] for start, stop in spans]
        values = np.concatenate(parts) if parts else self.values[:0].copy()
        return Ragged(values, self.shapes[rows], is_bytes=self.is_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Copy the samples of all parts, in order, into one Ragged. One part is returned itself."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([part.values for part in parts])
        return cls(values, np.concatenate([part.shapes for part in parts]), is_bytes=parts[0].is_bytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return (
            self.is_bytes == other.is_bytes
            and self.dtype == other.dtype
            and np.array_equal(self.shapes, other.shapes)
            and np.array_equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside can change

    def __repr__(self) -> str:
        kind = "bytes" if self.is_bytes else self.dtype.name
        return f"Ragged({len(self)} samples of {kind}, {self.nbytes} bytes)"
