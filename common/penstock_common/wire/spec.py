"""Specs: a stream's tensor names, dtypes and sample shapes, and the check of samples against them.

The canonical form of a value is an array of the tensor's dtype, little-endian and in C order. Users' values (arrays,
numbers, lists, bytes) become arrays here, and none is changed silently.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadSpec, SpecMismatch, TooLarge
from penstock_common.hints import an, not_a_sample, unknown_tensor
from penstock_common.wire.dtypes import BFLOAT16, BYTES, NAMES, dtype_name, item_size, numpy_dtype, wire_name
from penstock_common.wire.limits import MAX_FIELD_BYTES, MAX_NDIM, MAX_TENSORS

_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
"""A Python number may be converted to a kind of the same or a higher rank: True -> 1 -> 1.0 -> 1+0j."""
_PYTHON = (bool, int, float, complex, list, tuple)
_NUMBERS = frozenset({bool, int, float, complex})


class UnlikeParts(TypeError):
    """A list whose parts numpy would convert to one dtype."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(f"{found}, expected {expected}")


def is_masked(array: NDArray[Any]) -> bool:
    """Return whether it is a numpy masked array. (np.ma takes 20 ms to import, so plain arrays are not asked.)"""
    return type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray)


def as_array(value: Any) -> NDArray[Any]:
    """Return a value as a numpy array; torch's bfloat16, which torch does not convert, by its bits.

    Raises UnlikeParts for a list of unlike values, and ValueError, TypeError or RuntimeError for a value that is not an
    array.
    """
    try:
        array = np.asarray(value)
        if isinstance(value, (list, tuple)) and array.dtype.kind in "iufc":
            _require_like_parts(value, array)
        return array
    except UnlikeParts:
        raise
    except TypeError:
        torch = sys.modules.get("torch")  # a tensor's owner has imported torch
        if torch is None or getattr(value, "dtype", None) is not torch.bfloat16:
            raise
        return np.asarray(value.view(torch.int16)).view(numpy_dtype(BFLOAT16))


def _require_like_parts(value: list[Any] | tuple[Any, ...], array: NDArray[Any]) -> None:
    """Raise UnlikeParts if numpy gave the parts of a list one dtype that some of them do not have.

    Python's numbers have no dtype. They may become what numpy makes of them if no integer changes.
    """
    kinds = _kinds(value)
    a_list_of = f"a {type(value).__name__} of"
    dtypes = sorted(kind for kind in kinds if isinstance(kind, str))
    if dtypes and array.dtype.kind in "fc" and dtypes[0].startswith(("int", "uint")) and not kinds.isdisjoint(_NUMBERS):
        dtypes.append("Python float")
    if len(dtypes) > 1:
        raise UnlikeParts(
            f"{a_list_of} values of {', '.join(dtypes[:-1])} and {dtypes[-1]}",
            "one dtype: name the parts, in a dict or a tuple, or convert them, as with .astype('float32')",
        )
    if int in kinds and array.dtype.kind in "fc":
        for found, given in zip(array.real.flat, np.asarray(value, dtype=object).flat, strict=False):
            if isinstance(given, int) and int(found) != given:
                raise UnlikeParts(
                    f"{a_list_of} integers and other numbers, of which {array.dtype} cannot hold {given}",
                    "numbers of one kind: name the parts, in a dict or a tuple",
                )


def _kinds(parts: list[Any] | tuple[Any, ...]) -> set[Any]:
    """Return the names of the dtypes of the parts, at any depth, and the types of those that have none."""
    types: set[Any] = set(map(type, parts))
    if types <= _NUMBERS:  # most lists, so no part is looked at
        return types
    kinds: set[Any] = set()
    for part in parts:
        if isinstance(part, (list, tuple)):
            kinds |= _kinds(part)
        else:
            dtype = getattr(part, "dtype", None)
            kinds.add(type(part) if dtype is None else str(dtype).removeprefix("torch."))
    return kinds


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
    except UnlikeParts as error:
        raise SpecMismatch(tensor, error.found, error.expected) from None
    except (ValueError, TypeError, RuntimeError) as error:
        text = f"a {type(value).__name__} that is no array ({str(error)[:80]})"
        raise SpecMismatch(tensor, text, f"{dtype_name} of shape {shape}") from None
    if isinstance(value, np.generic) or not isinstance(value, _PYTHON):
        return found
    if found.size == 0:  # an empty list has no dtype, and [] means no boxes, whatever the shape of a box
        empty = tuple(dim or 0 for dim in shape) if found.shape == (0,) and shape[:1] == (None,) else found.shape
        return np.empty(empty, numpy_dtype(dtype_name))
    return _converted(tensor, value, found, dtype_name)


def _converted(tensor: str, value: Any, found: NDArray[Any], dtype_name: str) -> NDArray[Any]:
    dtype = numpy_dtype(dtype_name)
    if found.dtype.kind == "O" and all(isinstance(one, int) for one in found.flat):  # beyond 64 bits
        can = f"a value {dtype_name} can hold" if dtype.kind in "biu" else "a float, because integers have 64 bits"
        raise SpecMismatch(tensor, f"{value!r:.40}", can)
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


META = "meta"
META_FIELD = META.encode()
"""The field of an entry that holds its header."""
SHAPES_SUFFIX = ".shapes"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}\Z")

SpecLike = Mapping[str, tuple[str, tuple[int | None, ...]]]


def flattened(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sample whose nested dicts are tensors named ``a/b``: the same object where it has none.

    An empty dict stays, so that it is refused as a value. Raises SpecMismatch if two tensors get one name, and
    TypeError for a value that is not a dict.
    """
    if not isinstance(sample, Mapping):
        raise TypeError(not_a_sample(sample))
    if not any(isinstance(value, Mapping) for value in sample.values()):
        return sample
    found: dict[str, Any] = {}
    for name, value in sample.items():
        below = flattened(value) if isinstance(value, Mapping) else {}
        for inner, part in {f"{name}/{inner}": part for inner, part in below.items()}.items() or [(name, value)]:
            if inner in found:
                raise SpecMismatch(inner, "two of that name", "one")
            found[inner] = part
    return found


def _named_by_numpy(dtype: str) -> str:
    """Return the name of a dtype that numpy knows by other words too, such as 'f4', or '' if it cannot travel."""
    with suppress(TypeError, ValueError):
        name = np.dtype(dtype).name if dtype else ""
        return name if name in NAMES else ""
    return ""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a sample."""

    name: str
    dtype: str
    """A name from the table in ``dtypes``."""
    shape: tuple[int | None, ...]
    """The shape of one sample, without the batch dimension. None is a size that differs between samples."""
    is_ragged: bool = field(init=False, repr=False, compare=False)
    """Whether samples differ in size, so that each has its own shape. True for bytes."""
    sample_bytes: int = field(init=False, repr=False, compare=False)
    """The bytes of one sample of a tensor that is not ragged."""

    def __post_init__(self) -> None:
        name, shape = self.name, self.shape
        if type(name) is not str or not _NAME.match(name) or name == META or name.endswith(SHAPES_SUFFIX):
            raise BadSpec(
                f"tensor name {name!r:.140} is not allowed: use letters, digits, '_', '.', '/', '-' (at most 128, the "
                f"first a letter, digit or '_'); {META!r} and names ending in {SHAPES_SUFFIX!r} are reserved"
            )
        if self.dtype not in NAMES:
            meant = _named_by_numpy(self.dtype)
            hint = f"; write {meant!r}" if meant else ""
            raise BadSpec(f"tensor {name!r}: dtype {self.dtype!r:.40} cannot travel; one of {', '.join(NAMES)}{hint}")
        if len(shape) > MAX_NDIM or any(d is not None and (type(d) is not int or d < 0) for d in shape):
            raise BadSpec(
                f"tensor {name!r}: shape {shape!r:.200} needs at most {MAX_NDIM} sizes, each None or an integer >= 0"
            )
        if self.extent(tuple(d or 1 for d in shape)) > MAX_FIELD_BYTES:
            raise BadSpec(f"tensor {name!r}: one sample of shape {shape} is over the limit of {MAX_FIELD_BYTES} bytes")
        if self.dtype == BYTES and shape != ():
            raise BadSpec(f"tensor {name!r}: bytes has shape (), found {shape}")
        # computed once, because every block needs it
        object.__setattr__(self, "is_ragged", self.dtype == BYTES or None in shape)
        object.__setattr__(self, "sample_bytes", item_size(self.dtype) * prod(dim or 0 for dim in shape))

    def __str__(self) -> str:
        sizes = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.dtype}{f'[{sizes}]' if self.shape else ''}"

    @property
    def wire_ndim(self) -> int:
        """The number of sizes that the wire records for a ragged sample: 1, the length, for bytes."""
        return 1 if self.dtype == BYTES else len(self.shape)

    def extent(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a sample of this shape, empty dimensions counted as 1, for MAX_FIELD_BYTES."""
        return item_size(self.dtype) * prod(dim or 1 for dim in shape)

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a sample of this shape fits; for bytes the shape is ``(length,)``."""
        if self.dtype == BYTES:
            return len(shape) == 1 and shape[0] >= 0
        return len(shape) == len(self.shape) and all(
            d >= 0 if want is None else d == want for d, want in zip(shape, self.shape, strict=True)
        )

    def canonical(self, value: Any) -> NDArray[Any]:
        """Return one sample's value as a little-endian C-ordered array of this dtype and shape.

        Python numbers and lists are accepted where the dtype can hold them. An array must have this dtype, in either
        byte order. The result may share the value's memory. Bytes become uint8 ``[length]``.

        Raises:
            SpecMismatch: Names the tensor, what was found and what was expected.
            TooLarge: A ragged sample exceeds the limit of a field.
        """
        if self.dtype == BYTES:
            return self._bounded(bytes_array(self.name, value))
        array = array_of(self.name, value, self.dtype, self.shape)
        try:
            self.check(array.dtype, array.shape)
        except SpecMismatch:
            if array.dtype.hasobject and not isinstance(value, np.ndarray):
                raise SpecMismatch(self.name, an(value), f"dtype {self.dtype}", self._remedy(array.dtype)) from None
            raise
        # ascontiguousarray would turn () into (1,), which asarray does not
        return self._bounded(np.asarray(array, dtype=numpy_dtype(self.dtype), order="C"))

    def check(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Raise SpecMismatch unless a sample of this dtype (either byte order) and shape fits the tensor."""
        if wire_name(dtype) != self.dtype:
            raise SpecMismatch(self.name, f"dtype {dtype}", f"dtype {self.dtype}", self._remedy(dtype))
        if not self.admits(shape):
            if len(shape) == len(self.shape) + 1 and self.admits(shape[1:]):
                advice = "write_batch() writes a batch, one sample a row"
            elif len(shape) + 1 == len(self.shape) and self.shape[0] is None and shape == self.shape[1:]:
                advice = f"a spec is of one sample, without the dimension of the batch: {self.shape[1:]}"
            else:
                advice = "a size that differs is None in the spec"
            raise SpecMismatch(self.name, f"shape {shape}", f"shape {self.shape}", advice)

    def _remedy(self, found: np.dtype[Any]) -> str:
        if found.kind in "OUST":
            return "a tensor holds numbers: number the classes, or give the spec dtype 'bytes'"
        return f"convert it (`.astype({self.dtype!r})`)"

    def _bounded(self, array: NDArray[Any]) -> NDArray[Any]:
        if self.is_ragged and (size := self.extent(array.shape)) > MAX_FIELD_BYTES:
            raise TooLarge(f"tensor {self.name!r}: a sample of {size} bytes is over the limit of {MAX_FIELD_BYTES}")
        return array


@dataclass(frozen=True, slots=True)
class Spec:
    """The tensors of every sample of a stream, in wire order."""

    tensors: tuple[TensorSpec, ...]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Tensor names in wire order."""

    def __post_init__(self) -> None:
        names = tuple([tensor.name for tensor in self.tensors])
        if not 1 <= len(names) <= MAX_TENSORS or len(set(names)) != len(names):
            raise BadSpec(
                f"a sample has 1 to {MAX_TENSORS} tensors of different names, as in {{'x': ..., 'y': ...}}; "
                f"found {len(names)}: {list(names[:8])}"
            )
        object.__setattr__(self, "names", names)  # computed once, because every block needs it

    @classmethod
    def of(cls, spec: SpecLike) -> Spec:
        """Make a spec of its public form, ``{"x": ("uint8", (224, 224, 3)), "y": ("int64", ())}``. Raises BadSpec."""
        example = '{"x": ("uint8", (224, 224, 3)), "y": ("int64", ())}'
        if not isinstance(spec, Mapping):
            raise BadSpec(f"{spec!r:.120} is not a spec; one looks like {example}")
        tensors = []
        for name, form in spec.items():
            if isinstance(form, Mapping):
                inner = f"{name}/{next(iter(form), 'x')}"
                raise BadSpec(
                    f"tensor {name!r:.140} is a dict; a spec names each tensor by its path: write {inner!r:.140}"
                )
            try:
                dtype, shape = form
                parts = dtype_name(dtype), tuple(shape)
            except (TypeError, ValueError):
                raise BadSpec(f"tensor {name!r:.140}: {form!r:.120} is no dtype and shape, as in {example}") from None
            tensors.append(TensorSpec(name, *parts))
        return cls(tuple(tensors))

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Spec:
        """Return the spec of one sample: its own dtypes and shapes. Numbers are bool, int64, float64, complex128."""
        return cls(tuple(_inferred(name, value) for name, value in flattened(sample).items()))

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> TensorSpec:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(unknown_tensor(name, self.names))

    def as_json(self) -> dict[str, list[Any]]:
        """Return the JSON form, as the stream's meta stores it."""
        return {tensor.name: [tensor.dtype, list(tensor.shape)] for tensor in self.tensors}

    @classmethod
    def from_json(cls, value: Any) -> Spec:
        """Make a spec of the result of `as_json`. Raises BadSpec for anything else."""
        if not isinstance(value, Mapping):
            raise BadSpec(f"{value!r:.120} is not a spec in its JSON form")
        for name, form in value.items():
            if type(form) is not list or [type(part) for part in form] != [str, list]:
                raise BadSpec(f"tensor {name!r:.140}: {form!r:.120} is not [dtype, shape]")
        return cls.of({name: (dtype, tuple(shape)) for name, (dtype, shape) in value.items()})

    def __str__(self) -> str:
        return ", ".join(str(tensor) for tensor in self.tensors)

    def as_option(self) -> str:
        """Return the option of `penstock produce` and `penstock run` that declares this spec, for a shell."""
        return f"--spec {shlex.quote(json.dumps(self.as_json()))}"

    def widened(self, sample: Mapping[str, Any]) -> Spec:
        """Return the sample's spec, in which a size that differs from this spec's is free.

        A tensor that this spec lacks is free where its size is that of a free size: areas are as many as boxes. An
        empty list takes the other's dimensions, because it has none of its own.
        """
        values = flattened(sample)
        found = tuple(self._as_known(t, values[t.name]) for t in Spec.infer(values))
        known = {t.name: _widened(self[t.name], t, values[t.name]) for t in found if t.name in self.names}
        sizes = ((t.shape, known[t.name].shape) for t in found if t.name in known)
        free = {size for shape, kept in sizes for size, is_kept in zip(shape, kept, strict=False) if is_kept is None}
        return Spec(tuple(known.get(t.name) or _freed(t, free) for t in found))

    def _as_known(self, found: TensorSpec, value: Any) -> TensorSpec:
        """Return a sample's tensor. Python's numbers and lists take the dtype of this spec if it can hold them."""
        known = self[found.name] if found.name in self.names else found
        if not isinstance(value, _PYTHON) or BYTES in (known.dtype, found.dtype):
            return found
        try:
            array = array_of(known.name, value, known.dtype, known.shape)
        except SpecMismatch:
            return found
        return TensorSpec(known.name, wire_name(array.dtype) or found.dtype, array.shape)

    @property
    def rows(self) -> int:
        """The rows that this spec of a sample has if the sample was a batch; 0 if it does not look like one.

        In a batch all tensors have the same first size, and labels have no other. Tensors of one shape, such as
        tokens and their mask, are a sample.
        """
        first = {tensor.shape[0] if tensor.shape else None for tensor in self.tensors}
        sizes = {len(tensor.shape) for tensor in self.tensors}
        rows = first.pop() if len(first) == 1 and len(sizes) > 1 and min(sizes) == 1 else None
        return rows if rows and rows > 1 else 0

    def check_names(self, sample: Mapping[str, Any]) -> None:
        """Raise SpecMismatch unless the sample has exactly this spec's tensors."""
        for name in self.names:
            if name not in sample:
                there = ", ".join(map(str, sample)) or "nothing"
                raise SpecMismatch(
                    name,
                    "nothing",
                    f"a tensor, the spec being {self}",
                    f"the sample has {there}, and each sample needs every tensor",
                )
        for name in sample:
            if name not in self.names:
                raise SpecMismatch(name, "a tensor", f"none of that name, the spec being {self}")


def _widened(known: TensorSpec, found: TensorSpec, value: Any) -> TensorSpec:
    if isinstance(value, list) and (0,) in (known.shape, found.shape) and known.shape != found.shape:
        one = found if known.shape == (0,) else known
        return TensorSpec(known.name, one.dtype, (None, *one.shape[1:])) if one.shape else found
    if (known.dtype, len(known.shape)) != (found.dtype, len(found.shape)):
        return found
    sizes = zip(known.shape, found.shape, strict=True)
    return TensorSpec(known.name, known.dtype, tuple(one if one == other else None for one, other in sizes))


def _freed(found: TensorSpec, free: Set[int | None]) -> TensorSpec:
    return TensorSpec(found.name, found.dtype, tuple(None if size in free else size for size in found.shape))


def _inferred(name: str, value: Any) -> TensorSpec:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return TensorSpec(name, BYTES, ())
    try:
        array = as_array(value)
    except UnlikeParts as error:
        raise BadSpec(f"tensor {name!r} is {error}") from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadSpec(f"tensor {name!r}: {an(value)} is no array ({str(error)[:120]}); make it one, or bytes") from None
    dtype = wire_name(array.dtype)
    if dtype is None:
        hint = "encode text to bytes" if array.dtype.kind == "U" else "make it a numeric array or bytes"
        raise BadSpec(f"tensor {name!r}: {an(value)} ({array.dtype}) cannot travel; {hint}")
    return TensorSpec(name, dtype, array.shape)
