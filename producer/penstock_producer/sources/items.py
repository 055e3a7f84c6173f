"""Items of any Python type as samples: what passes through, how tuples are named, what cannot travel.

Checks kinds, not specs: dtypes and shapes are judged by the writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_common.errors import SampleError, SpecMismatch
from penstock_common.format.dtypes import wire_name
from penstock_common.format.spec import flattened
from penstock_common.format.values import as_array
from penstock_producer.sources.names import blame
from penstock_producer.sources.protocol import Sample

TUPLE_NAMES = ("x", "y", "w")
"""As in Keras: inputs, targets, sample weights."""


def as_sample(item: Any, key: str) -> Sample:
    """Return an item as a sample, or raise SampleError.

    A dict passes, a named tuple gives its fields, a tuple (x, y, w), anything else ``x``. A dict inside gives tensors
    below its name, such as ``y/boxes``.
    """
    named = by_name(item, key)
    if not named:
        raise SampleError(f"{key}: an empty sample; expected at least one tensor")
    return {str(name): _value(name, value, key) for name, value in flat(named, key).items()}


def flat(named: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    """Return tensors with those of nested dicts named like ``y/boxes``. Raises SampleError where two get one name."""
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
    """Numbers and lists stay Python's, so that the writer may widen them to the spec's dtype."""
    if isinstance(value, (bool, int, float, complex, bytes, bytearray, memoryview)):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        array = as_array(value)
    except Exception as error:
        raise SampleError(f"{key}: tensor {name!r}, a {type(value).__name__}, is no array: {blame(error)}") from error
    if wire_name(array.dtype) is None:
        raise SampleError(
            f"{key}: tensor {name!r} is a {type(value).__name__} ({array.dtype}); expected numbers, an array or bytes: "
            "give a transform that makes them"
        )
    return value if isinstance(value, list) else array
