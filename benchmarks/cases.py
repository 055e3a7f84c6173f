"""What is moved: payload shapes, how they are written, and how much of each makes a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Case:
    """One payload."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    samples: int
    """Per round."""
    batch_size: int
    by_batch: bool = False
    """Written with write_batch, many rows at once."""

    @property
    def sample_bytes(self) -> int:
        """Payload bytes of one sample."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def total_bytes(self) -> int:
        """Payload bytes of a round."""
        return self.samples * self.sample_bytes

    def pool(self) -> list[NDArray[Any]]:
        """A few different samples, made before the clock starts."""
        rng = np.random.default_rng(0)
        return [rng.integers(0, 255, self.shape).astype(self.dtype) for _ in range(16)]

    def writes(self) -> Iterator[NDArray[Any]]:
        """What is written, in order: samples, or arrays of ROWS of them."""
        pool = self.pool()
        if not self.by_batch:
            for index in range(self.samples):
                yield pool[index % len(pool)]
            return
        rows = np.stack([pool[index % len(pool)] for index in range(ROWS)])
        for _ in range(self.samples // ROWS):
            yield rows


ROWS = 4096
"""Rows of one write_batch."""

CASES = (
    Case("150 kB", (224, 224, 3), "uint8", samples=12_000, batch_size=64),
    Case("256 B rows, one by one", (64,), "float32", samples=400_000, batch_size=1024),
    Case("256 B rows, write_batch", (64,), "float32", samples=ROWS * 500, batch_size=1024, by_batch=True),
    Case("1.2 MB", (640, 640, 3), "uint8", samples=1_500, batch_size=16),
)
