"""Columns of labels as tensors: the type and shape that hold all the rows, class ids for strings, ragged boxes.

Where the rows come from is ``labels``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SourceError

BOXES = ("boxes", "bboxes")
"""Columns of this name are float32 (None, 4): any number of boxes, none included."""


@dataclass(frozen=True)
class Column:
    """One tensor's values for all rows."""

    dtype: str
    shape: tuple[int | None, ...]
    """None where rows differ."""
    values: Sequence[NDArray[Any]] | NDArray[Any]
    classes: tuple[str, ...] | None
    """Names in id order where the rows were strings."""


def column(name: str, rows: Sequence[Any], where: str, classes: tuple[str, ...] | None = None) -> Column:
    """Whole numbers -> int64, others float32, bools bool, strings -> int64 ids, lists arrays. Raises SourceError."""
    plain = [row.tolist() if isinstance(row, (np.ndarray, np.generic)) else row for row in rows]
    kinds = {type(leaf) for row in plain for leaf in _leaves(row)}
    if kinds == {str}:
        classes = classes or tuple(sorted({leaf for row in plain for leaf in _leaves(row)}))
        ids = {text: number for number, text in enumerate(classes)}
        try:
            plain = [_mapped(row, ids) for row in plain]
        except KeyError as error:
            raise SourceError(f"{where}: {name!r} holds {error}, which is not among the classes {classes}") from None
        return Column("int64", *_arrays(name, plain, np.int64, where), classes)
    dtype = _number_dtype(name, kinds, where)
    return Column(dtype, *_arrays(name, plain, np.dtype(dtype).type, where), None)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _mapped(value: Any, ids: dict[str, int]) -> Any:
    return [_mapped(part, ids) for part in value] if isinstance(value, (list, tuple)) else ids[value]


def _number_dtype(name: str, kinds: set[type], where: str) -> str:
    if name in BOXES and kinds <= {int, float}:
        return "float32"
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    if kinds <= {int, float}:
        return "float32"
    found = " and ".join(sorted("a missing value" if kind is type(None) else kind.__name__ for kind in kinds))
    raise SourceError(f"{where}: {name!r} holds {found}; expected numbers only, strings only, or lists of them")


def _arrays(
    name: str, rows: list[Any], dtype: type, where: str
) -> tuple[tuple[int | None, ...], list[NDArray[Any]] | NDArray[Any]]:
    try:
        arrays: list[NDArray[Any]] = [np.asarray(row, dtype=dtype) for row in rows]
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{where}: {name!r}: {error}") from error
    ndim = max((a.ndim for a in arrays if a.size), default=2 if name in BOXES else arrays[0].ndim if arrays else 0)
    inner = next((a.shape[1:] for a in arrays if a.size), (4,) if name in BOXES else ())
    arrays = [np.zeros((0, *inner), dtype) if a.ndim and not a.size else a for a in arrays]
    if any(a.ndim != ndim for a in arrays):
        raise SourceError(f"{where}: {name!r} mixes values and lists; every row needs the same depth")
    shape = _shape(arrays, ndim)
    if name in BOXES:
        if shape[1:] != (4,):
            raise SourceError(f"{where}: {name!r} has rows of shape {shape}; expected lists of [x, y, width, height]")
        return (None, 4), arrays
    return shape, (arrays if None in shape else np.stack(arrays))


def _shape(arrays: list[NDArray[Any]], ndim: int) -> tuple[int | None, ...]:
    sizes = [{a.shape[axis] for a in arrays} for axis in range(ndim)]
    return tuple(next(iter(seen)) if len(seen) == 1 else None for seen in sizes)
