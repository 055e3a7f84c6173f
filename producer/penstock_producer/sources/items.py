"""Items of any Python type, and batches of them, as samples: a dict of tensors by name.

Only the kinds of values are checked here. The writer compares dtypes and shapes with the stream's spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock_common.errors import SampleError, SpecMismatch
from penstock_common.wire.dtypes import wire_name
from penstock_common.wire.spec import UnlikeParts, as_array, flattened
from penstock_producer.sources.names import blame
from penstock_producer.sources.protocol import Sample

TUPLE_NAMES = ("x", "y", "w")
"""The names of a tuple's parts, as in Keras: inputs, targets, sample weights."""


def as_sample(item: Any, key: str) -> Sample:
    """Return an item as a sample.

    Args:
        item: a dict of tensors, a named tuple, a tuple (x, y, w), or one value, which becomes ``x``. A dict inside
            gives tensors below its name, such as ``y/boxes``.
        key: the sample's name, for the error.

    Raises:
        SampleError: a value is not a number, text, bytes or array, or a tuple is too long.

    Example:
        >>> as_sample(([1.0, 2.0], 3), "data[0]")
        {'x': [1.0, 2.0], 'y': 3}
    """
    named = by_name(item, key)
    if not named:
        raise SampleError(f"{key}: an empty sample; expected at least one tensor")
    return {str(name): _value(name, value, key) for name, value in flat(named, key).items()}


def flat(named: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    """Return the tensors with nested dicts flattened, as in ``y/boxes``. Raises SampleError where two get one name."""
    try:
        return flattened(named)
    except SpecMismatch as error:
        raise SampleError(f"{key}: {error}") from None


def by_name(item: Any, key: str) -> Mapping[Any, Any]:
    """Return an item's parts by name. Raises SampleError for a tuple that is too long."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple):
        if hasattr(item, "_asdict"):
            return item._asdict()  # type: ignore[no-any-return]
        if len(item) > len(TUPLE_NAMES):
            raise SampleError(
                f"{key}: a tuple of {len(item)}; expected (x,), (x, y) or (x, y, w), or a dict of tensors"
            )
        return dict(zip(TUPLE_NAMES, item, strict=False))
    return {"x": item}


def _value(name: Any, value: Any, key: str) -> Any:
    """Check a value. Python's numbers and lists stay as they are, because the writer may widen them to the spec."""
    if isinstance(value, (bool, int, float, complex, bytes, bytearray, memoryview)):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        array = as_array(value)
    except UnlikeParts as error:
        raise SampleError(f"{key}: tensor {name!r} is {error}") from None
    except Exception as error:
        kind = type(value).__name__
        if isinstance(value, (list, tuple)) and isinstance(error, ValueError):  # numpy's, of ragged parts
            raise SampleError(
                f"{key}: tensor {name!r} is a {kind} of {len(value)} parts that differ in shape; expected one array: "
                f"pad them, or name them, as {{'a': ..., 'b': ...}}, which gives tensors {name}/a and {name}/b"
            ) from error
        raise SampleError(f"{key}: tensor {name!r}, a {kind}, is no array: {blame(error)}") from error
    if wire_name(array.dtype) is None:
        raise SampleError(
            f"{key}: tensor {name!r} is a {type(value).__name__} ({array.dtype}); expected numbers, an array or bytes: "
            "have the dataset or the transform give them, or leave it out there"
        )
    return value if isinstance(value, list) else array


def batch_tensors(batch: Any, key: str) -> dict[str, Any]:
    """Return the tensors of a batch by name.

    Args:
        batch: a dict of tensors, or a tuple (x, y, w). Parts in a dict keep their names. Parts in a list become
            ``x0``, ``x1`` and so on.
        key: the batch's name, for the error.

    Raises:
        SampleError: the batch has more than three parts, or two of its tensors have one name.
    """
    parts = batch if isinstance(batch, Mapping) else None
    if parts is None:
        values = batch if isinstance(batch, (tuple, list)) else (batch,)
        if len(values) > len(TUPLE_NAMES):
            raise SampleError(f"{key}: a batch of {len(values)} parts; expected (x, y), (x, y, w) or a dict")
        parts = dict(zip(TUPLE_NAMES, values, strict=False))
    tensors: dict[str, Any] = {}
    for name, value in parts.items():
        if value is None:
            continue
        for inner, tensor in _flat(str(name), value):
            if inner in tensors:
                raise SampleError(f"{key}: two tensors are named {inner!r}")
            try:
                tensors[inner] = tensor if _is_texts(tensor) else as_array(tensor)
            except UnlikeParts as error:
                raise SampleError(f"{key}: tensor {inner!r} is {error}") from None
    return tensors


def row_count(batch: Mapping[str, Any], key: str) -> int:
    """Return how many samples a batch holds. Raises SampleError where its tensors disagree."""
    counts = {
        name: len(values) if isinstance(values, list) or np.ndim(values) else None for name, values in batch.items()
    }
    if len(set(counts.values())) != 1 or None in counts.values():
        raise SampleError(f"{key}: tensors disagree on the number of samples: {counts}")
    return next(iter(counts.values())) or 0


def _is_texts(value: Any) -> bool:
    """Tell whether a value is a list of bytes, which an array would fill up to the longest."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], bytes)


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(inner), tensor) for inner, tensor in value.items()]
    if isinstance(value, (tuple, list)) and value and hasattr(value[0], "shape") and len(value[0].shape):
        return [(f"{name}{number}", tensor) for number, tensor in enumerate(value)]
    return [(name, value)]
