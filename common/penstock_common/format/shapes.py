"""The shapes of ragged samples as an entry carries them, bounded before they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry
from penstock_common.format.dtypes import item_size
from penstock_common.format.limits import MAX_FIELD_BYTES
from penstock_common.format.spec import TensorSpec


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
