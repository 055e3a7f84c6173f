"""A CSV file as a dataset: `penstock produce dataset csv_rows:train`. All columns are numbers, and the last one is the
class.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

PATH = "train.csv"


def train() -> dict[str, np.ndarray]:
    """Return arrays of equal length, which are a dataset. Samples may be balanced and split by `y`."""
    with Path(PATH).open(newline="") as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    table = np.array(rows, np.float32)
    return {"x": table[:, :-1], "y": table[:, -1].astype(np.int64)}
