"""Random specs and samples of wire format v1, small ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock_common.wire.dtypes import BOOL, BYTES, NAMES, item_size, numpy_dtype
from penstock_common.wire.spec import META, SHAPES_SUFFIX, Spec, TensorSpec

Sample = dict[str, Any]

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,6}", fullmatch=True).filter(
    lambda name: name != META and not name.endswith(SHAPES_SUFFIX)
)
shapes = st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=3).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draw a spec of one to four tensors."""
    found = []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(NAMES))
        found.append(TensorSpec(name, dtype, () if dtype == BYTES else draw(shapes)))
    return Spec(tuple(found))


@st.composite
def values(draw: st.DrawFn, tensor: TensorSpec) -> Any:
    """Draw a value of the tensor: any bits, in any layout that an array may have."""
    if tensor.dtype == BYTES:
        return draw(st.binary(max_size=8))
    shape = tuple(draw(st.integers(0, 3)) if dim is None else dim for dim in tensor.shape)
    size = int(np.prod(shape)) * item_size(tensor.dtype)
    raw = draw(st.binary(min_size=size, max_size=size))
    if tensor.dtype == BOOL:
        raw = bytes(byte & 1 for byte in raw)
    array: NDArray[Any] = np.frombuffer(raw, np.uint8).view(numpy_dtype(tensor.dtype)).reshape(shape)
    layout = draw(st.sampled_from(["plain", "big-endian", "fortran", "strided"]))
    if layout == "big-endian" and array.dtype.kind in "iuf":  # a complex or bfloat16 cast may quieten a NaN
        return array.byteswap().view(array.dtype.newbyteorder(">"))
    if layout == "fortran":
        return np.asfortranarray(array) if array.ndim else array
    if layout == "strided" and array.ndim:
        wide = np.empty((*shape[:-1], shape[-1] * 2), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    return array


@st.composite
def samples(draw: st.DrawFn, spec: Spec, most: int = 5) -> list[Sample]:
    """Draw one to ``most`` samples of the spec."""
    count = draw(st.integers(1, most))
    return [{tensor.name: draw(values(tensor)) for tensor in spec} for _ in range(count)]


@st.composite
def holes(draw: st.DrawFn, first: int, count: int) -> list[int]:
    """Draw some dropped offsets among those of ``count`` samples."""
    dropped = draw(st.integers(0, 4))
    every = st.integers(first, first + count + dropped - 1)
    return sorted(draw(st.lists(every, min_size=dropped, max_size=dropped, unique=True)))
