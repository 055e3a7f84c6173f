"""A folder of JPEGs as a torch user would have it: one object with a length and items, for every side of a comparison.

Files are 500 x 375, cut from scikit-learn's two photographs. Every reader of the object decodes with the same code.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 224
SAMPLE_BYTES = SIDE * SIDE * 3
FOLDER = "PENSTOCK_BENCH_PHOTOGRAPHS"
"""The environment variable with the folder of the files. Workers that are started elsewhere get it in their
environment.
"""
WARM_UP = 128
"""The files that are read before a clock starts."""


def cut_photographs(folder: Path, files: int) -> list[Path]:
    """Write ``files`` different JPEGs into a sub-folder."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photographs = load_sample_images().images
    (folder / "photo").mkdir()
    for number in range(files):
        whole = photographs[number % 2]
        top, left = rng.integers(whole.shape[0] - 374), rng.integers(whole.shape[1] - 499)
        Image.fromarray(whole[top : top + 375, left : left + 500]).save(
            folder / "photo" / f"{number:05}.jpg", quality=85
        )
    return sorted((folder / "photo").iterdir())


class Photographs:
    """``{"x": uint8 [224, 224, 3], "y": int}`` by index: a random part of the photograph, resized, mirrored or not."""

    def __init__(self, paths: Sequence[Path | str]) -> None:
        self.paths = [str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Image.open(self.paths[index]) as image:
            part = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, _random_box(*image.size))
        if random.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return {"x": np.array(part), "y": index % 2}


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a box of a quarter to all of the area, with sides of at most 3 to 4.

    It is torchvision's random-resized crop, but not as small.
    """
    area, ratio = width * height * random.uniform(0.25, 1.0), math.exp(random.uniform(-0.28, 0.28))
    across, down = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = random.uniform(0, width - across), random.uniform(0, height - down)
    return left, top, left + across, top + down


def photographs() -> Photographs:
    """Return all photographs."""
    return Photographs(sorted(Path(os.environ[FOLDER]).glob("photo/*.jpg")))


def warm_up() -> Photographs:
    """Return the first few photographs."""
    return Photographs(sorted(Path(os.environ[FOLDER]).glob("photo/*.jpg"))[:WARM_UP])


class Ready(Photographs):
    """Samples of the same number and size, which need no decoding."""

    _sample = np.zeros((SIDE, SIDE, 3), np.uint8)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self._sample, "y": index % 2}


def ready() -> Ready:
    """Return a ready sample for each file."""
    return Ready(photographs().paths)
