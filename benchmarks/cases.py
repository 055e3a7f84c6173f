"""What is moved: payload shapes, and how many of them are a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.arguments import byte_size
from benchmarks.transports.protocol import ROWS

DEFAULT_BUDGET_BYTES = 1 << 30
"""Of a stream whose writer does not say."""
BATCH_BYTES = 10_000_000
"""Of a payload that is asked for by its size alone, about: as that of 150 kB has."""
MOST_ROWS = 1024
"""A batch of small ones, as of those of 256 B."""
SMALL_BYTES = 64 << 10
"""Up to here a sample is small: it has the room of rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """One payload."""

    name: str
    shape: tuple[int, ...]
    """Of a sample."""
    dtype: str
    batch: int
    """Samples."""
    by_batch: bool = False
    """Written many rows at once."""
    room_bytes: int = 256 << 20
    """Payload that may lie between writer and reader: a stream's budget, or what a peer's queues hold. Of large samples
    a stream's default; so much of rows and small samples would take slow sides minutes to fill."""
    most_bytes: int = 6_000_000_000
    """Of one turn."""

    @property
    def sample_bytes(self) -> int:
        """Payload bytes of one sample."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def unit(self) -> int:
        """A turn moves a multiple of so many samples."""
        return max(self.batch, ROWS if self.by_batch else 1)


IMAGE = Case("150 kB", (224, 224, 3), "uint8", batch=64, room_bytes=DEFAULT_BUDGET_BYTES)
ONE_BY_ONE = Case("256 B rows, one by one", (64,), "float32", batch=1024)
BY_BATCH = Case("256 B rows, write_batch", (64,), "float32", batch=1024, by_batch=True)
CASES = (
    ONE_BY_ONE,
    BY_BATCH,
    Case("4 kB", (1024,), "float32", batch=256),
    IMAGE,
    Case("1.2 MB", (640, 640, 3), "uint8", batch=16, room_bytes=DEFAULT_BUDGET_BYTES),
    Case("10 MB", (10, 1000, 1000), "uint8", batch=4, room_bytes=DEFAULT_BUDGET_BYTES),
    Case("100 MB", (100, 1000, 1000), "uint8", batch=2, room_bytes=DEFAULT_BUDGET_BYTES),
)


def asked_for(text: str, batch: int | None = None, by_batch: bool = False) -> Case:
    """The payload that ``text`` names: bytes a sample (``64kb``), or its dtype and shape (``float32:3,96,96``).

    ``batch``: samples; None: as many as are some 10 MB.

    Raises:
        argparse.ArgumentTypeError, TypeError or ValueError: It names neither, or nothing that tensors hold.
    """
    dtype, colon, sizes = text.partition(":")
    if colon:
        shape = tuple(int(one) for one in sizes.split(",")) if sizes else ()
    else:
        dtype, shape = "uint8", (byte_size(text),)
    case = Case(text, shape, np.dtype(dtype).name, batch=1, by_batch=by_batch)
    if np.dtype(dtype).hasobject or case.sample_bytes < 1 or min(shape, default=1) < 1 or (batch or 1) < 1:
        raise ValueError(text)
    return replace(
        case, batch=batch or max(2, min(MOST_ROWS, BATCH_BYTES // case.sample_bytes)),
        room_bytes=case.room_bytes if case.sample_bytes <= SMALL_BYTES else DEFAULT_BUDGET_BYTES,
    )  # fmt: skip
