"""scikit-learn's handwritten digits as folders of image files: one to train on, one held out for the accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 32
"""Pixels. The originals have 8 and are enlarged: a decoder then has something to do."""
ALL = 1797
HELD_OUT = 0.2
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("jpg", {"quality": 92}),
    ("png", {}),
    ("webp", {"quality": 92}),
)
"""Files take turns."""


@dataclass(frozen=True)
class Folders:
    """Where the images are, in one sub-folder per class."""

    train: Path
    held_out: Path
    train_count: int
    held_out_count: int


def write_digits(folder: Path, samples: int) -> Folders:
    """Writes the first ``samples`` of a fixed shuffle of the digits, every fifth into the held-out folder."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(images))[:samples]
    held_out = round(len(order) * HELD_OUT)
    places = (folder / "train", folder / "held-out")
    for position, index in enumerate(order.tolist()):
        place = places[position < held_out] / str(int(labels[index]))
        place.mkdir(parents=True, exist_ok=True)
        _write(images[index].reshape(8, 8), place, index, position)
    return Folders(*places, train_count=len(order) - held_out, held_out_count=held_out)


def _write(image: NDArray[Any], place: Path, index: int, position: int) -> None:
    from PIL import Image

    extension, options = FORMATS[position % len(FORMATS)]
    pixels = Image.fromarray((image * 15.9).astype(np.uint8))
    pixels.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(place / f"{index:04d}.{extension}", **options)
