"""A stream's spec: its tensors' names, dtypes and sample shapes, and the check of every sample against it.

Stores canonical arrays (little-endian, C order). Packing many samples is ``block``'s, bytes on the wire are ``wire``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadSpec, SpecMismatch
from penstock_common.format.dtypes import BYTES, NAMES, item_size, numpy_dtype, wire_name

META = "meta"
SHAPES_SUFFIX = ".shapes"
MAX_TENSORS = 256
MAX_NDIM = 32
"""numpy itself allowed 32 until 2.0; no field needs more."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}\Z")

_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
"""Kinds of number a Python value may be widened along: True -> 1 -> 1.0 -> 1+0j, never back."""

SpecLike = Mapping[str, tuple[str, tuple[int | None, ...]]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a sample."""

    name: str
    dtype: str
    """A name of the dtype table."""
    shape: tuple[int | None, ...]
    """Shape of one sample, without the batch dimension; None = ragged, differs between samples."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name) or self.name == META or self.name.endswith(SHAPES_SUFFIX):
            raise BadSpec(
                f"tensor name {self.name!r} is not allowed: use letters, digits, '_', '.', '/', '-' (at most 128); "
                f"{META!r} and names ending in {SHAPES_SUFFIX!r} are reserved"
            )
        if self.dtype not in NAMES:
            raise BadSpec(f"tensor {self.name!r}: dtype {self.dtype!r} cannot travel; one of {', '.join(NAMES)}")
        if len(self.shape) > MAX_NDIM or any(d is not None and (type(d) is not int or d < 0) for d in self.shape):
            raise BadSpec(f"tensor {self.name!r}: shape {self.shape} needs at most {MAX_NDIM} sizes, each None or >= 0")
        if self.dtype == BYTES and self.shape != ():
            raise BadSpec(f"tensor {self.name!r}: bytes has shape (), found {self.shape}")

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in size, so that each carries its own shape (always so for bytes)."""
        return self.dtype == BYTES or None in self.shape

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of a tensor that is not ragged."""
        size = item_size(self.dtype)
        for dim in self.shape:
            size *= dim or 0
        return size

    @property
    def wire_ndim(self) -> int:
        """Dimensions of a sample's shape as the wire records it for ragged tensors: bytes counts its length."""
        return 1 if self.dtype == BYTES else len(self.shape)

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether a sample of this shape fits (for bytes: ``(length,)``)."""
        if self.dtype == BYTES:
            return len(shape) == 1 and shape[0] >= 0
        return len(shape) == len(self.shape) and all(
            d >= 0 if want is None else d == want for d, want in zip(shape, self.shape, strict=True)
        )

    def canonical(self, value: Any) -> NDArray[Any]:
        """One sample's value as a little-endian C-ordered array of this dtype and shape (bytes: uint8 of its length).

        Python scalars and lists are taken where numpy can hold them without loss; an array must have the very dtype
        (either byte order). Raises SpecMismatch naming tensor, found and expected.
        """
        if self.dtype == BYTES:
            return self._canonical_bytes(value)
        array = value if isinstance(value, np.ndarray) else self._from_python(value)
        if wire_name(array.dtype) != self.dtype:
            raise SpecMismatch(self.name, f"dtype {array.dtype}", f"dtype {self.dtype}")
        if not self.admits(array.shape):
            raise SpecMismatch(self.name, f"shape {array.shape}", f"shape {self.shape}")
        # ascontiguousarray would turn () into (1,), which asarray does not
        return np.asarray(array, dtype=numpy_dtype(self.dtype), order="C")

    def _canonical_bytes(self, value: Any) -> NDArray[Any]:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise SpecMismatch(self.name, type(value).__name__, "bytes")
        return np.frombuffer(value, dtype=np.uint8)

    def _from_python(self, value: Any) -> NDArray[Any]:
        found = np.asarray(value)
        if isinstance(value, np.generic) or found.dtype.kind not in _RANK:
            return found  # a numpy scalar has a dtype of its own: no silent conversion; others fail the dtype check
        dtype = numpy_dtype(self.dtype)
        if _RANK[found.dtype.kind] > _RANK.get(dtype.kind, _RANK["f"]):  # bfloat16's kind is V
            return found
        with np.errstate(all="ignore"):
            wanted = found.astype(dtype)
        if found.dtype.kind in "biu" and not np.array_equal(wanted.astype(found.dtype), found):
            raise SpecMismatch(self.name, f"{value!r:.40}", f"a value {self.dtype} can hold")
        return wanted


@dataclass(frozen=True, slots=True)
class Spec:
    """The tensors of every sample of a stream, in wire order."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if not 1 <= len(names) <= MAX_TENSORS or len(set(names)) != len(names):
            raise BadSpec(f"a spec has 1 to {MAX_TENSORS} tensors of different names, found {names[:8]}")

    @classmethod
    def of(cls, spec: SpecLike) -> Spec:
        """From the public form ``{"x": ("uint8", (224, 224, 3)), "y": ("int64", ())}``."""
        return cls(tuple(TensorSpec(name, str(dtype), tuple(shape)) for name, (dtype, shape) in spec.items()))

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Spec:
        """The spec of one sample: exactly its dtypes and shapes; Python ints, floats, bools become int64, float64, bool."""
        tensors = []
        for name, value in sample.items():
            if isinstance(value, (bytes, bytearray, memoryview)):
                tensors.append(TensorSpec(name, BYTES, ()))
                continue
            array = np.asarray(value)
            dtype = wire_name(array.dtype)
            if dtype is None:
                raise BadSpec(
                    f"tensor {name!r}: a {type(value).__name__} ({array.dtype}) cannot travel; "
                    "make it a numeric array or bytes"
                )
            tensors.append(TensorSpec(name, dtype, array.shape))
        return cls(tuple(tensors))

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> TensorSpec:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in wire order."""
        return tuple(tensor.name for tensor in self.tensors)

    def as_json(self) -> dict[str, list[Any]]:
        """JSON form, as stored in the stream's meta."""
        return {tensor.name: [tensor.dtype, list(tensor.shape)] for tensor in self.tensors}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Spec:
        """Inverse of `as_json`; raises BadSpec on anything else."""
        try:
            return cls.of({str(name): (str(dtype), tuple(shape)) for name, (dtype, shape) in value.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise BadSpec(f"not a spec: {error}") from None

    def __str__(self) -> str:
        return ", ".join(
            f"{t.name}: {t.dtype}{'[' + ', '.join('?' if d is None else str(d) for d in t.shape) + ']' if t.shape else ''}"
            for t in self.tensors
        )

    def check_names(self, sample: Mapping[str, Any]) -> None:
        """Raises SpecMismatch unless the sample has exactly this spec's tensors."""
        for name in self.names:
            if name not in sample:
                raise SpecMismatch(name, "nothing", f"a tensor, the spec being {self}")
        for name in sample:
            if name not in self.names:
                raise SpecMismatch(name, "a tensor", f"none of that name, the spec being {self}")
