"""A Hugging Face dataset: `penstock produce dataset hf_rows:train --transform hf_rows:to_sample`.

It has a length and items already. A dataset on disk is memory-mapped, so every worker may open it.
"""

from __future__ import annotations

import datasets
import numpy as np

PATH = "train"


def train() -> datasets.Dataset:
    """Return the dataset that `Dataset.save_to_disk` wrote.

    `datasets.load_dataset("mnist", split="train")` works as well.
    """
    return datasets.load_from_disk(PATH)


def to_sample(row: dict[str, object]) -> dict[str, object]:
    """Return a row as a sample. Rows are plain Python, so images become arrays here, and texts bytes."""
    return {"x": np.asarray(row["image"], np.uint8), "y": row["label"], "text": row["text"]}
