"""``python -m benchmarks.decoding``: Penstock's images source against bare Pillow, in one run.

Files are JPEGs of 500 x 375, cut from scikit-learn's two photographs. The source finds, reads, bounds, turns upright,
labels and seeds. Bare Pillow opens, drafts and resizes. Rounds alternate, and the result is the median of the CPU time
ratios of neighbouring rounds. It needs an internal part, the source, so it measures only its own tree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.photographs import cut_photographs
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.decode import random_box
from penstock_producer.sources.images import ImagesSource
from penstock_producer.sources.seeding import sample_rng

FILES = 64
_BILINEAR = Image.Resampling.BILINEAR
Bare = Callable[[Path, int], NDArray[Any]]


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each side (default 9)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = cut_photographs(Path(folder), FILES)
        print(f"{'what':34}{'bare / ours':>12}{'lowest-highest':>18}{'ours':>10}{'bare':>10}")
        for name, options, bare in CASES:
            images = ImagesSource(ImagesConfig(path=folder, **options))
            ratios, ours, theirs = measure(images, paths, bare, args.rounds)
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            print(f"{name:34}{statistics.median(ratios):12.2f}{spread:>18}{ours:7.2f} ms{theirs:7.2f} ms")
    return 0


def measure(images: ImagesSource, paths: list[Path], bare: Bare, rounds: int) -> tuple[list[float], float, float]:
    """Return the ratios of neighbouring rounds, and the medians of both sides in milliseconds of CPU per image."""

    def ours() -> None:
        for index in range(len(images)):
            images.read(index, sample_rng(0, 0, 0, index))

    def theirs() -> None:
        for index, path in enumerate(paths):
            bare(path, index)

    taken = [(_timed(ours), _timed(theirs)) for _ in range(rounds + 1)][1:]
    per_image = 1000 / len(paths)
    medians = [statistics.median(side) * per_image for side in zip(*taken, strict=True)]
    return [their / our for our, their in taken], medians[0], medians[1]


def _timed(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _whole(path: Path, _: int) -> NDArray[Any]:
    with Image.open(path) as image:
        return np.array(image)


def _resized(side: int) -> Bare:
    def bare(path: Path, _: int) -> NDArray[Any]:
        with Image.open(path) as image:
            image.draft("RGB", (2 * side, 2 * side))
            return np.array(image.resize((side, side), _BILINEAR, reducing_gap=2.0))

    return bare


def _cropped(path: Path, _: int) -> NDArray[Any]:
    with Image.open(path) as image:
        image.draft("RGB", (2 * 341, 2 * 256))
        resized = image.resize((341, 256), _BILINEAR, reducing_gap=2.0)
        return np.array(resized.crop((58, 16, 282, 240)))


def _random(path: Path, index: int) -> NDArray[Any]:
    rng = sample_rng(0, 0, 0, index)
    with Image.open(path) as image:
        box = random_box(image.height, image.width, rng)
        cut = image.resize((224, 224), _BILINEAR, box, 2.0)
        return np.array(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else cut)


CASES: tuple[tuple[str, dict[str, Any], Bare], ...] = (
    ("as they are", {}, _whole),
    ("--resize 224x224", {"resize": (224, 224)}, _resized(224)),
    ("--resize 64x64", {"resize": (64, 64)}, _resized(64)),
    ("--resize 256 --crop 224x224", {"resize": 256, "crop": (224, 224)}, _cropped),
    ("--random-crop 224x224 --flip", {"random_crop": (224, 224), "flip": True}, _random),
)

if __name__ == "__main__":
    raise SystemExit(main())
