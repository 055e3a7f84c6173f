"""The content of a sample as a function of seed, index and nonce, and the proof of a received sample.

The nonce differs from epoch to epoch (or is the feed's), so a payload alone identifies its sample and its epoch. The
proof reads no header. A payload that was mixed up, cut short or overwritten has no valid nonce.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

KEY_BYTES = 16
"""Index and nonce, little-endian, at the head of ``x``."""
BAD_ONE_IN = 64


def sample(seed: int, index: int, nonce: int, size: int) -> dict[str, Any]:
    """Return ``x``, a uint8 [size] made from index and nonce, and ``y``, the index again."""
    x = np.empty(size, np.uint8)
    x[:KEY_BYTES].view("<u8")[:] = (index, nonce)
    x[KEY_BYTES:] = _body(seed, index, nonce, size - KEY_BYTES)
    return {"x": x, "y": index}


def spec(size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the spec of a sample."""
    return {"x": ("uint8", (size,)), "y": ("int64", ())}


def prove(seed: int, x: NDArray[np.uint8], y: int) -> int | None:
    """Compare every byte of a received sample with the sample made again.

    Return its nonce, or None if it is corrupt.
    """
    index, nonce = (int(word) for word in x[:KEY_BYTES].copy().view("<u8"))
    if index != y or not np.array_equal(x[KEY_BYTES:], _body(seed, index, nonce, len(x) - KEY_BYTES)):
        return None
    return nonce


def is_bad(seed: int, index: int) -> bool:
    """Return whether the source cannot make this sample, in any epoch."""
    return xxhash.xxh3_64_intdigest(f"bad:{seed}:{index}".encode()) % BAD_ONE_IN == 0


def feed_nonce(seed: int, number: int) -> int:
    """Return the nonce of a feed's sample."""
    return xxhash.xxh3_64_intdigest(f"feed:{seed}:{number}".encode())


def _body(seed: int, index: int, nonce: int, size: int) -> NDArray[np.uint8]:
    words = np.random.SFC64(np.random.SeedSequence([seed, index, nonce])).random_raw(-(-size // 8))
    return words.view(np.uint8)[:size]
