"""Writes scikit-learn's handwritten digits as the folder of images that the example's workers read.

``train/<class>/`` holds jpg, png and webp files. The digits held out for testing are arrays in ``test.npz``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD_OUT = 0.2
SIDE = 32
"""Pixels of an image's side. The originals have 8 and are enlarged, which gives a decoder something to do."""
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("jpg", {"quality": 92}),
    ("png", {}),
    ("webp", {"quality": 92}),
)
"""The file formats, which take turns."""


def main() -> None:
    """Write the files, unless they exist: a second run must not change files that an epoch was planned with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder
    if (folder / "train").exists():
        print(f"{folder / 'train'} is there already")
        return
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        train, held_out = write_digits(Path(unfinished))
        counts = [len([*place.rglob("*.*")]) for place in (train, held_out)]
        save_arrays(held_out, folder / "test.npz")
        train.rename(folder / "train")
    print(f"{counts[0]} images in {folder / 'train'}, {counts[1]} in {folder / 'test.npz'}")


def write_digits(folder: Path) -> tuple[Path, Path]:
    """Write a fixed shuffle of the digits, every fifth into the held-out folder, and return both folders."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(images)).tolist()
    train, held_out = folder / "train", folder / "held-out"
    for position, index in enumerate(order):
        place = (held_out if position < round(HELD_OUT * len(order)) else train) / str(labels[index])
        place.mkdir(parents=True, exist_ok=True)
        extension, options = FORMATS[position % len(FORMATS)]
        pixels = Image.fromarray((images[index].reshape(8, 8) * 15.9).astype(np.uint8))
        enlarged = pixels.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        enlarged.save(place / f"{index:04d}.{extension}", **options)
    return train, held_out


def save_arrays(images: Path, file: Path) -> None:
    """Save a folder of images as arrays, so that a trainer needs no image library.

    ``x`` is uint8 [n, 32, 32, 1] and ``y`` int64 [n].
    """
    paths = sorted(images.rglob("*.*"))
    x = np.stack([np.asarray(Image.open(path).convert("L")) for path in paths])
    np.savez(file, x=x[..., None], y=np.array([int(path.parent.name) for path in paths]))


if __name__ == "__main__":
    main()
