"""Facts and findings of `penstock stat`: the properties of each tensor, and what an expert would notice.

The thresholds are rules of thumb. Networks are initialised for inputs of mean 0 and deviation 1, and with classes that
differ tenfold in number plain accuracy begins to mislead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.views.statistics import (
    BYTE_WIDE,
    WHOLE,
    ByteCounts,
    CompressionEstimate,
    Moments,
    UniformSample,
    channel_axis,
    pieces_of,
    real,
    split,
)
from penstock_common.printable import listed
from penstock_common.wire.block import Column
from penstock_common.wire.dtypes import BYTES, item_size
from penstock_common.wire.spec import TensorSpec

MOST_DISTINCT = 4096
"""The most different integers that are counted exactly. Beyond that, quantiles and histogram come from a random
sample.
"""
BINS = 40

IdentityOf = Callable[[int], str]
"""Row of the entry -> epoch/shard/offset."""


class ConstantSamples:
    """The samples of a tensor that have one value throughout."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self.count = 0
        self.first = ""
        """The identity of the first one."""

    def add(self, column: Column, rows: NDArray[np.int64], identity_of: IdentityOf) -> None:
        """Count those among some samples of an entry."""
        if self._spec.shape == () or self._spec.dtype == BYTES:
            return
        with np.errstate(invalid="ignore"):  # a signalling NaN warns as it is compared, and equals nothing as any NaN
            if column.shapes is None:
                flat = column.values.reshape(len(column.values), -1)[rows]
                same = (flat == flat[:, :1]).all(axis=1) if flat.shape[1] > 1 else np.zeros(len(rows), np.bool_)
            else:
                same = np.array([len(one) > 1 and bool((one == one[0]).all()) for one in split(column, rows)])
        if same.any():
            self.first = self.first or identity_of(int(rows[int(same.argmax())]))
            self.count += int(same.sum())


class TensorSummary:
    """The properties of one tensor, gathered entry by entry in one thread.

    It needs memory for a random sample, a few thousand counts, one piece and 4 MiB for compression.
    """

    def __init__(self, spec: TensorSpec, rng: np.random.Generator) -> None:
        self.spec = spec
        self.compression = CompressionEstimate(rng)
        self.axis = channel_axis(spec)
        self.samples = self.nbytes = 0
        columns = (spec.shape[self.axis] or 1) if self.axis is not None else 1
        self._bytes = ByteCounts(spec.dtype, columns) if spec.dtype in BYTE_WIDE else None
        self._moments = Moments.none(columns)
        self.draw = UniformSample(rng)
        """A random sample of the numbers that are not counted by value."""
        self._distinct: dict[int, int] | None = {} if self.of == "length" or spec.dtype.startswith(WHOLE) else None
        self.nan_first = ""
        """The first sample that has a NaN or an infinity."""
        self.least: NDArray[np.int64] | None = None
        self.greatest: NDArray[np.int64] | None = None
        """The largest shape of ragged samples, per dimension."""
        self.constant = ConstantSamples(spec)

    @property
    def of(self) -> str:
        """Return what the numbers are: ``value``, ``length`` of byte strings, or ``magnitude`` of complex numbers."""
        if self.spec.dtype == BYTES:
            return "length"
        return "magnitude" if self.spec.dtype.startswith("complex") else "value"

    @property
    def moments(self) -> Moments:
        """Return the moments of each channel, or of all numbers."""
        return self._moments if self._bytes is None else self._bytes.moments()

    @property
    def distinct(self) -> dict[int, int] | None:
        """Return how often each integer occurs, or None for other numbers, or for too many different ones."""
        return self._distinct if self._bytes is None else self._bytes.distinct()

    def add(self, column: Column, rows: NDArray[np.int64], identity_of: IdentityOf) -> None:
        """Add some samples of an entry; ``rows`` rise."""
        if not len(rows):
            return
        self.samples += len(rows)
        self.compression.add(column)
        lost = self._lost
        for piece in pieces_of(column, rows, self.axis):
            self._add_piece(piece)
        if column.shapes is None:
            self.nbytes += len(rows) * self.spec.sample_bytes
        else:
            self._add_shapes(column.shapes[rows])
        if self._lost > lost and not self.nan_first:
            at = next(at for at, values in enumerate(split(column, rows)) if not np.isfinite(real(values)).all())
            self.nan_first = identity_of(int(rows[at]))
        self.constant.add(column, rows, identity_of)

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

    # --- results ---

    def whole(self) -> Moments:
        """Return the moments of all channels together."""
        return self.moments.pooled()

    def bounds(self) -> tuple[float, float] | None:
        """Return the least and the greatest number, or None without a finite number. Counted integers are exact."""
        if distinct := self.distinct:
            return min(distinct), max(distinct)
        whole = self.whole()
        return (float(whole.low[0]), float(whole.high[0])) if whole.count[0] else None

    @property
    def is_exact(self) -> bool:
        """Return True if quantiles and histogram are of every number seen."""
        return self.distinct is not None or self.draw.is_whole

    def quantiles(self, at: tuple[float, ...]) -> list[float]:
        """Return quantiles.

        From counts, a quantile is the least value with enough numbers at or below it. Otherwise it comes from the
        random sample.
        """
        distinct = self.distinct
        if not distinct:
            return self.draw.quantiles(at)
        values = sorted(distinct)
        below = np.cumsum([distinct[value] for value in values])
        ranks = [int(np.searchsorted(below, max(1, np.ceil(q * below[-1])))) for q in at]
        return [float(values[min(rank, len(values) - 1)]) for rank in ranks]

    def histogram(self, bins: int = BINS) -> tuple[list[float], list[float]]:
        """Return the edges of the bins and the count of each bin. Both are empty without a finite number."""
        bounds, distinct = self.bounds(), self.distinct
        if bounds is None or not math.isfinite(float(bounds[1]) - float(bounds[0])):
            return [], []  # numpy refuses a range wider than a float64
        low, high = float(bounds[0]), float(bounds[1])
        if distinct is not None:
            values = np.array([float(value) for value in distinct])
            weights = np.array(list(distinct.values()), dtype=np.float64)
            span = int(bounds[1]) - int(bounds[0]) + 1
            # whole numbers, because otherwise some bins would hold three integers and others four
            width = -(-span // bins)
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
        """Return the samples of each class, if the tensor is one integer a sample."""
        distinct = self.distinct
        if not distinct or self.spec.shape != () or self.of != "value":
            return None
        return dict(sorted(distinct.items()))


LARGE = 10.0
"""The mean or deviation of floating-point inputs above which they are reported as not normalised."""
IMBALANCE = 10.0
"""The ratio of the largest class to the smallest above which the imbalance is reported."""
ENOUGH_EACH = 20
"""The samples for each class name above which a class that was never drawn is reported."""


def findings(summary: TensorSummary, names: Sequence[str] = ()) -> list[str]:
    """Return a sentence for each problem. ``names`` are the tensor's class names, if the stream has some."""
    findings = [*_lost(summary), *_constant(summary), *_range(summary)]
    counts = summary.classes()
    return [*findings, *_classes(summary, counts, names)] if counts else findings


def _lost(summary: TensorSummary) -> list[str]:
    nan, infinite = int(summary.moments.nan.sum()), int(summary.moments.infinite.sum())
    if not nan + infinite:
        return []
    what = " and ".join(f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count)
    return [f"{summary.spec.name}: {what} among its numbers, first in sample {summary.nan_first}: the loss becomes NaN"]


def _constant(summary: TensorSummary) -> list[str]:
    bounds, name = summary.bounds(), summary.spec.name
    if bounds is None or summary.samples < 2 or summary.of == "length":
        return []
    if bounds[0] == bounds[1]:
        return [f"{name}: every {summary.of} is {bounds[0]:g}: there is nothing to learn from it"]
    findings = []
    flat = [channel for channel, std in enumerate(summary.moments.std) if std == 0 and summary.axis is not None]
    if flat:
        findings.append(f"{name}: channel {', '.join(map(str, flat))} has the same value everywhere")
    if summary.constant.count:
        share = summary.constant.count / summary.samples
        findings.append(
            f"{name}: {summary.constant.count} of {summary.samples} samples ({share:.1%}) have one value throughout "
            f"(empty?), the first is {summary.constant.first}"
        )
    return findings


def _range(summary: TensorSummary) -> list[str]:
    spec, whole = summary.spec, summary.whole()
    if spec.shape == () or "float" not in spec.dtype or not whole.count[0]:
        return []
    mean, std = float(whole.mean[0]), float(whole.std[0])
    if abs(mean) <= LARGE and std <= LARGE:
        return []
    is_pixels = whole.low[0] >= 0 and 1 < whole.high[0] <= 255
    advice = "pixels from 0 to 255: divide by 255" if is_pixels else "normalise it, e.g. by the line to paste"
    return [f"{spec.name}: mean {mean:.4g} and deviation {std:.4g} are not normalised ({advice})"]


def _classes(summary: TensorSummary, counts: Mapping[int, int], names: Sequence[str]) -> list[str]:
    def named(number: int) -> str:
        return repr(names[number]) if 0 <= number < len(names) else str(number)

    spec, findings = summary.spec, []
    if names and (strange := [number for number in counts if not 0 <= number < len(names)]):
        findings.append(f"{spec.name}: {strange[0]} is no class: the stream has {len(names)} class names")
    if names and summary.samples >= ENOUGH_EACH * len(names):
        absent = [names[number] for number in range(len(names)) if number not in counts]
        if absent:
            findings.append(f"{spec.name}: no sample of class {listed([repr(name) for name in absent], 5)} was seen")
    if 2 <= len(counts) <= max(len(names), summary.samples // ENOUGH_EACH):
        most, least = max(counts, key=lambda n: counts[n]), min(counts, key=lambda n: counts[n])
        if counts[most] >= IMBALANCE * counts[least]:
            findings.append(
                f"{spec.name}: class {named(most)} has {counts[most]} samples, {named(least)} {counts[least]}: "
                "balance them (--balance), or weigh the loss"
            )
    return findings


QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
PIXEL = 255.0


def as_json(summary: TensorSummary, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return all facts. A missing number is None, because JSON has neither NaN nor infinities."""
    whole, bounds, spec = summary.whole(), summary.bounds(), summary.spec
    low, high = bounds if bounds is not None else (None, None)
    edges, counts = summary.histogram()
    classes = summary.classes()
    known = bool(whole.count[0])
    return {
        "tensor": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "shapes_seen": None if summary.least is None or summary.greatest is None
        else {"least": summary.least.tolist(), "greatest": summary.greatest.tolist()},
        "of": summary.of,
        "samples": summary.samples,
        "numbers": int(whole.count[0] + whole.nan[0] + whole.infinite[0]),
        "bytes": summary.nbytes,
        "min": _number(low),
        "max": _number(high),
        "mean": _number(float(whole.mean[0])) if known else None,
        "std": _number(float(whole.std[0])) if known else None,
        "nan": int(whole.nan[0]),
        "infinite": int(whole.infinite[0]),
        "quantiles": {f"{q:g}": _number(v) for q, v in zip(QUANTILES, summary.quantiles(QUANTILES), strict=True)},
        "quantiles_of": len(summary.draw.values) if not summary.is_exact else int(whole.count[0]),
        "histogram": {"edges": edges, "counts": [round(count) for count in counts]},
        "classes": None if classes is None
        else [{"class": number, "name": _name(number, names), "samples": count} for number, count in classes.items()],
        "channels": None if summary.axis is None or not known
        else {"axis": summary.axis, "mean": _numbers(summary.moments.mean), "std": _numbers(summary.moments.std)},
        "constant_samples": summary.constant.count,
        "compression": {"bytes": summary.compression.nbytes, "ratios": summary.compression.ratios()},
        "paste": paste_lines(summary),
        "findings": findings(summary, names),
    }  # fmt: skip


def paste_lines(summary: TensorSummary) -> dict[str, str]:
    """Return a line of Python for each framework that normalises the tensor to mean 0 and deviation 1, if it helps."""
    spec, moments = summary.spec, summary.moments if summary.axis is not None else summary.whole()
    if spec.shape == () or summary.of != "value" or spec.dtype == "bool":
        return {}
    std = moments.std
    if not all(math.isfinite(float(one)) and one > 0 for one in std):
        return {}
    axis = {None: None, -1: -1, 0: 1}[summary.axis]  # with the batch dimension first
    mean = [float(one) for one in moments.mean]
    variance = [float(one) ** 2 for one in std]
    shown = (_list(mean), _list(variance)) if axis is not None else (_short(mean[0]), _short(variance[0]))
    lines = {"keras": f"keras.layers.Normalization(axis={axis}, mean={shown[0]}, variance={shown[1]})"}
    if summary.axis is not None and len(spec.shape) == 3:
        scale, why = (PIXEL, "  # after ToTensor(), which divides by 255") if spec.dtype == "uint8" else (1.0, "")
        means, stds = _list([one / scale for one in mean]), _list([float(one) / scale for one in std])
        lines["torchvision"] = f"torchvision.transforms.Normalize(mean={means}, std={stds}){why}"
    return lines


def _name(number: int, names: Sequence[str]) -> str | None:
    return names[number] if 0 <= number < len(names) else None


def _short(number: float) -> str:
    return f"{number:.6g}"


def _list(numbers: list[float]) -> str:
    return f"[{', '.join(map(_short, numbers))}]"


def _number(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) or math.isfinite(value) else None


def _numbers(values: Any) -> list[float | None]:
    return [_number(float(value)) for value in values]
