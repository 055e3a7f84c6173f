"""Which part of an image a random-resized crop takes: a pure function of the image's size and of random numbers."""

from __future__ import annotations

import math

import numpy as np

AREA = (0.08, 1.0)
"""Part of the image's area; torchvision's defaults, which are those of Inception's training."""
ASPECT = (3 / 4, 4 / 3)
"""Width by height, evenly over its logarithm."""
_TRIES = 10

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


def random_box(height: int, width: int, rng: np.random.Generator) -> Box:
    """A box that lies in the image; after ten that do not fit, the largest central one of an allowed aspect."""
    low, high = (math.log(side) for side in ASPECT)
    for _ in range(_TRIES):
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * rng.random())
        aspect = math.exp(low + (high - low) * rng.random())
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return _central(height, width)


def _central(height: int, width: int) -> Box:
    w, h = width, height
    if width < height * ASPECT[0]:
        h = max(1, round(width / ASPECT[0]))
    elif width > height * ASPECT[1]:
        w = max(1, round(height * ASPECT[1]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
