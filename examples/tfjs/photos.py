"""Draw photos of four classes as JPEG and WebP files: a bright disc in one corner of a noisy picture.

`python photos.py photos --gigabytes 4` draws about 4 GB of them.
"""

import argparse
import multiprocessing
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

CORNERS = ("bottom-left", "bottom-right", "top-left", "top-right")
PROBE = 16
"""The photos whose sizes say how many are needed."""


def draw(number: int, folder: Path, side: int) -> int:
    """Write one photo and return its bytes. Every fourth is a WebP file."""
    rng = np.random.default_rng(number)
    corner = CORNERS[number % 4]
    noise = np.frombuffer(rng.bytes(side * side * 3), np.uint8) & 127  # which no codec makes small
    pixels = noise.reshape(side, side, 3)
    centre = np.array([0.25 if "top" in corner else 0.75, 0.25 if "left" in corner else 0.75])
    row, column = side * (centre + rng.uniform(-0.1, 0.1, 2))
    y, x = np.ogrid[:side, :side]
    disc = (y - row) ** 2 + (x - column) ** 2 < (side / 8) ** 2
    pixels[disc] += 100
    path = folder / corner / f"{number:06}{'.webp' if number // 4 % 4 == 3 else '.jpg'}"
    Image.fromarray(pixels).save(path, quality=97, subsampling=0, method=0)
    return path.stat().st_size


def main() -> None:
    """Draw the photos on all cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--side", type=int, default=416, help="pixels of height and width (default: 416)")
    asked = parser.parse_args()
    for corner in CORNERS:
        (asked.folder / corner).mkdir(parents=True, exist_ok=True)
    one = partial(draw, folder=asked.folder, side=asked.side)
    with multiprocessing.Pool() as pool:
        probed = pool.map(one, range(PROBE))
        count = max(PROBE, round(asked.gigabytes * 1e9 * PROBE / sum(probed)))
        total = sum(probed) + sum(pool.imap_unordered(one, range(PROBE, count), chunksize=8))
    print(f"{count} photos of {total / 1e9:.3f} GB in {asked.folder}")


if __name__ == "__main__":
    main()
