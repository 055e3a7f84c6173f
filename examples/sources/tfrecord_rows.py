"""The records of a TFRecord file as a dataset.

`penstock produce dataset tfrecord_rows:train --transform tfrecord_rows:to_sample`

TensorFlow reads such files from front to back. One pass over the lengths makes every record readable by its number.
TensorFlow's own reader verifies both checksums of a record, so a damaged record is a bad sample.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io.tf_record import tf_record_random_reader

PATH = "train.tfrecord"
_HEAD, _FOOT = 12, 4
"""Bytes around a record: before it, its length and the checksum of the length, and after it, its own checksum."""


class Records:
    """The records by number, as bytes."""

    def __init__(self, path: str) -> None:
        self._reader = tf_record_random_reader(path)
        self._starts: list[int] = []
        with Path(path).open("rb") as file:
            at, end = 0, os.fstat(file.fileno()).st_size
            while at < end:
                self._starts.append(at)
                length = int.from_bytes(os.pread(file.fileno(), 8, at), "little")
                at += _HEAD + length + _FOOT
            if at != end and file.read(2) == b"\x1f\x8b":
                raise ValueError(f"{path} is compressed (gzip), so it has no records by number; unpack it with gunzip")
            if at != end:
                raise ValueError(f"{path} is cut off or damaged, in record {len(self._starts) - 1} or before it")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> bytes:
        record: bytes = self._reader.read(self._starts[index])[0]
        return record


def train() -> Records:
    """Return the dataset that the command names."""
    return Records(PATH)


def to_sample(record: bytes) -> dict[str, object]:
    """Return the features of a `tf.train.Example`: here an image as raw bytes, and a label."""
    feature = tf.train.Example.FromString(record).features.feature
    pixels = np.frombuffer(feature["image"].bytes_list.value[0], np.uint8)
    return {"x": pixels.reshape(8, 8), "y": np.int64(feature["label"].int64_list.value[0])}
