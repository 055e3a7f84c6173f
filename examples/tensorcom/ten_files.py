"""Files of tensorcom as a dataset, `penstock produce dataset ten_files:train`, and a stream as such files again.

A file holds the arrays of one batch, such as images and labels: `tenbin.save("train/000000.ten", xs, ys)`. Run
`python ten_files.py STREAM FOLDER` to write an epoch of a stream as files.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from tensorcom import tenbin

import penstock

PATTERN = "train/*.ten"
NAMES = ("x", "y")
"""The tensors' names, in the order of the arrays in a file."""
BATCH = 64
WIDE = {"float64": np.float32, "int64": np.int32, "uint64": np.int32}
"""tensorcom sends no numbers of 64 bits unless asked to."""

load = lru_cache(maxsize=4)(tenbin.load)


class TenFiles:
    """The samples of all files, by number."""

    def __init__(self, pattern: str) -> None:
        self.files = sorted(str(path) for path in Path().glob(pattern))
        self.ends = list(accumulate(len(load(file)[0]) for file in self.files))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self.ends, index)
        row = index - (self.ends[number - 1] if number else 0)
        return {name: array[row] for name, array in zip(NAMES, load(self.files[number]), strict=True)}


def train() -> TenFiles:
    """Return the dataset. A worker calls this once."""
    return TenFiles(PATTERN)


def narrow(array: np.ndarray) -> np.ndarray:
    """Return an array that tensorcom takes."""
    return array.astype(WIDE[array.dtype.name]) if array.dtype.name in WIDE else array


def main(stream: str, folder: str) -> None:
    """Write epoch 0 of a stream as files."""
    Path(folder).mkdir()
    with penstock.Replay(stream, epoch=0, batch_size=BATCH) as replay:
        for number, batch in enumerate(replay):
            tenbin.save(f"{folder}/{number:06d}.ten", *(narrow(batch[name]) for name in NAMES))


if __name__ == "__main__":
    main(*sys.argv[1:])
