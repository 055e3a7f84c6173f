"""The records of a TFRecord file as a dataset.

`penstock produce dataset tfrecord_rows:train --transform tfrecord_rows:to_sample`

TensorFlow reads such files from front to back. One pass over the lengths makes every record readable by its number.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import tensorflow as tf

PATH = "train.tfrecord"
_HEAD, _FOOT = 12, 4
"""Bytes around a record: before it, its length and the checksum of the length, and after it, its own checksum."""


class Records:
    """The records by number, as bytes."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._places: list[tuple[int, int]] = []
        at, end = 0, os.fstat(self._fd).st_size
        while at < end:
            (length,) = struct.unpack("<Q", os.pread(self._fd, 8, at))
            self._places.append((at + _HEAD, length))
            at += _HEAD + length + _FOOT
        if at != end:
            raise ValueError(f"{path} is cut off in record {len(self._places) - 1}")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> bytes:
        offset, length = self._places[index]
        return os.pread(self._fd, length, offset)


def train() -> Records:
    """Return the dataset that the command names."""
    return Records(PATH)


def to_sample(record: bytes) -> dict[str, object]:
    """Return the features of a `tf.train.Example`: here an image as raw bytes, and a label."""
    feature = tf.train.Example.FromString(record).features.feature
    pixels = np.frombuffer(feature["image"].bytes_list.value[0], np.uint8)
    return {"x": pixels.reshape(8, 8), "y": np.int64(feature["label"].int64_list.value[0])}
