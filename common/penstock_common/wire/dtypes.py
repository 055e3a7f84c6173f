"""The table of dtypes that the wire carries, by name. Byte order and item sizes are defined here alone.

All are little-endian on the wire. The dtype ``bytes`` is special: each sample is a byte string of its own length.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from penstock_common.errors import BadSpec

_NUMPY = {
    "bool": "?",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
BOOL = "bool"
BYTES = "bytes"
BFLOAT16 = "bfloat16"
NAMES = (*_NUMPY, BFLOAT16, BYTES)
"""Every dtype name of wire format v1."""


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian numpy dtype of a wire dtype name: uint8 for ``bytes``. Raises BadSpec."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    if name == BFLOAT16:
        import ml_dtypes  # imported only where a stream carries bfloat16

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    if name == BYTES:
        return np.dtype("u1")
    raise BadSpec(f"dtype {name!r} cannot travel; the wire carries {', '.join(NAMES)}")


@cache
def item_size(name: str) -> int:
    """Return the bytes of one element."""
    return numpy_dtype(name).itemsize


def dtype_name(dtype: Any) -> str:
    """Return the wire name of a dtype as users give it: a name, ``bytes``, or a numpy dtype like ``np.float32``."""
    if isinstance(dtype, str):
        return dtype
    return BYTES if dtype is bytes else wire_name(np.dtype(dtype)) or str(dtype)


@lru_cache(maxsize=256)  # numpy composes a dtype's name again at each call, and every sample needs it
def wire_name(dtype: np.dtype[Any]) -> str | None:
    """Return the wire name of a numpy dtype of either byte order, or None for object, str and datetime."""
    if dtype.name == BFLOAT16:
        return BFLOAT16
    name = dtype.newbyteorder("=").name if dtype.kind in "iufcb" else ""
    return name if name in _NUMPY else None
