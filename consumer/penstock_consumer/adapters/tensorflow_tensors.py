"""Batches as flat tensors that ``tf.data`` takes from Python, and back. Which, and when, is ``tensorflow``'s."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from penstock_common.wire.dtypes import BYTES
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import TensorSpec

RaggedAs = Literal["ragged", "padded"]


def is_composite(tensor: TensorSpec, ragged: RaggedAs) -> bool:
    """Return whether it becomes a ``tf.RaggedTensor``, which Python cannot give in one piece."""
    return ragged == "ragged" and tensor.is_ragged and tensor.dtype != BYTES


def flat_spec(tensor: TensorSpec, rows: int | None, ragged: RaggedAs) -> Any:
    """Return the spec of what `flat_value` gives, for batches of ``rows`` (None: any number)."""
    dtype = tf.string if tensor.dtype == BYTES else tf.as_dtype(tensor.dtype)
    if not is_composite(tensor, ragged):
        return tf.TensorSpec((rows, *tensor.shape), dtype)
    levels = _levels(tensor)
    splits = (tf.TensorSpec((None,), tf.int64),) * levels
    return (tf.TensorSpec((None, *tensor.shape[levels:]), dtype), *splits)


def flat_value(tensor: TensorSpec, value: Any, ragged: RaggedAs) -> Any:
    """An array ``[n, *shape]``; of bytes an array of n objects; of a ragged tensor its values and row splits."""
    if not tensor.is_ragged:
        return value
    if tensor.dtype == BYTES:
        strings = np.empty(len(value), dtype=object)
        strings[:] = list(value)
        return strings
    return _flat_ragged(tensor, value) if ragged == "ragged" else value.padded()


def assembled(tensor: TensorSpec, part: Any, rows: int | None) -> Any:
    """The tensor of a `flat_value`; in the graph."""
    if not isinstance(part, tuple):
        return part
    values, *splits = part
    for level in reversed(range(len(splits))):
        if level == 0 and rows is not None:
            splits[0] = tf.ensure_shape(splits[0], (rows + 1,))
        size = tensor.shape[level]
        if size is None:
            values = tf.RaggedTensor.from_row_splits(values, splits[level], validate=False)
        else:
            count = tf.shape(splits[level], tf.int64)[0] - 1
            values = tf.RaggedTensor.from_uniform_row_length(values, size, nrows=count, validate=False)
    return values


def _levels(tensor: TensorSpec) -> int:
    """Dimensions of a sample up to the last one that differs."""
    return max(position for position, dim in enumerate(tensor.shape) if dim is None) + 1


def _flat_ragged(tensor: TensorSpec, value: Ragged) -> tuple[Any, ...]:
    """Values with the uniform inner dimensions, and where each row of each outer dimension ends."""
    levels = _levels(tensor)
    splits, rows = [], np.ones(len(value), dtype=np.int64)
    for level in range(levels):
        lengths = np.repeat(value.shapes[:, level], rows)
        splits.append(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        rows = rows * value.shapes[:, level]
    inner = tensor.shape[levels:]
    return (value.values.reshape(int(rows.sum()), *inner), *splits)
