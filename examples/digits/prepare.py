"""Writes scikit-learn's handwritten digits as the folder of images that the example's workers read.

``train/<class>/`` holds jpg, png and webp files; the digits held out for testing are arrays in ``test.npz``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from penstock.demo.digits import ALL, write_digits


def main() -> None:
    """Does nothing where all is there: run again, it must not change files that an epoch was planned with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder
    if (folder / "train").exists():
        print(f"{folder / 'train'} is there already")
        return
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        written = write_digits(Path(unfinished), ALL)
        save_arrays(written.held_out, folder / "test.npz")
        written.train.rename(folder / "train")
    print(f"{written.train_count} images in {folder / 'train'}, {written.held_out_count} in {folder / 'test.npz'}")


def save_arrays(images: Path, file: Path) -> None:
    """``x`` uint8 [n, 32, 32, 1] and ``y`` int64 [n]: a trainer then needs no image library."""
    paths = sorted(images.rglob("*.*"))
    x = np.stack([np.asarray(Image.open(path).convert("L")) for path in paths])
    np.savez(file, x=x[..., None], y=np.array([int(path.parent.name) for path in paths]))


if __name__ == "__main__":
    main()
