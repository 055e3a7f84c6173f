"""Ratio and CPU time of the codecs on images, tokens, masks and noise: ``python -m benchmarks.compression``.

The codecs have the options of streams, on one core and without a server. The table is that of docs/compression.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import blosc2  # type: ignore[import-untyped,unused-ignore]
import numpy as np
import zstandard
from numpy.typing import NDArray

BLOCK, ROUNDS = 1_000_000, 5


def kinds() -> dict[str, NDArray[Any]]:
    """Return a block of each kind: two photographs of scikit-learn, and seeded tokens, masks and noise."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:256, :256]
    masks = [(x - rng.integers(256)) ** 2 + (y - rng.integers(256)) ** 2 < rng.integers(20, 90) ** 2 for _ in range(16)]
    return {
        "photographs, uint8": np.stack(load_sample_images().images),
        "tokens, int32": (rng.zipf(1.3, 300_000) % 50_000).astype(np.int32),
        "masks, bool": np.stack(masks),
        "noise, float32": rng.standard_normal(300_000).astype(np.float32),
    }


def pack(codec: str, data: memoryview, itemsize: int) -> bytes:
    """Compress as a writer does."""
    if codec == "zstd":
        return bytes(zstandard.ZstdCompressor(level=1, write_checksum=False).compress(data))
    options = {"typesize": itemsize, "clevel": 1, "codec": blosc2.Codec.ZSTD, "filters": [blosc2.Filter.SHUFFLE]}
    return bytes(blosc2.compress2(data, filters_meta=[0], nthreads=1, **options))


def unpack(codec: str, frame: bytes, size: int) -> None:
    """Decompress as a reader does."""
    if codec == "zstd":
        zstandard.ZstdDecompressor().decompress(frame)
    else:
        blosc2.decompress2(frame, bytearray(size), nthreads=1)


def cpu(action: Callable[[], Any], nbytes: int) -> float:
    """Return the CPU seconds of an action for each gigabyte, the median of some rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        action()
        times.append(time.process_time() - begin)
    return sorted(times)[ROUNDS // 2] / nbytes * 1e9


def main() -> None:
    """Print the table."""
    print("| block of 1 MB | codec | ratio | writer, CPU s/GB | reader, CPU s/GB |\n|---|---|---|---|---|")
    for kind, array in kinds().items():
        data = array.reshape(-1).view(np.uint8)[:BLOCK].data
        for codec in ("zstd", "blosc2"):
            frame = pack(codec, data, array.itemsize)
            writing = cpu(lambda: pack(codec, data, array.itemsize), len(data))  # noqa: B023 - called at once
            reading = cpu(lambda: unpack(codec, frame, len(data)), len(data))  # noqa: B023
            print(f"| {kind} | {codec} | {len(data) / len(frame):.2f} | {writing:.2f} | {reading:.2f} |")


if __name__ == "__main__":
    main()
