"""Users' values (arrays, numbers, lists, bytes) as arrays. No value is changed silently."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SpecMismatch
from penstock_common.format.dtypes import BFLOAT16, numpy_dtype

_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
"""A Python number may be converted to a kind of the same or a higher rank: True -> 1 -> 1.0 -> 1+0j."""
_PYTHON = (bool, int, float, complex, list, tuple)


def is_masked(array: NDArray[Any]) -> bool:
    """Return whether it is a numpy masked array. (np.ma takes 20 ms to import, so plain arrays are not asked.)"""
    return type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray)


def as_array(value: Any) -> NDArray[Any]:
    """Return a value as a numpy array; torch's bfloat16, which torch does not convert, by its bits.

    Raises ValueError, TypeError or RuntimeError for a value that is no array.
    """
    try:
        return np.asarray(value)
    except TypeError:
        torch = sys.modules.get("torch")  # a tensor's owner has imported torch
        if torch is None or getattr(value, "dtype", None) is not torch.bfloat16:
            raise
        return np.asarray(value.view(torch.int16)).view(numpy_dtype(BFLOAT16))


def array_of(tensor: str, value: Any, dtype_name: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return a value as an array, whose dtype the caller still compares with the tensor's.

    Python numbers and lists take the tensor's dtype if it can hold them: floats are rounded to it as numpy does,
    integers must be exact. Arrays, numpy scalars and other objects that numpy reads (torch, PIL) keep their dtype.

    Raises:
        SpecMismatch: The value is no array, is masked, or does not fit the dtype.
    """
    if isinstance(value, np.ndarray):
        if is_masked(value):
            raise SpecMismatch(tensor, "a masked array", "a plain array", "fill it first: value.filled(...)")
        return value
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value)) or "nothing"
        raise SpecMismatch(tensor, f"a dict of {names:.80}", f"{dtype_name} of shape {shape}")
    try:
        found = as_array(value)
    except (ValueError, TypeError, RuntimeError) as error:
        text = f"a {type(value).__name__} that is no array ({str(error)[:80]})"
        raise SpecMismatch(tensor, text, f"{dtype_name} of shape {shape}") from None
    if isinstance(value, np.generic) or not isinstance(value, _PYTHON):
        return found
    if found.size == 0:  # an empty list has no dtype, and [] means no boxes whatever a box's shape is
        empty = tuple(dim or 0 for dim in shape) if found.shape == (0,) and shape[:1] == (None,) else found.shape
        return np.empty(empty, numpy_dtype(dtype_name))
    return _converted(tensor, value, found, dtype_name)


def _converted(tensor: str, value: Any, found: NDArray[Any], dtype_name: str) -> NDArray[Any]:
    dtype = numpy_dtype(dtype_name)
    rank = _RANK.get(found.dtype.kind)
    if rank is None or rank > _RANK.get(dtype.kind, _RANK["f"]):  # bfloat16's kind is V
        return found
    with np.errstate(all="ignore"):
        wanted = found.astype(dtype)
    if not _holds(found, wanted):
        raise SpecMismatch(tensor, f"{value!r:.40}", f"a value {dtype_name} can hold")
    return wanted


def _holds(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Return whether no integer changed and no finite number became infinite."""
    if found.dtype.kind not in "biu":
        return bool((np.isfinite(wanted) | ~np.isfinite(found)).all())
    if wanted.dtype.kind in "iu":
        info = np.iinfo(wanted.dtype)
        return int(found.min()) >= info.min and int(found.max()) <= info.max
    if wanted.dtype.kind == "b":
        return True
    # compared as Python integers, because a cast back would saturate or overflow
    real = (wanted.real if wanted.dtype.kind == "c" else wanted).astype(np.float64).ravel()
    return bool(np.isfinite(real).all()) and [int(number) for number in real.tolist()] == found.ravel().tolist()


def bytes_array(tensor: str, value: Any) -> NDArray[np.uint8]:
    """Return a byte string as uint8 of its length, without a copy where its memory is contiguous."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        hint = "encode text first: value.encode()" if isinstance(value, str) else ""
        raise SpecMismatch(tensor, f"a {type(value).__name__}", "bytes", hint)
    if isinstance(value, memoryview) and not value.c_contiguous:
        value = value.tobytes()
    return np.frombuffer(value, dtype=np.uint8)
