"""The rows of a Parquet file as a dataset: `penstock produce dataset parquet_rows:train`.

Parquet is read by row groups. With shuffling, each worker keeps the last few of them decoded. Write the file with row
groups of some thousand rows, or produce with `--no-shuffle` and shuffle in the trainer.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import pyarrow.parquet

PATH = "train.parquet"
GROUPS_KEPT = 8


class Rows:
    """The rows of the whole file by number, each as a dict of numbers, texts and lists."""

    def __init__(self, path: str) -> None:
        self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        meta = self._file.metadata
        self._ends: list[int] = list(accumulate(meta.row_group(n).num_rows for n in range(meta.num_row_groups)))
        self._group = lru_cache(GROUPS_KEPT)(lambda n: self._file.read_row_group(n, use_threads=False))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, object]:
        group = bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        table = self._group(group)
        return {name: column[row].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}


def train() -> Rows:
    """Return the dataset that the command names."""
    return Rows(PATH)
