"""Statistics of streamed numbers, bounded in memory and mergeable.

A tensor's samples come as pieces of numbers ``[k, C]``. A piece has at most `PIECE` numbers, or one row of channels, so
that float64 copies stay in a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import MissingExtra
from penstock_common.wire.block import Column
from penstock_common.wire.compression import CODECS, pack
from penstock_common.wire.dtypes import BYTES, item_size
from penstock_common.wire.ragged import row_starts
from penstock_common.wire.spec import TensorSpec

PIECE = 1 << 17
CHANNELS = (1, 3, 4)
"""The channels of an image: grey, RGB, RGBA."""
LEAST_SIDE = 4
WHOLE = ("bool", "int", "uint")
"""The beginnings of the dtypes of whole numbers."""


def channel_axis(spec: TensorSpec) -> int | None:
    """Return the axis of an image's channels, -1 or 0, or None if the samples do not look like images."""
    shape = spec.shape
    if spec.dtype == BYTES or len(shape) not in (3, 4):
        return None
    if shape[-1] in CHANNELS and all(_is_side(dim) for dim in shape[-3:-1]):
        return -1
    return 0 if len(shape) == 3 and shape[0] in CHANNELS and all(map(_is_side, shape[1:])) else None


def _is_side(dim: int | None) -> bool:
    return dim is None or dim >= LEAST_SIDE


def pieces_of(column: Column, rows: NDArray[np.int64], axis: int | None) -> Iterator[NDArray[Any]]:
    """Yield the numbers of samples in their dtype, one column per channel, else one.

    Byte strings yield their lengths.
    """
    spec = column.spec
    if spec.dtype == BYTES:
        assert column.shapes is not None
        yield column.shapes[rows, :1]
        return
    if axis == 0:
        channels = spec.shape[0] or 1
        for sample in split(column, rows):
            yield from _cut(sample.reshape(channels, -1).T)
        return
    yield from _cut(_flat(column, rows).reshape(-1, (spec.shape[-1] or 1) if axis == -1 else 1))


def split(column: Column, rows: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    """Yield the numbers of each of these samples, 1-D."""
    if column.shapes is None:
        yield from (column.values[row].reshape(-1) for row in rows.tolist())
        return
    starts = row_starts(column.shapes, column.spec).tolist()
    yield from (column.values[starts[row] : starts[row + 1]] for row in rows.tolist())


def _flat(column: Column, rows: NDArray[np.int64]) -> NDArray[Any]:
    values: NDArray[Any] = column.values
    if column.shapes is None:
        return values.reshape(-1) if len(rows) == len(values) else values[rows].reshape(-1)
    return values if len(rows) == len(column.shapes) else np.concatenate(list(split(column, rows)))


def _cut(numbers: NDArray[Any]) -> Iterator[NDArray[Any]]:
    step = max(1, PIECE // max(1, numbers.shape[1]))
    for start in range(0, len(numbers), step):
        yield numbers[start : start + step]


def real(numbers: NDArray[Any]) -> NDArray[np.float64]:
    """Return numbers as float64: a complex number's magnitude, 0 and 1 for a bool."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.abs(numbers) if numbers.dtype.kind == "c" else numbers).astype(np.float64)


F64 = NDArray[np.float64]


@dataclass(slots=True)
class Moments:
    """Count, mean, variance, least and greatest of each of C columns; every field is an array of length C.

    Pieces are merged by the rule of Chan, Golub and LeVeque (1979), which generalises Welford's from one number.
    Nothing is summed over the whole stream, so nothing is lost to cancellation. NaN and infinities are counted and left
    out.
    """

    count: F64
    """The number of finite numbers."""
    mean: F64
    m2: F64
    """The sum of squared deviations from the mean."""
    low: F64
    high: F64
    """Reversed infinities (least +inf, greatest -inf) while there is no finite number."""
    nan: F64
    infinite: F64

    @classmethod
    def none(cls, columns: int = 1) -> Moments:
        """Return the moments of no numbers."""
        zeros = [np.zeros(columns) for _ in range(5)]
        return cls(zeros[0], zeros[1], zeros[2], np.full(columns, np.inf), np.full(columns, -np.inf), *zeros[3:])

    @classmethod
    def of(cls, rows: F64) -> Moments:
        """Return the moments of one piece, ``[n, C]``."""
        if not len(rows):
            return cls.none(rows.shape[1])
        columns = np.ascontiguousarray(rows.T)  # numpy sums along short rows many times slower
        finite = np.isfinite(columns)
        with np.errstate(over="ignore", invalid="ignore"):
            count = finite.sum(axis=1).astype(np.float64)
            mean = np.where(finite, columns, 0).sum(axis=1) / np.maximum(count, 1)
            m2 = np.square(np.where(finite, columns - mean[:, None], 0)).sum(axis=1)
        nan = np.isnan(columns).sum(axis=1).astype(np.float64)
        low = np.where(finite, columns, np.inf).min(axis=1)
        high = np.where(finite, columns, -np.inf).max(axis=1)
        return cls(count, mean, m2, low, high, nan, len(rows) - count - nan)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the numbers of both."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            apart = other.mean - self.mean
            mean = self.mean + apart * share
            m2 = self.m2 + other.m2 + apart * apart * self.count * share
        return Moments(
            count, mean, m2, np.minimum(self.low, other.low), np.maximum(self.high, other.high),
            self.nan + other.nan, self.infinite + other.infinite,
        )  # fmt: skip

    def pooled(self) -> Moments:
        """Return the moments of all columns together, with C = 1."""
        whole = Moments.none()
        for column in range(len(self.count)):
            part = slice(column, column + 1)
            whole = whole.merge(
                Moments(
                    self.count[part], self.mean[part], self.m2[part], self.low[part], self.high[part],
                    self.nan[part], self.infinite[part],
                )
            )  # fmt: skip
        return whole

    @property
    def std(self) -> F64:
        """Return the standard deviation, divided by n as numpy does. It is NaN without numbers."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)


BYTE_WIDE = ("uint8", "int8", "bool")


class ByteCounts:
    """The counts of each of the 256 values of 8-bit numbers in each of C columns.

    All statistics of such numbers follow exactly from the counts.
    """

    def __init__(self, dtype: str, columns: int) -> None:
        self._counts: NDArray[np.int64] = np.zeros((columns, 256), dtype=np.int64)
        every = np.arange(256, dtype=np.uint8)
        self._values: NDArray[np.int64] = (every.view(np.int8) if dtype == "int8" else every).astype(np.int64)

    def add(self, piece: NDArray[Any]) -> None:
        """Add one piece, ``[n, C]`` of the dtype."""
        for column in range(len(self._counts)):
            self._counts[column] += np.bincount(piece[:, column].view(np.uint8), minlength=256)

    def moments(self) -> Moments:
        """Return the moments of each column. Sums are of integers, so nothing is rounded before the end."""
        count = self._counts.sum(axis=1).astype(np.float64)
        mean = (self._counts * self._values).sum(axis=1) / np.maximum(count, 1)
        m2 = (self._counts * np.square(self._values - mean[:, None])).sum(axis=1)
        low = np.where(self._counts > 0, self._values, np.inf).min(axis=1)
        high = np.where(self._counts > 0, self._values, -np.inf).max(axis=1)
        return Moments(count, mean, m2, low, high, np.zeros_like(count), np.zeros_like(count))

    def distinct(self) -> dict[int, int]:
        """Return how often each value occurs, for values that occur."""
        whole = self._counts.sum(axis=0)
        return {value: count for value, count in zip(self._values.tolist(), whole.tolist(), strict=True) if count}


KEPT = 1 << 16
"""The numbers kept of each tensor: 1 MiB with their keys."""


class UniformSample:
    """A uniform sample of at most k finite numbers from a stream of unknown length, for quantiles and histograms.

    Each number gets a random key, and those with the k least keys are kept. This makes every subset of k equally
    likely.

    A quantile q from k of n > k numbers has an error in its rank. With a probability of 99.7 %, the rank is within q +-
    3 sqrt(q (1 - q) / k). That is at most 0.6 percentage points with the default k. If n <= k, all numbers are kept,
    and the quantiles are numpy's. The caller leaves NaN and infinities out.
    """

    def __init__(self, rng: np.random.Generator, kept: int = KEPT) -> None:
        self._rng, self._kept = rng, kept
        self.seen = 0
        """The numbers seen so far."""
        self._threshold = 1.0
        """The limit above which no key can be among the least k any more."""
        self._keys: NDArray[np.float64] = np.empty(0)
        self._values: NDArray[np.float64] = np.empty(0)

    def add(self, values: NDArray[np.float64]) -> None:
        """Add one piece, 1-D."""
        self.seen += len(values)
        keys = self._rng.random(len(values))
        is_drawn = keys < self._threshold
        keys = np.concatenate([self._keys, keys[is_drawn]])
        values = np.concatenate([self._values, values[is_drawn]])
        if len(keys) > self._kept:
            least = np.argpartition(keys, self._kept - 1)[: self._kept]
            keys, values = keys[least], values[least]
            self._threshold = float(keys.max())
        self._keys, self._values = keys, values

    @property
    def is_whole(self) -> bool:
        """Return True if every number was kept."""
        return len(self._values) == self.seen

    @property
    def values(self) -> NDArray[np.float64]:
        """Return the numbers that are kept, in no order."""
        return self._values

    def quantiles(self, at: tuple[float, ...]) -> list[float]:
        """Return quantiles by linear interpolation, as numpy does. They are NaN without numbers."""
        if not len(self._values):
            return [float("nan")] * len(at)
        with np.errstate(over="ignore", invalid="ignore"):  # the difference of two float64 numbers may exceed a float64
            return [float(value) for value in np.quantile(self._values, at)]


RATIO_BLOCKS = 4
RATIO_BYTES = 1 << 20
"""The bytes of each of them that are compressed at most."""


class CompressionEstimate:
    """A tensor's ratio with each codec, of up to 4 blocks of at most 1 MiB, each block that is seen equally likely.

    It keeps these 4 MiB, and compresses them once, at the end: some 20 ms of CPU time a codec.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._seen = 0
        self._kept: list[tuple[bytes, int]] = []

    def add(self, column: Column) -> None:
        """Draw a block's payload of the tensor, or leave it out."""
        if not column.values.nbytes:
            return
        self._seen += 1
        number = len(self._kept) if len(self._kept) < RATIO_BLOCKS else int(self._rng.integers(self._seen))
        if number < RATIO_BLOCKS:
            flat = np.ascontiguousarray(column.values).reshape(-1).view(np.uint8)
            self._kept[number : number + 1] = [(flat[:RATIO_BYTES].tobytes(), item_size(column.spec.dtype))]

    @property
    def nbytes(self) -> int:
        """Return the bytes that are compressed."""
        return sum(len(data) for data, _ in self._kept)

    def ratios(self) -> dict[str, float | None]:
        """Return bytes as they are / bytes as stored, for each codec. None without a block, or without its package."""
        return {codec: self._ratio(codec) for codec in CODECS}

    def _ratio(self, codec: str) -> float | None:
        try:
            stored = sum(len(pack(codec, memoryview(data), item) or data) for data, item in self._kept)
        except MissingExtra:
            return None
        return self.nbytes / stored if stored else None
