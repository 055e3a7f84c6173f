"""The samples of the kept streams, by number: what is read must be this, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

SPEC = {"x": ("uint8", (2, 3)), "text": ("int32", (None,)), "y": ("int64", ())}
SAMPLE_BYTES = 30
"""About: the text has 0 to 4 numbers."""


def sample(number: int) -> dict[str, Any]:
    """The sample ``number``."""
    x = (number * np.array([[1, 3, 5], [7, 11, 13]]) % 251).astype(np.uint8)
    return {"x": x, "text": np.full(number % 5, number, np.int32), "y": number}


def numbers(batch: Mapping[str, Any]) -> list[int]:
    """The numbers of a batch's samples, after comparing every byte."""
    found = [int(number) for number in batch["y"]]
    for row, number in enumerate(found):
        whole = sample(number)
        for name in ("x", "text"):
            got = np.asarray(batch[name][row])
            assert got.tobytes() == whole[name].tobytes(), f"{name} of sample {number} is {got}"
            assert (got.dtype, got.shape) == (whole[name].dtype, whole[name].shape)
    return found
