"""The demo's transform: what a paper would call a light augmentation, and what a CPU calls about 5 ms of Python.

A random affine map, an elastic distortion, and sensor noise, at a larger size that is then reduced again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

WORK = 200
"""Side of the enlarged image in pixels: this is what makes it 5 ms on a 2.5 GHz core."""
DEGREES, ZOOM, SHIFT, WARP, NOISE = 10.0, 0.08, 0.04, 0.01, 0.03
"""Largest rotation; zoom, shift and warp as parts of the side; noise as a part of full brightness."""

Array = NDArray[np.float32]


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """No augmentation, only the same form: ``x`` float32 [32, 32, 1] in 0..1. For the held-out images."""
    return {"x": sample["x"].astype(np.float32) / 255, "y": sample["y"]}


def augment(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A new variant of an image ``x`` uint8 [32, 32, 1]; ``y`` stays."""
    image = Image.fromarray(sample["x"][:, :, 0])
    large = np.asarray(image.resize((WORK, WORK), Image.Resampling.BICUBIC), dtype=np.float32)
    warped = _sampled(large, *_coordinates(rng))
    warped += rng.normal(0, NOISE * 255, warped.shape).astype(np.float32)
    small = Image.fromarray(warped).resize(image.size, Image.Resampling.BOX)
    return {"x": np.clip(np.asarray(small)[:, :, None] / 255, 0, 1).astype(np.float32), "y": sample["y"]}


def _coordinates(rng: np.random.Generator) -> tuple[Array, Array]:
    """Where each pixel of the result comes from: an affine map plus a smooth random displacement."""
    rows, columns = np.mgrid[0:WORK, 0:WORK].astype(np.float32) - WORK / 2
    angle = np.deg2rad(rng.uniform(-DEGREES, DEGREES))
    zoom = 1 + rng.uniform(-ZOOM, ZOOM, 2)
    down, right = rng.uniform(-SHIFT, SHIFT, 2) * WORK
    y = (np.cos(angle) * rows - np.sin(angle) * columns) * zoom[0] + down + WORK / 2
    x = (np.sin(angle) * rows + np.cos(angle) * columns) * zoom[1] + right + WORK / 2
    return y.astype(np.float32) + _smooth_noise(rng), x.astype(np.float32) + _smooth_noise(rng)


def _smooth_noise(rng: np.random.Generator) -> Array:
    """Displacements in pixels: noise, blurred until neighbours move together."""
    noise = Image.fromarray(rng.integers(0, 256, (WORK, WORK), dtype=np.uint8))
    blurred = np.asarray(noise.filter(ImageFilter.GaussianBlur(WORK / 12)), dtype=np.float32)
    blurred -= blurred.mean()
    spread = float(blurred.std()) or 1.0
    return blurred / np.float32(spread) * np.float32(WARP * WORK)


def _sampled(image: Array, y: Array, x: Array) -> Array:
    """Bilinear interpolation; outside is the edge."""
    y, x = np.clip(y, 0, WORK - 1.001), np.clip(x, 0, WORK - 1.001)
    top, left = y.astype(np.int32), x.astype(np.int32)
    dy, dx = y - top, x - left
    upper = image[top, left] * (1 - dx) + image[top, left + 1] * dx
    lower = image[top + 1, left] * (1 - dx) + image[top + 1, left + 1] * dx
    result: Array = upper * (1 - dy) + lower * dy
    return result
