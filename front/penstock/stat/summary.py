"""All that is told of one tensor, gathered entry by entry. Memory: a draw, a few thousand counts, one piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.stat.counts import BYTE_WIDE, ByteCounts
from penstock.stat.draws import Draw
from penstock.stat.moments import Moments
from penstock.stat.pieces import channel_axis, pieces_of, real, split
from penstock_common.wire.block import Column
from penstock_common.wire.dtypes import BYTES, item_size
from penstock_common.wire.spec import TensorSpec

MOST_DISTINCT = 4096
"""Different integers that are counted one by one; beyond that quantiles and histogram come from the draw."""
BINS = 40

IdentityOf = Callable[[int], str]
"""Row of the entry -> epoch/shard/offset."""


class TensorSummary:
    """Of one tensor; fed by one thread."""

    def __init__(self, spec: TensorSpec, rng: np.random.Generator) -> None:
        self.spec = spec
        self.axis = channel_axis(spec)
        self.samples = self.nbytes = 0
        columns = (spec.shape[self.axis] or 1) if self.axis is not None else 1
        self._bytes = ByteCounts(spec.dtype, columns) if spec.dtype in BYTE_WIDE else None
        self._moments = Moments.none(columns)
        self.draw = Draw(rng)
        """Of numbers that are not counted by value."""
        self._distinct: dict[int, int] | None = {} if self.of == "length" or _is_whole(spec) else None
        self.nan_first = ""
        """The first sample that has a NaN or an infinity."""
        self.least: NDArray[np.int64] | None = None
        self.greatest: NDArray[np.int64] | None = None
        """Of ragged samples' shapes, per dimension."""
        self.constant_samples, self.constant_first = 0, ""
        """Samples all of whose numbers are one, and the first of them."""

    @property
    def of(self) -> str:
        """What the numbers are: the ``value`` s, the ``length`` of byte strings, the ``magnitude`` of complex ones."""
        if self.spec.dtype == BYTES:
            return "length"
        return "magnitude" if self.spec.dtype.startswith("complex") else "value"

    @property
    def moments(self) -> Moments:
        """Of each channel, or of all."""
        return self._moments if self._bytes is None else self._bytes.moments()

    @property
    def distinct(self) -> dict[int, int] | None:
        """Integer -> how often; None where they are not integers, or too many different ones."""
        return self._distinct if self._bytes is None else self._bytes.distinct()

    def add(self, column: Column, rows: NDArray[np.int64], identity_of: IdentityOf) -> None:
        """Some samples of an entry; ``rows`` rise."""
        if not len(rows):
            return
        self.samples += len(rows)
        lost = self._lost
        for piece in pieces_of(column, rows, self.axis):
            self._add_piece(piece)
        if column.shapes is None:
            self.nbytes += len(rows) * self.spec.sample_bytes
        else:
            self._add_shapes(column.shapes[rows])
        if self._lost > lost and not self.nan_first:
            at = next(place for place, values in enumerate(split(column, rows)) if _has_lost(values))
            self.nan_first = identity_of(int(rows[at]))
        self._count_constant(column, rows, identity_of)

    @property
    def _lost(self) -> float:
        return float(self._moments.nan.sum() + self._moments.infinite.sum())

    def _add_piece(self, piece: NDArray[Any]) -> None:
        if self._bytes is not None:
            self._bytes.add(piece)
            return
        numbers = real(piece)
        self._moments = self._moments.merge(Moments.of(numbers))
        flat = numbers.reshape(-1)
        self.draw.add(flat if np.isfinite(flat).all() else flat[np.isfinite(flat)])
        if self._distinct is not None:
            values, counts = np.unique(piece, return_counts=True)
            for value, count in zip(values[: MOST_DISTINCT + 1].tolist(), counts.tolist(), strict=False):
                self._distinct[value] = self._distinct.get(value, 0) + count
            if len(self._distinct) > MOST_DISTINCT:
                self._distinct = None

    def _add_shapes(self, shapes: NDArray[np.int64]) -> None:
        least, greatest = shapes.min(axis=0), shapes.max(axis=0)
        self.least = least if self.least is None else np.minimum(self.least, least)
        self.greatest = greatest if self.greatest is None else np.maximum(self.greatest, greatest)
        item = item_size(self.spec.dtype)
        self.nbytes += int(shapes.prod(axis=1).sum()) * item

    def _count_constant(self, column: Column, rows: NDArray[np.int64], identity_of: IdentityOf) -> None:
        if self.spec.shape == () or self.spec.dtype == BYTES:
            return
        if column.shapes is None:
            flat = column.values.reshape(len(column.values), -1)[rows]
            same = (flat == flat[:, :1]).all(axis=1) if flat.shape[1] > 1 else np.zeros(len(rows), np.bool_)
        else:
            same = np.array([len(one) > 1 and bool((one == one[0]).all()) for one in split(column, rows)])
        if same.any():
            self.constant_first = self.constant_first or identity_of(int(rows[int(same.argmax())]))
            self.constant_samples += int(same.sum())

    # --- what is told ---

    def whole(self) -> Moments:
        """Of all channels together."""
        return self.moments.pooled()

    def bounds(self) -> tuple[float, float] | None:
        """Least and greatest number, exact integers where integers are counted; None of no finite number."""
        if distinct := self.distinct:
            return min(distinct), max(distinct)
        whole = self.whole()
        return (float(whole.low[0]), float(whole.high[0])) if whole.count[0] else None

    @property
    def is_exact(self) -> bool:
        """Whether quantiles and histogram are of every number seen."""
        return self.distinct is not None or self.draw.is_whole

    def quantiles(self, at: tuple[float, ...]) -> list[float]:
        """By counts where there are some (the least value that so many are at or below), else by the draw."""
        distinct = self.distinct
        if not distinct:
            return self.draw.quantiles(at)
        values = sorted(distinct)
        below = np.cumsum([distinct[value] for value in values])
        ranks = [int(np.searchsorted(below, max(1, np.ceil(q * below[-1])))) for q in at]
        return [float(values[min(rank, len(values) - 1)]) for rank in ranks]

    def histogram(self, bins: int = BINS) -> tuple[list[float], list[float]]:
        """Edges (one more) and how many numbers lie between them; both empty of no finite number."""
        bounds, distinct = self.bounds(), self.distinct
        if bounds is None or not math.isfinite(float(bounds[1]) - float(bounds[0])):
            return [], []  # numpy refuses a range wider than a float64
        low, high = float(bounds[0]), float(bounds[1])
        if distinct is not None:
            values = np.array([float(value) for value in distinct])
            weights = np.array(list(distinct.values()), dtype=np.float64)
            span = int(bounds[1]) - int(bounds[0]) + 1
            width = -(-span // bins)  # whole numbers: else bins of three beside bins of four
            bins = -(-span // width)
            low, high = low - 0.5, low - 0.5 + bins * width
        else:
            values = self.draw.values
            weights = np.full(len(values), self.draw.seen / max(1, len(values)))
        if high - low < 4 * bins * np.spacing(max(abs(low), abs(high))):
            pad = max(abs(low), abs(high), 1.0) / 2
            bins, low, high = 1, low - pad, high + pad
        counts, edges = np.histogram(values, bins=bins, range=(low, high), weights=weights)
        return edges.tolist(), counts.tolist()

    def classes(self) -> dict[int, int] | None:
        """Class -> samples, of a tensor that is one integer for each sample."""
        distinct = self.distinct
        if not distinct or self.spec.shape != () or self.of != "value":
            return None
        return dict(sorted(distinct.items()))


def _is_whole(spec: TensorSpec) -> bool:
    return spec.dtype == "bool" or spec.dtype.startswith(("int", "uint"))


def _has_lost(values: NDArray[Any]) -> bool:
    return not bool(np.isfinite(real(values)).all())
