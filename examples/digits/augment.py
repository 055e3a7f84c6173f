"""The example's transform: what a user writes to have every image turned, moved and dirtied a little, anew each epoch.

Runs in the workers: `penstock produce images ... --transform augment:augment`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

DEGREES, SHIFT, NOISE = 12.0, 2.5, 8.0
"""Largest turn, largest move in pixels, standard deviation of the noise in grey levels."""


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """``x`` uint8 [H, W, 1] to the same; ``rng`` is seeded by epoch and sample: a retried job makes the same again."""
    image = Image.fromarray(sample["x"][..., 0])
    moved = image.rotate(
        rng.uniform(-DEGREES, DEGREES),
        Image.Resampling.BICUBIC,
        translate=tuple(rng.uniform(-SHIFT, SHIFT, 2)),
    )
    noisy = np.asarray(moved, np.float32) + rng.normal(0, NOISE, moved.size[::-1]).astype(np.float32)
    return {**sample, "x": noisy.clip(0, 255).astype(np.uint8)[..., None]}
