"""The example's transform, as a user would write it.

It rotates and moves each image and adds noise, with new random values in each epoch. It runs in the
workers: `penstock produce images ... --transform augment:augment`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

DEGREES, SHIFT, NOISE = 12.0, 2.5, 8.0
"""The largest rotation in degrees, the largest move in pixels, and the standard deviation of the noise in grey
levels.
"""


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a changed image of the same shape: ``x`` uint8 [H, W, 1].

    ``rng`` is seeded by epoch and sample, so a job that is repeated makes the same image.
    """
    image = Image.fromarray(sample["x"][..., 0])
    moved = image.rotate(
        rng.uniform(-DEGREES, DEGREES),
        Image.Resampling.BICUBIC,
        translate=tuple(rng.uniform(-SHIFT, SHIFT, 2)),
    )
    noisy = np.asarray(moved, np.float32) + rng.normal(0, NOISE, moved.size[::-1]).astype(np.float32)
    return {**sample, "x": noisy.clip(0, 255).astype(np.uint8)[..., None]}
