"""The payloads that are moved: their shapes, and the samples of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.arguments import byte_size
from benchmarks.transports.protocol import ROWS

DEFAULT_BUDGET_BYTES = 1 << 30
"""The budget of a stream whose writer does not set one."""
BATCH_BYTES = 10_000_000
"""The approximate bytes of a batch, for a payload that is given by its size alone. It is that of the 150 kB payload."""
MOST_ROWS = 1024
"""The samples of a batch of small ones, as for 256 B."""
SMALL_BYTES = 64 << 10
"""The largest sample that counts as small."""


@dataclass(frozen=True, slots=True)
class Case:
    """One payload."""

    name: str
    shape: tuple[int, ...]
    """The shape of a sample."""
    dtype: str
    batch: int
    """The samples of a batch."""
    by_batch: bool = False
    """Whether many rows are written at once."""
    room_bytes: int = 256 << 20
    """The payload bytes that may lie between writer and reader: a stream's budget, or the capacity of a peer's queues.
    For large samples it is a stream's default. For small samples it is less, because a slow side would take minutes to
    fill it."""
    most_bytes: int = 6_000_000_000
    """The most payload bytes of one turn."""

    @property
    def sample_bytes(self) -> int:
        """Return the payload bytes of one sample."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def unit(self) -> int:
        """Return the samples of one unit. A turn moves a multiple of it."""
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
    """Return the case of a payload: bytes a sample (``64kb``), or its dtype and shape (``float32:3,96,96``).

    ``batch`` is the samples of a batch. None means about 10 MB.

    Raises:
        argparse.ArgumentTypeError, TypeError or ValueError: It is neither, or names no dtype of tensors.
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
