"""albumentations in the workers: a sample's augmentation depends on seed, epoch and sample alone, not on the worker.

penstock run images photos/ --resize 256x256 --transform augment:augment -- python train.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import albumentations as A  # noqa: N812 - as its own pages write it
import numpy as np

PIPELINE = A.Compose(
    [
        A.RandomResizedCrop(size=(224, 224), scale=(0.3, 1.0)),
        A.HorizontalFlip(p=0.5),
        A.ColorJitter(p=0.8),
        A.OneOf([A.GaussianBlur(), A.ElasticTransform(alpha=20), A.GaussNoise()], p=0.5),
        A.CoarseDropout(p=0.3),
    ]
)
"""The pipeline, made once for each worker process with generators of its own."""


def augment(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Augment a sample: ``x`` uint8 [H, W, 3] becomes uint8 [224, 224, 3], and labels stay."""
    PIPELINE.set_random_seed(int(rng.integers(1 << 32)))
    return {**sample, "x": PIPELINE(image=sample["x"])["image"]}
