"""Ragged tensors: a batch's samples of different shapes, and the shapes as an entry carries them.

Where sizes are bounded, an empty dimension counts as 1: numpy multiplies the others even if the product is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, TooLarge
from penstock_common.hints import Mistaken
from penstock_common.wire.dtypes import item_size
from penstock_common.wire.limits import MAX_ENTRY_BYTES, MAX_FIELD_BYTES
from penstock_common.wire.spec import TensorSpec


def inline_shapes(value: Any, count: int, tensor: TensorSpec) -> NDArray[np.int64]:
    """Return the ``shapes`` of a header, a list of n lists of sizes, as int64 ``[n, ndim]``. Raises BadEntry."""
    if type(value) is not list or len(value) != count or {type(shape) for shape in value} != {list}:
        raise BadEntry(f"tensor {tensor.name!r}: shapes is not a list of {count} lists")
    if {len(shape) for shape in value} != {tensor.wire_ndim}:
        raise BadEntry(f"tensor {tensor.name!r}: a sample's shape has not {tensor.wire_ndim} sizes")
    if {type(size) for shape in value for size in shape} != {int}:
        raise BadEntry(f"tensor {tensor.name!r}: a size is not an integer")
    try:
        shapes = np.array(value, dtype=np.int64)
    except OverflowError:
        raise BadEntry(f"tensor {tensor.name!r}: a size is beyond 64 bits") from None
    return _bounded(shapes, tensor)


def read_shapes(data: Any, count: int, tensor: TensorSpec) -> NDArray[np.int64]:
    """Return the ``<name>.shapes`` field as int64 ``[n, ndim]``. Raises BadEntry for a row that the spec forbids."""
    raw = np.frombuffer(data, dtype=np.uint8)
    expected = 8 * count * tensor.wire_ndim
    if raw.nbytes != expected:
        raise BadEntry(f"{tensor.name}.shapes has {raw.nbytes} bytes, expected {expected}")
    return _bounded(raw.view("<i8").reshape(count, tensor.wire_ndim), tensor)


def _bounded(shapes: NDArray[np.int64], tensor: TensorSpec) -> NDArray[np.int64]:
    if tensor.shape:  # bytes has none: its length is free
        fixed = np.array([-1 if dim is None else dim for dim in tensor.shape], dtype=np.int64)
        if not ((shapes == fixed) | (fixed < 0)).all():
            raise BadEntry(f"tensor {tensor.name!r}: a sample's shape does not fit {tensor.shape}")
    # in floating point a hostile product grows to infinity instead of wrapping around
    extents = np.prod(np.maximum(shapes, 1), axis=1, dtype=np.float64) * item_size(tensor.dtype)
    if int(shapes.min()) < 0 or float(extents.max()) > MAX_FIELD_BYTES:
        raise BadEntry(f"tensor {tensor.name!r}: a size below 0, or a sample over {MAX_FIELD_BYTES} bytes")
    return shapes


def row_starts(shapes: NDArray[np.int64], tensor: TensorSpec) -> NDArray[np.int64]:
    """Return where each sample starts in the flat values, and the end, in elements: int64 ``[n + 1]``.

    The shapes were bounded above or come from real arrays, so neither product nor sum can overflow. Raises BadEntry.
    """
    starts = np.zeros(len(shapes) + 1, dtype=np.int64)
    np.cumsum(np.prod(shapes, axis=1), out=starts[1:])
    if int(starts[-1]) * item_size(tensor.dtype) > MAX_FIELD_BYTES:
        raise BadEntry(f"tensor {tensor.name!r}: its shapes ask {starts[-1]} elements, over the limit of a field")
    return starts


class Ragged(Sequence[Any]):
    """A batch's samples of different shapes: one flat array and one shape a sample.

    ``r[i]`` is the i-th sample in its own shape, a view. Of a ``bytes`` tensor it is a byte string. ``r[2:5]`` is a
    Ragged of fewer samples. ``r.padded()`` is one rectangular array. ``values`` and ``shapes`` are the data, as
    ``tf.RaggedTensor`` or ``torch.nested`` take them.

    Args:
        values: the elements of all samples in order, in one dimension, each sample in C order.
        shapes: int64 ``[n, ndim]`` with the shape of each sample, or the length of a byte string.
        is_bytes: whether the samples are byte strings.

    Example:
        >>> boxes = batch["boxes"]
        >>> boxes[0].shape, boxes.padded().shape
        ((3, 4), (32, 7, 4))
    """

    __slots__ = ("_starts", "is_bytes", "shapes", "values")

    def __init__(self, values: NDArray[Any], shapes: NDArray[np.int64], *, is_bytes: bool = False) -> None:
        self.values = values
        """The elements of all samples in order, in one dimension, each sample in C order."""
        self.shapes = shapes
        """The shape of each sample, or the length of a byte string, as int64 ``[n, ndim]``."""
        self.is_bytes = is_bytes
        """Whether the samples are byte strings."""
        self._starts: NDArray[np.int64] = np.zeros(len(shapes) + 1, dtype=np.int64)
        np.cumsum(np.prod(shapes, axis=1), out=self._starts[1:])
        if values.ndim != 1 or shapes.ndim != 2 or len(values) != self._starts[-1]:
            raise ValueError(f"{values.shape} values for shapes that ask {self._starts[-1]}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of every sample, which is uint8 for byte strings."""
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
        """Return a copy of the samples at these positions, in this order.

        Args:
            positions: the index of each sample.
        """
        rows = np.asarray(positions, dtype=np.int64)
        spans = zip(self._starts[:-1][rows].tolist(), self._starts[1:][rows].tolist(), strict=True)
        parts = [self.values[start:stop] for start, stop in spans]
        values = np.concatenate(parts) if parts else self.values[:0].copy()
        return Ragged(values, self.shapes[rows], is_bytes=self.is_bytes)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return a copy of the samples of all parts, in order. One part is returned itself.

        Args:
            parts: at least one Ragged, all of one dtype.
        """
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
