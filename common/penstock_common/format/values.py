"""What users write (arrays, numbers, lists, bytes) as arrays, without ever changing a value in silence.

Which dtype and shape a tensor has is ``spec``'s to say; this only converts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SpecMismatch
from penstock_common.format.dtypes import BFLOAT16, numpy_dtype

_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
"""Kinds of number a Python value may be widened along: True -> 1 -> 1.0 -> 1+0j, never back."""
_PYTHON = (bool, int, float, complex, list, tuple)


def is_masked(array: NDArray[Any]) -> bool:
    """Whether some of its values are none. (numpy loads what it needs to know that at its first use, in 20 ms.)"""
    return type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray)


def as_array(value: Any) -> NDArray[Any]:
    """Return what numpy makes of a value, and of torch's bfloat16, which torch does not hand to numpy, the same bits.

    Raises ValueError, TypeError or RuntimeError for a value that is no array.
    """
    try:
        return np.asarray(value)
    except TypeError:
        torch = sys.modules.get("torch")  # whoever has a tensor has imported it
        if torch is None or getattr(value, "dtype", None) is not torch.bfloat16:
            raise
        return np.asarray(value.view(torch.int16)).view(numpy_dtype(BFLOAT16))


def array_of(tensor: str, value: Any, dtype_name: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """The value as an array; its dtype still has to be compared with the tensor's.

    Python numbers and lists take the tensor's dtype if it holds them (floats are rounded to it, as numpy does; integers
    must be exact). Arrays, numpy scalars and all else that numpy reads (torch, PIL) keep the dtype they have.
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
    if found.size == 0:  # an empty list has no dtype of its own, and [] is no boxes whatever a box is
        empty = tuple(dim or 0 for dim in shape) if found.shape == (0,) and shape[:1] == (None,) else found.shape
        return np.empty(empty, numpy_dtype(dtype_name))
    return _widened(tensor, value, found, dtype_name)


def _widened(tensor: str, value: Any, found: NDArray[Any], dtype_name: str) -> NDArray[Any]:
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
    """Whether no integer changed and nothing finite became infinite."""
    if found.dtype.kind not in "biu":
        return bool((np.isfinite(wanted) | ~np.isfinite(found)).all())
    if wanted.dtype.kind in "iu":
        info = np.iinfo(wanted.dtype)
        return int(found.min()) >= info.min and int(found.max()) <= info.max
    if wanted.dtype.kind == "b":
        return True
    # Python integers compare exactly, where a cast back would saturate or wrap
    real = (wanted.real if wanted.dtype.kind == "c" else wanted).astype(np.float64).ravel()
    return bool(np.isfinite(real).all()) and [int(number) for number in real.tolist()] == found.ravel().tolist()


def bytes_array(tensor: str, value: Any) -> NDArray[np.uint8]:
    """A byte string as uint8 of its length, without a copy where its memory is contiguous."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        hint = "encode text first: value.encode()" if isinstance(value, str) else ""
        raise SpecMismatch(tensor, f"a {type(value).__name__}", "bytes", hint)
    if isinstance(value, memoryview) and not value.c_contiguous:
        value = value.tobytes()
    return np.frombuffer(value, dtype=np.uint8)
